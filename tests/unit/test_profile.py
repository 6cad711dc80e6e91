"""The profile of a run: spans, times, a trace, and advice that names the bottleneck."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Batches, Configure, TinyModel, Verb
from test_training import SLOTS
from trainer_files import config_of, fit, write_clicks, write_config

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import UsageError
from persia.profile import Profiler, advice, report, stages
from persia.profile import memory as host_memory
from persia.profile.profiler import Schedule, percentile
from persia.runtime import flight
from persia.trainer import StepReport, Trainer
from persia.trainer.limits import Limits

SPANS = ("data wait", "look-up", "forward", "backward", "push", "optimizer")


class SlowBatches(Batches):
    """Reads a batch in 200 ms, which is far longer than a step, even on a busy machine."""

    def batch(self, number: int, *, requires_grad: bool = True) -> PersiaBatch:
        time.sleep(0.2)
        return super().batch(number, requires_grad=requires_grad)


class BigModel(TinyModel):
    """Computes for some milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.big = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        small = super().forward(non_id_tensors, embedding_tensors)
        big: torch.Tensor = self.big(small.expand(-1, 1024)).mean(1, keepdim=True)
        return small + big


def profile(folder: Path, data: Batches, model: TinyModel, staleness: int = 8, **plan: int) -> list[report.RankProfile]:
    given: dict[str, Any] = {"wait": 2, "warmup": 1, "active": 12, **plan}
    schedule = Schedule(**given)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    with (
        TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model) as ctx,
        Profiler(folder, ctx, schedule, facts={"staleness": staleness}),
    ):
        for batch in DataLoader(data, embedding_staleness=staleness):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
    return report.read(folder)


@pytest.mark.row("S4-62")
@pytest.mark.parametrize(
    ("data", "model", "limit", "change"),
    [(SlowBatches, TinyModel, "data", "data-compose"), (Batches, BigModel, "dense", "train.threads")],
)
def test_the_bottleneck_is_named_with_what_to_change(
    configure: Configure,
    tmp_path: Path,
    data: Callable[[int], Batches],
    model: Callable[[], TinyModel],
    limit: str,
    change: str,
) -> None:
    """Tests with look-ups, pushes and several ranks are in tests/integration/test_bottlenecks.py."""
    configure(SLOTS)
    found = advice.advise(profile(tmp_path / "profile", data(20), model()))
    assert found.limit == limit and change in found.text, str(found)


