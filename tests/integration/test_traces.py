"""Traces of steps in a collector. Each trace has spans of the trainer, the middleware and every server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from otlp import Receiver, Span
from stack import MakeStack, Stack, missing

from persia.launch.local_job import Kind
from persia.utils import find_free_port

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SCRIPT = """
import torch
from conftest import Batches, TinyModel

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD

model = TinyModel()
dense = torch.optim.SGD(model.parameters(), 0.1)
with TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model) as ctx:
    for batch in DataLoader(Batches(6)):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
print(f"trained on {batch.step} steps")
"""
SERVERS = 2
RANKS = 2
LOOP = {"data wait", "look-up wait", "forward", "backward", "all-reduce", "queue gradients", "optimizer", "agreement"}
ENGINE = {"plan", "staleness wait", "look-up", "pool", "segment sum", "push"}
WAITS = {"memory wait", "receive", "turn wait"}


def parts(servers: int) -> list[str]:
    return ["middleware-0", *(f"server-{index}" for index in range(servers))]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def only(found: list[Span], name: str, **wanted: object) -> Span:
    """Return the only span with this name and these attributes of the span or of its process."""
    keys = {key.replace("_", "."): value for key, value in wanted.items()}
    (span,) = [
        span
        for span in found
        if span.name == name and all({**span.resource, **span.attributes}.get(key) == keys[key] for key in keys)
    ]
    return span


@pytest.mark.row("S4-47")
def test_one_trace_has_trainer_middleware_and_every_server(
    make_stack: MakeStack, receiver: Receiver, script: Path, tmp_path: Path
) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "PERSIA_LOG": "persia.server=debug,info"}
    stack: Stack = make_stack(servers=SERVERS, env=env)
    assert stack.trainer(script, ranks=RANKS, env={"PERSIA_TRACE_EVERY": "0"}).wait() == 0
    traced = {"PERSIA_TRACE_EVERY": "3", "PERSIA_RUN_DIR": str(tmp_path / "traced")}
    trainer = stack.trainer(script, ranks=RANKS, env=traced)
    assert trainer.wait() == 0, trainer.output
    assert [stack.stop(name) for name in parts(SERVERS)] == [0] * (1 + SERVERS)

    traces = receiver.traces()
    steps = {(only(found, "step").attributes["persia.rank"], only(found, "step").attributes["persia.step"]): found
             for found in traces.values()}  # fmt: skip
    assert {*steps} == {(rank, step) for rank in range(RANKS) for step in (3, 6)} and len(traces) == len(steps)
    for (rank, step), found in steps.items():
        check(found, rank, step)
        token = only(found, "step").attributes["persia.token"]
        for index in range(SERVERS):
            lines = [line for line in stack.parts[f"server-{index}"].lines if f'token="{token}"' in line]
            assert [event for event in ("look-up served", "push applied") if event in "\n".join(lines)], token


def check(found: list[Span], rank: int, step: int) -> None:
    """Check the trace of a step of a rank."""
    ids = {span.id: span for span in found}
    assert len(ids) == len(found) and all(span.error is None for span in found)
    root = only(found, "step")
    assert root.parent == "" and root.service == "persia-trainer"
    generation = root.attributes["persia.token"].split("/")[1]
    for span in found:
        assert span.attributes["persia.token"].split("/", 1)[1] == f"{generation}/{rank}/{step}", span
        assert (span.attributes["persia.step"], span.attributes["persia.rank"]) == (step, rank)
        assert span.attributes["persia.run_id"] == "test" and span.resource["service.version"]
        assert span is root or span.parent in ids, span
        assert 0 < span.start <= span.end, span
    of_trainer = [span for span in found if span.service == "persia-trainer"]
    names = {span.name for span in of_trainer}
    assert names == {"step", "read batch", *LOOP, *ENGINE}, names
    below_root = {"read batch", "data wait", "look-up wait", "forward", *ENGINE}
    assert {span.parent for span in of_trainer if span.name in below_root} == {root.id}
    services = {(span.service, span.resource["persia.replica"]) for span in found}
    servers = {("persia-server", index) for index in range(SERVERS)}
    assert services == {("persia-trainer", rank), ("persia-middleware", 0), *servers}
    for method, asked, work in (("lookup", "look-up", "read rows"), ("push", "push", "apply")):
        client = only(found, asked, service_name="persia-trainer")
        between = only(found, method, service_name="persia-middleware")
        assert between.parent == client.id and (client.kind, between.kind) == ("client", "server")
        for index in range(SERVERS):
            calls = [each for each in found if each.name == f"{method} of a server"]
            (call,) = [each for each in calls if each.attributes["persia.server"] == index]
            served = only(found, method, service_name="persia-server", persia_replica=index)
            assert (call.parent, served.parent) == (between.id, call.id)
            assert {span.name for span in found if span.parent == served.id} == {*WAITS, work}
            assert client.start <= between.start <= call.start <= served.start <= served.end


def test_a_collector_that_is_gone_loses_spans_and_nothing_else(make_stack: MakeStack, script: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{find_free_port()}", "PERSIA_TRACE_EVERY": "1"}
    stack: Stack = make_stack(env=env)
    trainer = stack.trainer(script)
    assert trainer.wait() == 0 and "trained on 6 steps" in trainer.output, trainer.output
    names = parts(1)
    assert [stack.stop(name) for name in names] == [0, 0]
    for part in (trainer, *(stack.parts[name] for name in names)):
        told = [line for line in part.lines if "spans are lost" in line]
        assert len(told) == 1 and env["OTEL_EXPORTER_OTLP_ENDPOINT"] in told[0], part.output
        (total,) = [line for line in part.lines if "spans were lost" in line]
        assert "lost=" in total and "lost=0" not in total


def test_a_wrong_value_is_refused_by_its_name(make_stack: MakeStack, script: Path, receiver: Receiver) -> None:
    stack: Stack = make_stack(env={"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url})
    trainer = stack.trainer(script, env={"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"})
    assert trainer.wait() == 2, trainer.output
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=collector:4317: expected the URL" in trainer.output
    kinds: tuple[Kind, ...] = ("server", "middleware")
    for kind in kinds:
        assert stack.stop(f"{kind}-0") == 0
        part = stack.start_part(kind, env={"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
        assert part.wait() == 2, part.output
        assert part.lines[-1].startswith("error: OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf: expected grpc"), part.output
    assert receiver.spans == []
