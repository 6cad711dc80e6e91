"""Spans of the training loop: the spans of a step, and those that a collector receives in the embedded mode."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Batches, Configure
from otlp import Receiver
from test_training import SLOTS, loss_fn, make

from persia.data import DataLoader
from persia.errors import ConfigError, UsageError
from persia.monitor import trace
from persia.runtime import flight
from persia.utils import find_free_port

OTEL = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPORTER_OTLP_HEADERS")
LOOP = {"read batch", "data wait", "look-up wait", "forward", "backward", "queue gradients", "optimizer"}
ENGINE = {"plan", "staleness wait", "look-up", "pool", "segment sum", "push"}


@pytest.fixture(autouse=True)
def fresh(no_job: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that records no spans."""
    for name in (*OTEL, "PERSIA_TRACE_EVERY"):
        monkeypatch.delenv(name, raising=False)
    before, flight._state = flight._state, flight._State()
    yield
    flight._state = before
    assert trace._own is None


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


def train(steps: int, **options: Any) -> None:
    with make(**options) as ctx:
        for batch in DataLoader(Batches(steps)):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))


def test_every_nth_step_is_a_trace(configure: Configure, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_TRACE_EVERY", "3")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=staging")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer mine")
    train(7)
    by_step = {found[0].attributes["persia.step"]: found for found in receiver.traces().values()}
    assert {*by_step} == {3, 6}
    for step, found in by_step.items():
        (root,) = [span for span in found if span.name == "step"]
        assert root.attributes["persia.token"].split("/")[2:] == ["0", str(step)]
        assert root.attributes["persia.run_id"] == "persia" and root.parent == ""
        names = [span.name for span in found]
        assert {*names} == {"step", *LOOP, *ENGINE} and len(names) == len({*names}), names
        assert {span.parent for span in found if span is not root} == {root.id}
        for span in found:
            assert root.start <= span.start <= span.end <= root.end or span.name in {"read batch", *ENGINE}, span
    first = receiver.spans[0].resource
    assert (first["service.name"], first["persia.replica"]) == ("persia-trainer", 0)
    assert first["deployment.environment"] == "staging"
    assert all(each["authorization"] == "Bearer mine" for each in receiver.headers)


def test_the_next_context_is_traced_too_under_the_name_that_is_set(
    configure: Configure, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_TRACE_EVERY", "2")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ads")
    train(2)
    train(2)
    assert len(receiver.traces()) == 2
    assert {span.service for span in receiver.spans} == {"ads"}
    assert {span.resource["persia.service"] for span in receiver.spans} == {"persia-trainer"}


@pytest.mark.parametrize(("name", "value"), [("PERSIA_TRACE_EVERY", "0"), ("OTEL_SDK_DISABLED", "true")])
def test_nothing_is_sent_if_it_is_off(
    configure: Configure, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_TRACE_EVERY", "1")
    monkeypatch.setenv(name, value)
    train(3)
    assert receiver.headers == []


def test_without_an_endpoint_nothing_observes(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx:
        assert ctx._spans is None
        assert not any(isinstance(each, trace.StepSpans) for each in flight._state.observers)


def test_training_goes_on_without_its_collector(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(SLOTS)
    url = f"http://127.0.0.1:{find_free_port()}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("PERSIA_TRACE_EVERY", "1")
    train(5)
    told = capfd.readouterr().err
    assert told.count("spans are lost") == 1 and f"OTEL_EXPORTER_OTLP_ENDPOINT={url}" in told, told
    assert "lost=70" in told, told  # a step has 14 spans


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", ConfigError),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", ConfigError),
        ("OTEL_TRACES_EXPORTER", "zipkin", ConfigError),
        ("PERSIA_TRACE_EVERY", "-1", UsageError),
    ],
)
def test_a_wrong_value_is_named(
    configure: Configure,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    error: type[Exception],
) -> None:
    configure(SLOTS)
    monkeypatch.setenv(name, value)
    with pytest.raises(error, match=f"{name}='?{value}"):
        train(1)
    assert receiver.headers == []


class Context:
    engine: Any = None


def call(verb: str, began: float, ended: float, thread: int = 1) -> Any:
    return SimpleNamespace(verb=verb, began=began, seconds=ended - began, thread=thread, error="")


def test_a_call_inside_another_one_has_it_as_parent() -> None:
    calls = [
        call("look-up", 1, 2),
        call("push", 3, 4),
        call("optimizer", 4, 5),
        call("backward", 3, 6),
        call("checkpoint", 2.5, 7),
        call("read", 0, 9, thread=2),
    ]
    found = [*trace.recorded(calls, 100.0)]
    assert [parent for *_, parent, _ in found] == [None, 3, 3, 4, None, None]
    assert found[0] == ("look-up", 101, 102, None, "")


def test_steps_that_are_not_traced_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    monkeypatch.setattr("persia.monitor.trace.core.record_step", lambda engine, step, *rest: recorded.append(step))
    spans = trace.StepSpans(100)
    ctx = Context()
    spans.open(ctx)
    spans.begin_loop(0)
    for step in range(1, 301):
        for verb in (flight.LOOK_UP, flight.FORWARD):
            with flight.Call(verb, step) as one:
                pass
            spans.ended(one)
        assert len(spans._calls) == (2 if step % 100 == 0 else 0)
        spans.stepped(step)
    assert recorded == [100, 200, 300]