@pytest.mark.row("S3-18", "S3-19", "S4-57")
def test_steps_are_recorded_as_scheduled_with_a_trace(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    (found,) = profile(tmp_path, Batches(30), TinyModel(), wait=3, warmup=2, active=7)
    content = found.content
    assert content["steps"] == [6, 12]
    assert set(SPANS) < set(content["calls"])
    for verb in SPANS:
        row = content["calls"][verb]
        assert row["count"] == 7 and 0 <= row["p50_ms"] <= row["p99_ms"]
    assert sum(row["seconds"] for row in content["calls"].values()) == pytest.approx(content["seconds"], rel=0.01)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0.json", "rank-0.pt.trace.json"}
    events = json.loads((tmp_path / "rank-0.pt.trace.json").read_text())["traceEvents"]
    names = [str(event.get("name", "")) for event in events]
    assert {name for name in names if name.startswith("ProfilerStep#")} == {f"ProfilerStep#{n}" for n in range(5, 12)}
    spans = [name for name in names if name.startswith("persia: ")]
    assert {spans.count(f"persia: {verb}") for verb in ("forward", "backward", "push", "optimizer")} == {7}
    assert any(event.get("name") == "aten::linear" for event in events)


@pytest.mark.row("S4-35")
def test_look_ups_and_pushes_are_spans_of_the_trace(configure: Configure, tmp_path: Path) -> None:
    """For each event, Perfetto and chrome://tracing need a name, a phase, and start and duration in microseconds."""
    configure(SLOTS)
    profile(tmp_path, Batches(12), TinyModel(), wait=2, warmup=1, active=5)
    events = json.loads((tmp_path / "rank-0.pt.trace.json").read_text())["traceEvents"]
    spans = [each for each in events if str(each.get("name", "")).startswith("persia: ") and each["ph"] == "X"]
    for verb in SPANS:
        mine = [each for each in spans if each["name"] == f"persia: {verb}"]
        assert len(mine) == 5, verb
        assert all(each["dur"] >= 0 and {"ts", "pid", "tid"} <= each.keys() for each in mine)
    order = [each["name"] for each in sorted(spans, key=lambda each: float(each["ts"]))][-len(SPANS) :]
    assert order == [f"persia: {verb}" for verb in SPANS]


@pytest.mark.row("S4-33")
def test_a_profile_of_memory_names_the_operations_that_allocate(tmp_path: Path, verb: Callable[..., str]) -> None:
    fit(config_of(tmp_path, profile={"wait": 2, "warmup": 1, "active": 5, "memory": True}))
    out = verb("profile", "memory", "runs/one")
    assert out.startswith("rank 0") and "CPU Mem" in out and "aten::" in out
    assert out == verb("profile", "memory", "runs/LATEST")
    sizes = [line for line in out.splitlines() if "aten::" in line]
    assert len(sizes) >= 5 and any("Kb" in line or "KB" in line or "Mb" in line or " B " in line for line in sizes)
    (tmp_path / "runs" / "one" / "profile" / "rank-0.memory.txt").unlink()
    refused = verb("profile", "memory", "runs/one", code=2)
    assert "has no record of memory" in refused and "--profile --set profile.memory=true" in refused


@pytest.mark.row("S4-57")
@pytest.mark.parametrize(("stack", "frames"), [(False, False), (True, True)])
def test_stacks_are_in_the_trace_if_they_are_wanted(
    configure: Configure, tmp_path: Path, stack: bool, frames: bool
) -> None:
    configure(SLOTS)
    profile(tmp_path, Batches(5), TinyModel(), wait=1, warmup=1, active=2, stack=stack)
    text = (tmp_path / "rank-0.pt.trace.json").read_text()
    assert ("test_profile.py" in text) == frames


@pytest.mark.row("S4-57")
def test_the_block_of_the_configuration_is_the_schedule(tmp_path: Path) -> None:
    fit(config_of(tmp_path, profile={"wait": 3, "warmup": 2, "active": 4, "stack": True}))
    (found,) = report.read(tmp_path / "runs" / "one")
    assert found.content["steps"] == [6, 9] and found.content["calls"]["forward"]["count"] == 4
    text = (tmp_path / "runs" / "one" / "profile" / "rank-0.pt.trace.json").read_text()
    assert {*re.findall(r"ProfilerStep#\d+", text)} == {f"ProfilerStep#{n}" for n in range(5, 9)}
    assert "trainer_files.py" in text


def test_a_loop_that_is_too_short_is_a_warning(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    monkeypatch.setattr("persia.profile.profiler._logger.propagate", True)
    with pytest.raises(UsageError, match="no profile"):
        profile(tmp_path, Batches(3), TinyModel(), wait=5)
    assert "Steps of the loop: 3; steps at the start that are not recorded: 6 (profile.wait=5" in caplog.text
    (found,) = profile(tmp_path, Batches(9), TinyModel(), wait=5, warmup=1, active=50)
    assert found.content["steps"] == [7, 9]
    with pytest.raises(UsageError, match="no profile"):  # an earlier profile is not used instead
        profile(tmp_path, Batches(3), TinyModel(), wait=5)


def test_mistakes_of_a_profile_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="wait=-1"):
        Schedule(wait=-1)
    with pytest.raises(UsageError, match="active=0"):
        Schedule(active=0)
    made = {"rank": 0, "world_size": 2, "seconds": 1.0, "calls": {}, "engine": {}, "staleness": 4, "steps": [1, 2]}
    (tmp_path / "rank-0.json").write_text(json.dumps(made))
    with pytest.raises(
        UsageError, match="expected the files of 2 ranks, found none of rank 1: if a rank ended with an error"
    ):
        report.read(tmp_path)
    (tmp_path / "rank-0.json").write_text(json.dumps({**made, "world_size": 3}))
    with pytest.raises(UsageError, match="expected the files of 3 ranks, found none of ranks 1, 2: if a rank ended"):
        report.read(tmp_path)
    (tmp_path / "rank-0.json").write_text(json.dumps({**made, "world_size": 1}))
    (tmp_path / "rank-1.json").write_text(json.dumps({**made, "rank": 1, "world_size": 1}))
    with pytest.raises(UsageError, match="expected the files of 1 rank, found those of 2: remove the files of"):
        report.read(tmp_path)
    (tmp_path / "rank-1.json").write_text("{")
    with pytest.raises(UsageError, match="cannot read a profile of a rank from .*rank-1.json"):
        report.read(tmp_path)


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.5) == 7.0 and percentile([], 0.5) == 0.0


