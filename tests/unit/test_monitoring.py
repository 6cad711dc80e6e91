"""Metrics of a rank: the content of a scrape, the port, and the metrics that a short run pushes."""

import contextlib
import errno
import http.server
import json
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Batches, Configure
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from test_training import SLOTS, loss_fn, make, train
from trainer_files import config_of, fit

from persia.ctx import Checkpoints
from persia.data import DataLoader
from persia.errors import AuthError, ConfigError, StorageError, UsageError
from persia.loop import autosave
from persia.monitor import exporter, feeding, memory, series
from persia.monitor import trainer as monitor
from persia.runtime import flight
from persia_core import checkpoint as _core

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(autouse=True)
def fresh(no_job: None) -> Iterator[None]:
    """A process that serves no metrics yet."""
    before, flight._state = flight._state, flight._State()
    monitor._exported.own = feeding._exported.own = None
    yield
    monitor._exported.own = feeding._exported.own = None
    flight._state = before


def read(address: str) -> Samples:
    """Return the samples at an address."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return parse(text)


def parse(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted({"rank": "0", **labels}.items()))]


def own() -> exporter.Exporter:
    assert monitor._exported.own is not None
    return monitor._exported.own[1]


@pytest.mark.row("S4-45")
def test_a_scrape_has_what_was_trained(configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "127.0.0.1:0")
    with make(checkpoints=Checkpoints(tmp_path / "saves", every=4)) as ctx:
        loss = 0.0
        for batch in DataLoader(Batches(10), embedding_staleness=3):
            output, labels = ctx.forward(batch)
            loss = float(ctx.backward(loss_fn(output, labels[0])))
            if batch.step == 8:
                during = read(own().address)
        ctx._backend.join_checkpoint_thread()
        after = read(own().address)
        assert ctx.engine.generation == of(after, "persia_trainer_generation")
    assert of(during, "persia_trainer_step") == of(during, "persia_trainer_steps_total") == 8
    assert of(during, "persia_trainer_samples_total") == 8 * 32
    assert of(after, "persia_trainer_step") == of(after, "persia_trainer_step_duration_seconds_count") == 10
    assert of(after, "persia_trainer_loss") == pytest.approx(loss)
    assert of(after, "persia_trainer_grad_norm") > 0
    assert of(after, "persia_trainer_staleness_limit") == 3
    for call in ("data_wait", "look_up", "forward", "backward", "push", "optimizer"):
        assert of(after, "persia_trainer_call_duration_seconds_count", call=call) >= 10, call
    stages = [of(after, "persia_trainer_stage_seconds_total", stage=stage) for stage in ("dense", "lookup", "push")]
    whole = of(after, "persia_trainer_step_duration_seconds_sum")
    assert 0 < sum(stages) <= whole * 1.001
    everything = sum(value for (name, _), value in after.items() if name == "persia_trainer_stage_seconds_total")
    assert everything == pytest.approx(whole, rel=1e-6)
    assert of(after, "persia_trainer_checkpoint_interval_steps") == 4
    assert of(after, "persia_trainer_checkpoint_step") == 10
    assert 0 <= of(after, "persia_trainer_checkpoint_age_seconds") < 60
    assert of(after, "persia_trainer_call_duration_seconds_count", call="checkpoint_write") == 3
    assert of(after, "persia_trainer_call_duration_seconds_count", call="checkpoint") >= 3
    assert of(after, "persia_trainer_checkpoint_failures_total") == 0
    assert of(after, "persia_trainer_ids_total", slot="a", kind="occurrences") == 10 * 32
    pushed = of(after, "persia_trainer_push_rows_total", outcome="applied")
    assert pushed == of(after, "persia_trainer_push_rows_total", outcome="pushed") > 0
    assert of(after, "persia_trainer_recovery_duration_seconds") > 0
    parameters = sum(each.numel() for each in ctx.model.parameters()) if ctx.model is not None else 0
    assert of(after, "persia_trainer_parameters") == parameters
    assert of(after, "persia_trainer_parameter_bytes") == 4 * parameters
    assert after["process_resident_memory_bytes", ()] > 1 << 20


def test_counters_go_on_in_the_next_context_and_evaluations_are_no_steps(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "127.0.0.1:0")
    now = [0.0]
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    for _ in range(2):
        with make() as ctx:
            for batch in DataLoader(Batches(3)):
                output, labels = ctx.forward(batch)
                ctx.backward(loss_fn(output, labels[0]))
                now[0] += 1000.0
                flight.apart()  # as an evaluation does
    samples = read(own().address)
    assert of(samples, "persia_trainer_samples_total") == 2 * 3 * 32
    assert of(samples, "persia_trainer_steps_total") == 6
    assert of(samples, "persia_trainer_step_duration_seconds_sum") == 0
    assert ("persia_trainer_loss", (("rank", "0"),)) not in samples  # no context is open
    assert ("persia_trainer_checkpoint_age_seconds", (("rank", "0"),)) not in samples  # the run has no checkpoints


def test_a_checkpoint_that_cannot_be_written_grows_old_and_is_counted(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "127.0.0.1:0")
    monkeypatch.setattr("persia.loop.autosave.RETRY_S", ())
    checkpoints = Checkpoints(tmp_path / "saves", every=2)
    with make(checkpoints=checkpoints) as ctx:
        for batch in DataLoader(Batches(6)):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            if batch.step == 3:
                ctx._backend.join_checkpoint_thread()
                (tmp_path / "saves").rename(tmp_path / "away")
                (tmp_path / "saves").write_text("")
            if batch.step == 6:
                samples = read(own().address)
                (tmp_path / "saves").unlink()
                (tmp_path / "away").rename(tmp_path / "saves")
    assert of(samples, "persia_trainer_checkpoint_step") == 2
    assert of(samples, "persia_trainer_checkpoint_failures_total") == 1


def test_a_checkpoint_that_differs_when_it_is_read_again_is_not_written(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "127.0.0.1:0")
    monkeypatch.setattr(autosave, "RETRY_S", ())
    checkpoint = _core.Checkpoint

    def opened(path: Path) -> Any:
        if Path(path).name == "step-2":
            raise StorageError("step-2: dense.pt differs")
        return checkpoint(path)

    monkeypatch.setattr(_core, "Checkpoint", opened)
    with make(checkpoints=Checkpoints(tmp_path / "saves", every=2, verify=True)) as ctx:
        for batch in DataLoader(Batches(4)):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            if batch.step == 3:
                ctx._backend.join_checkpoint_thread()
                failed = read(own().address)
        after = read(own().address)
    assert of(failed, "persia_trainer_checkpoint_failures_total") == 1
    assert ("persia_trainer_checkpoint_step", (("rank", "0"),)) not in failed
    assert of(failed, "persia_trainer_checkpoint_age_seconds") == of(failed, "persia_trainer_step_duration_seconds_sum")
    assert of(after, "persia_trainer_checkpoint_step") == 4


def test_the_age_of_a_checkpoint_is_the_time_of_the_steps_since(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    ctx: Any = pytest  # any object that supports weak references
    saves, metrics = SimpleNamespace(every=2, written=0, failed=0), monitor.TrainerMetrics()
    monkeypatch.setattr(metrics, "_add_context", lambda *_: None)

    def age() -> float:
        samples = [sample for family in metrics.collect() for sample in family.samples]
        return next(each.value for each in samples if each.name == "persia_trainer_checkpoint_age_seconds")

    def step(number: int) -> None:
        now[0] += 10.0
        metrics.stepped(number)

    metrics.open(ctx, saves)
    now[0] = 500.0  # the features are prepared
    metrics.begin_loop(1, 0, None)
    assert age() == 0
    step(1)
    step(2)
    assert age() == 20
    now[0] += 1000.0  # an evaluation
    assert age() == 20
    metrics.apart()
    step(3)
    assert age() == 30
    saves.written = 2
    step(4)
    step(5)
    assert age() == 10


def test_the_buckets_are_cumulative_and_a_limit_is_in_its_bucket() -> None:
    durations = series.Durations()
    for seconds in (0.0001, 0.0005, 0.3, 1000.0):
        durations.add(seconds)
    buckets = dict(durations.buckets)
    assert (buckets["0.0005"], buckets["0.25"], buckets["0.5"], buckets["300.0"], buckets["+Inf"]) == (2, 2, 3, 3, 4)
    assert durations.total == pytest.approx(1000.3006)


def test_without_the_variable_embedded_training_opens_no_port(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(1)))
    assert monitor._exported.own is None and not flight._state.observers


def test_where_a_job_serves_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    assert exporter._place() == ("127.0.0.1", 9464)
    token = tmp_path / "token"
    token.write_text("x" * 32)
    monkeypatch.setenv("PERSIA_TOKEN_FILE", str(token))
    assert exporter._place() == ("0.0.0.0", 9464)  # noqa: S104
    (tmp_path / "global.yml").write_text("common_config: {metrics_config: {enable_metrics: false}}\n")
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", "global.yml")
    assert exporter._place() is None and not exporter.wanted()
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "127.0.0.1:1")
    assert exporter._place() == ("127.0.0.1", 1)
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "off")
    assert exporter._place() is None


def test_wrong_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "0.0.0.0:0")
    with pytest.raises(AuthError, match="PERSIA_METRICS_LISTEN"):
        monitor.start()
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "9464")
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        monitor.start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PERSIA_METRICS_LISTEN", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UsageError, match="Address already in use") as raised:
            monitor.start()
        assert "127.0.0.1:0" in str(raised.value.hint)
    monkeypatch.delenv("PERSIA_METRICS_LISTEN")
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")

    def in_use(host: str, number: int, _: CollectorRegistry) -> int:
        raise OSError(errno.EADDRINUSE if number else errno.EMFILE, "no port" if number else "no descriptor")

    monkeypatch.setattr("persia.monitor.port.serve", in_use)
    with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1:0: no descriptor") as raised:
        monitor.start()
    assert raised.value.hint == "choose another address, or PERSIA_METRICS_LISTEN=off for no metrics"
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "127.0.0.1:65534")
    with pytest.raises(UsageError, match="local rank 2 would have port 65536, above 65535"):
        exporter.Exporter(monitor.TrainerMetrics(), "trainer-2", offset=2)


def test_a_gateway_with_a_password_is_refused_and_the_password_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("http://me:p/w@10.0.0.1:9091", "http://me:2024/w@10.0.0.1:9091", "http://10.0.0.1:9091/p/w@x"):
        monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", given)
        with pytest.raises(UsageError, match="PERSIA_METRICS_GATEWAY_ADDR contains an @; .*not supported") as raised:
            monitor.start()
        assert "/w" not in f"{raised.value} {raised.value.hint}"


@contextlib.contextmanager
def two_ports() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Listen on a port and the next one."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            try:
                after = stack.enter_context(socket.create_server(("127.0.0.1", first.getsockname()[1] + 1)))
            except (OSError, OverflowError):  # in use, or above 65535
                continue
            yield first, after
            return


def test_the_default_port_gives_way_and_ranks_of_a_host_have_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    with two_ports() as (taken, after):
        port = taken.getsockname()[1]
        monkeypatch.setattr(exporter, "PORT", port)
        first = exporter.Exporter(monitor.TrainerMetrics(), "trainer-0")
        after.close()
        assert first.address and not first.address.endswith(f":{port}")
        second = exporter.Exporter(monitor.TrainerMetrics(), "trainer-1", offset=1)
        assert second.address.endswith(f":{port + 1}")


class Gateway:
    """A push gateway that stores the pushed data."""

    def __init__(self, status: int = 200) -> None:
        pushed: list[tuple[str, str, str]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                pushed.append((self.command, self.path, body))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.pushed = pushed
        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.close()


@pytest.mark.row("S4-44", "S4-45")
def test_a_short_run_is_pushed_at_its_end(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, gateway: Gateway
) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", gateway.address)
    monkeypatch.setenv("PERSIA_JOB", "short")
    with make() as ctx:
        train(ctx, DataLoader(Batches(4)))
        assert not gateway.pushed
    ((_, path, body),) = gateway.pushed
    assert path == "/metrics/job/short/instance/trainer-0"
    samples = parse(body)
    assert of(samples, "persia_trainer_steps_total") == 4 and of(samples, "persia_trainer_loss") > 0
    assert own().address == "", "it has no port"


def test_a_long_run_is_scraped_and_not_pushed(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, gateway: Gateway
) -> None:
    configure(SLOTS)
    monkeypatch.setattr(exporter, "SHORT_S", 0.0)
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", gateway.address)
    with make() as ctx:
        train(ctx, DataLoader(Batches(1)))
    assert not gateway.pushed


def test_a_long_run_without_a_port_is_pushed(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, gateway: Gateway
) -> None:
    configure(SLOTS)
    monkeypatch.setattr(exporter, "SHORT_S", 0.0)
    monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", gateway.address)
    with make() as ctx:
        train(ctx, DataLoader(Batches(1)))
    assert own().address == "" and len(gateway.pushed) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_metrics_that_cannot_be_read_do_not_keep_the_backend_open(
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
    gateway: Gateway,
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", gateway.address)

    def broken(*_: object) -> dict[str, int]:
        raise error("CUDA error: an illegal memory access was encountered")

    left = pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else contextlib.nullcontext()
    with caplog.at_level(logging.WARNING), left, make() as ctx:
        train(ctx, DataLoader(Batches(1)))
        backend = ctx._backend
        monkeypatch.setattr(memory, "device", broken)
    assert backend.closed and ctx.common_context is None
    logged = any("illegal memory access" in record.getMessage() for record in caplog.records)
    assert logged == (error is RuntimeError)


@pytest.mark.parametrize("wrong", ["127.0.0.1:1", "http://[", "refuses"])
def test_a_gateway_that_takes_nothing_is_logged_and_the_run_ends_well(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    configure(SLOTS)
    refuses = Gateway(status=500)
    monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", refuses.address if wrong == "refuses" else wrong)
    with caplog.at_level(logging.WARNING), make() as ctx:
        train(ctx, DataLoader(Batches(1)))
    refuses.close()
    assert any("cannot push the metrics of this run" in record.getMessage() for record in caplog.records)


def test_a_wrong_global_configuration_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "global.yml").write_text("common_config: {metrics_config: {enable_metrics: 7}}\n")
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(tmp_path / "global.yml"))
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    with pytest.raises(ConfigError, match="enable_metrics"):
        exporter.wanted()


@pytest.mark.row("S4-11")
def test_reports_have_the_memory(tmp_path: Path) -> None:
    trainer, _ = fit(config_of(tmp_path))
    assert trainer.folder is not None
    lines = [json.loads(line) for line in (trainer.folder.path / "metrics.jsonl").read_text().splitlines()]
    memory = [line["memory"] for line in lines if "samples_per_s" in line]
    assert len(memory) > 2 and all(each["resident"] > 1 << 20 for each in memory)
    assert set(memory[0]) == {"resident"} | ({"allocated"} if torch.cuda.is_available() else set())


def test_data_compose_counts_batches_and_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_METRICS_LISTEN", "127.0.0.1:0")
    started = feeding.start()
    assert started is not None
    metrics, served = started
    now = [10.0]
    monkeypatch.setattr(feeding, "time", SimpleNamespace(monotonic=lambda: now[0]))
    metrics.begin(7)
    now[0] = 12.0  # the batch was made at 11.5
    metrics.sent(32, 11.5)
    samples = read(served.address)
    replica = (("replica", "0"),)
    assert samples["persia_data_batches_total", replica] == 1 and samples["persia_data_samples_total", replica] == 32
    assert samples["persia_data_make_duration_seconds_sum", replica] == 1.5
    assert samples["persia_data_send_duration_seconds_sum", replica] == 0.5
    assert samples["persia_data_generation", replica] == 7