def of_rank(rank: int, *, staleness: int = 4, **seconds: float) -> report.RankProfile:
    content = {"servers": True, "staleness": staleness, "threads": 2}
    return report.RankProfile(rank, content, {**dict.fromkeys(stages.STAGES, 0.0), **seconds})


@pytest.mark.parametrize(
    ("profiles", "limit", "rank", "text"),
    [
        ([of_rank(0, data=8, dense=2)], "data", None, "data-compose"),
        ([of_rank(0, lookup=6, dense=4)], "lookup", None, "--servers"),
        ([of_rank(0, push=6, dense=4, staleness=1)], "push", None, "train.staleness from 1"),
        ([of_rank(0, push=6, dense=4)], "push", None, "train.staleness from 4 to 8"),
        ([of_rank(0, dense=6, data=4)], "dense", None, "train.threads from 2"),
        ([of_rank(0, checkpoint=6, data=4)], "checkpoint", None, "checkpoint.every"),
        ([of_rank(0, ranks=6, dense=4), of_rank(1, dense=9, ranks=1)], "ranks", 1, "train.threads"),
        ([of_rank(0, data=9, ranks=1), of_rank(1, dense=4, ranks=6)], "ranks", 0, "data-compose"),
        ([of_rank(0, ranks=6, dense=4), of_rank(1, ranks=6, dense=4)], "ranks", None, "dist.interface"),
    ],
)
@pytest.mark.row("S4-62")
def test_the_advice(profiles: list[report.RankProfile], limit: str, rank: int | None, text: str) -> None:
    found = advice.advise(profiles)
    assert (found.limit, found.rank) == (limit, rank) and text in str(found)


@pytest.mark.row("S4-62")
def test_the_wait_for_look_ups_is_that_for_pushes_where_the_staleness_holds_them_back() -> None:
    calls = {"look-up": 3.0, "all-reduce": 1.0, "agreement": 1.0, "forward": 2.0, "checkpoint": 0.5}
    found = stages.stages(calls, 10.0, {"lookup": 2.0, "permit_wait": 1.0}, staleness=4)
    assert found == {"dense": 4.5, "data": 0.0, "lookup": 3.0, "push": 0.0, "ranks": 2.0, "checkpoint": 0.5}
    for engine, staleness in (({"lookup": 1.0, "permit_wait": 2.0}, 4), ({"lookup": 1.0}, 1)):
        found = stages.stages(calls, 10.0, engine, staleness=staleness)
        assert (found["lookup"], found["push"]) == (0.0, 3.0)


def test_an_evaluation_counts_neither_in_a_profile_nor_in_the_shares(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    limits, model = Limits(8), TinyModel()
    dense = torch.optim.SGD(model.parameters(), 0.1)
    with (
        TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model) as ctx,
        Profiler(tmp_path, ctx, Schedule(0, 1, 7)),
    ):
        for batch in DataLoader(Batches(8), embedding_staleness=8):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
            limits.stepped()
            if batch.step == 4:
                with flight.Call(flight.AGREEMENT):
                    time.sleep(3.0)
                limits.apart()
    seconds, shares = limits.take({})
    assert seconds < 3.0 and shares["ranks"] == 0.0
    (found,) = report.read(tmp_path)
    assert found.content["seconds"] < 3.0 and "agreement" not in found.content["calls"]


@pytest.mark.row("S3-36")
def test_communication_is_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with Trainer(config) as trainer:
        with pytest.raises(UsageError, match="nothing is being trained"):
            trainer.comm.stats()
        found: dict[str, Any] = {}
        for each in trainer.fit():
            if isinstance(each, StepReport) and not found:
                before, found = found, trainer.comm.stats()
                assert not before and each.shares.keys() == set(stages.STAGES)
    assert json.loads(json.dumps(found)) == found
    assert found["calls"]["look-up"]["count"] >= 4 and found["calls"]["push"]["p99_ms"] > 0
    assert found["engine"]["lookup"] > 0 and found["pushes"] and found["calls"]["all-reduce"]["count"] == 0


@pytest.fixture
def verb(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a verb, and return its output and its errors together."""
    monkeypatch.setenv("LOG_LEVEL", "warning")
    return lambda *arguments, **options: "".join(verb(*arguments, **options))


@pytest.mark.row("S4-62")
def test_the_report_is_one_page_of_the_shares_of_each_rank_and_one_advice(
    tmp_path: Path, verb: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    seconds = {"look-up": 2.0, "all-reduce": 1.0, "agreement": 0.5, "data wait": 1.5, "checkpoint": 1.0}
    calls = {verb: {"count": 10, "seconds": each} for verb, each in seconds.items()}
    engine = {"lookup": 1.0, "permit_wait": 0.5}
    made = {"world_size": 2, "seconds": 10.0, "calls": calls, "engine": engine, "staleness": 4, "servers": True}
    made |= {"step": {"p50_ms": 900.0, "p99_ms": 1100.0}, "threads": 1}
    (tmp_path / "rank-0.json").write_text(json.dumps({**made, "rank": 0}))
    held_back = {"lookup": 0.5, "permit_wait": 1.0}
    (tmp_path / "rank-1.json").write_text(json.dumps({**made, "rank": 1, "engine": held_back}))
    lines = verb("profile", "report", str(tmp_path)).splitlines()
    cells = [[*re.sub("[┃│]", " ", line).split()] for line in lines]
    header = cells.index(next(each for each in cells if "dense" in each))
    assert cells[header][-6:] == ["dense", "data", "lookup", "push", "ranks", "checkpoint"]
    assert ["rank", "0", "900.00", "1100.00", "40%", "15%", "20%", "0%", "15%", "10%"] in cells
    assert ["rank", "1", "900.00", "1100.00", "40%", "15%", "0%", "20%", "15%", "10%"] in cells
    assert len(lines) < 40 and [line.startswith("limited by ") for line in lines].count(True) == 1
    assert lines[-1].startswith("limited by dense: the model and the script compute during 40% of the time: raise ")


@pytest.mark.row("S4-62")
def test_train_with_a_profile_ends_with_the_advice(tmp_path: Path, verb: Callable[..., str]) -> None:
    write_clicks(tmp_path / "clicks.parquet", 6000)
    config = str(write_config(tmp_path))
    out = verb("train", config, "--profile")
    assert "p99 ms" in out and "limited by " in out
    assert "trace: runs/one/profile/rank-0.pt.trace.json" in out
    lines = verb("profile", "report", "runs/one").splitlines()
    assert lines[-1].startswith("limited by ") and "rank 0" in "".join(lines)
    steps = verb("profile", "steps", "runs/LATEST")
    assert all(span in steps for span in SPANS) and "steps 11 to 30" in steps


def test_a_run_without_a_profile_says_how_to_record_one(tmp_path: Path, verb: Callable[..., str]) -> None:
    fit(config_of(tmp_path))
    out = verb("profile", "report", "runs/one", code=2)
    assert "no profile" in out and "persia train persia.yml --profile" in out


def test_memory_without_memray_says_how_to_get_it(
    tmp_path: Path, verb: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "find_spec", lambda name: None)
    out = verb("profile", "memory", "persia.yml", code=2)
    assert "memray, which is not installed" in out and "next:  pip install memray" in out


@pytest.mark.nightly  # memray records the import of torch for most of a minute
def test_memory_of_training_is_recorded(tmp_path: Path, verb: Callable[..., str]) -> None:
    pytest.importorskip("memray")
    write_clicks(tmp_path / "clicks.parquet", 500)
    verb("profile", "memory", str(write_config(tmp_path)), "-o", "memory")
    assert (tmp_path / "memory" / host_memory.RECORD).stat().st_size > 0
    assert "persia" in (tmp_path / "memory" / host_memory.PAGE).read_text()
    assert "memray.bin already exists" in verb("profile", "memory", "persia.yml", "-o", "memory", code=2)
