"""In the embedded mode, batches at which training always fails are recorded, and skipped if this is configured."""

import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
from conftest import Batches
from failing_batches import BAD, META, Marked, Plain, fail, fails, record, run, without
from test_checkpoints import STEPS, names, step
from test_training import make

from persia.backend.local import LocalBackend
from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader
from persia.errors import UsageError
from persia_core import checkpoint as core
from persia_core.forward import TrainingBatch


def test_a_batch_that_fails_is_written_down(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for times, said in enumerate(("the 1st time", "the 2nd time", "the 3rd time", "the 4th time"), 1):
        caplog.clear()
        fail(1, run_folder, Marked)
        assert f"step 13 failed on rank 0 for {said}: ZeroDivisionError: at this batch; see {run_folder}" in caplog.text
        assert ("skip its step with Checkpoints(failing_batches='skip')" in caplog.text) == (times >= 3)
        assert record(run_folder) == {
            "step": 13,
            "rank": 0,
            "times": times,
            "position": {"batches": 13 if times == 1 else 3, "source": {"next": 13}},
            "checksum": zlib.crc32(Marked().batch(BAD).to_bytes()),
            "error": "ZeroDivisionError",
            "text": "at this batch",
            "meta": META.decode(),
        }
    assert names(run_folder / "poison") == ["step-13.rank-0.batch", "step-13.rank-0.json"]
    kept = (run_folder / "poison" / "step-13.rank-0.batch").read_bytes()
    assert kept == Marked().batch(BAD).to_bytes()
    with make() as ctx:
        assert ctx.get_embedding_from_bytes(kept).batch_size == 8


def test_it_is_no_checkpoint(run_folder: Path) -> None:
    fail(1, run_folder, Marked)
    assert names(run_folder) == ["LATEST", "poison", "step-10"]
    assert [Path(each["path"]).name for each in core.listing(run_folder)] == ["step-10"]
    assert core.prune(run_folder, 1) == []
    assert len(names(run_folder / "poison")) == 2


@pytest.mark.parametrize("where", ["in the loop's body", "behind forward", "refused"])
@pytest.mark.parametrize("data", ["with a state", "counted"])
def test_a_batch_that_always_fails_is_left_out(
    run_folder: Path, caplog: pytest.LogCaptureFixture, where: str, data: str
) -> None:
    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if where == "behind forward" and batch.meta is not None:
            ctx.prepare_features(batch)
        fails(ctx, batch)

    def source() -> Batches:
        marked = Marked(refused=where == "refused")
        if data == "counted":
            plain = Plain(STEPS)
            plain.batch = marked.batch  # type: ignore[method-assign]
            return plain
        return marked

    fail(3, run_folder, source, body, policy="skip")
    assert "the batch always fails, and its step is skipped when the run is restarted" in caplog.text
    ctx, checkpoints, found = run(run_folder, source, body, "skip")
    assert ctx.common_context is None and checkpoints.skipped == 1
    assert "step 13 skipped, model and rows unchanged: its batch on rank 0 always fails; 1 skipped" in caplog.text
    assert found == without(BAD)
    assert names(run_folder) == ["LATEST", "poison", "step-10", "step-20", "step-25"]
    assert record(run_folder)["times"] == 3  # the record is kept for examination


def test_a_save_right_behind_a_batch_that_is_left_out(run_folder: Path) -> None:
    fail(3, run_folder, Marked, every=13)
    _, _, expected = run(run_folder, Marked, policy="skip", every=13)
    assert names(run_folder) == ["LATEST", "poison", "step-13", "step-25"]
    shutil.rmtree(run_folder / "step-25")
    (run_folder / "LATEST").write_text("step-13\n")
    _, checkpoints, found = run(run_folder, Marked, policy="skip", every=13)
    assert checkpoints.skipped == 0
    assert found == expected


def test_the_end_is_behind_a_batch_that_is_left_out(run_folder: Path) -> None:
    fail(3, run_folder, lambda: Marked(BAD + 1))
    with make(checkpoints=Checkpoints(run_folder, every=10, failing_batches="skip")) as ctx:
        for batch in DataLoader(Marked(BAD + 1)):
            fails(ctx, batch)
        assert ctx.step == BAD + 1
    assert "step-13" in names(run_folder)


def test_a_batch_is_left_out_with_that_of_another_rank(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This rank's own batch has failed less often. If the other rank's batch has changed, nothing is skipped."""
    fail(2, run_folder, Marked)
    theirs = True

    def all_gather(self: LocalBackend, what: str, mine: Any) -> list[Any]:
        if what == "batches that always fail":
            assert mine == []
            return [[], [13]]
        if what == "next step" and self.trained_step == 12:
            left, votes = mine
            assert votes[0] is False
            return [mine, [left, [theirs, *votes[1:]]]]
        return [mine]

    monkeypatch.setattr(LocalBackend, "all_gather", all_gather)
    monkeypatch.setattr(LocalBackend, "gather", lambda _, mine: [mine])
    _, checkpoints, _ = run(run_folder, Marked, policy="skip")
    assert checkpoints.skipped == 1 and "its batch on rank 1 always fails" in caplog.text
    assert record(run_folder)["times"] == 2
    (run_folder / "step-25").rename(run_folder.parent / "step-25")
    (run_folder / "step-20").rename(run_folder.parent / "step-20")
    (run_folder / "LATEST").write_text("step-10\n")
    theirs = False
    with pytest.raises(ZeroDivisionError):
        run(run_folder, Marked, policy="skip")
    assert record(run_folder)["times"] == 3


def test_a_script_that_always_fails_leaves_nothing_out(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if batch.step > BAD:
            raise ZeroDivisionError
        step(ctx, batch)

    fail(3, run_folder, lambda: Batches(STEPS), body, policy="skip")
    fail(3, run_folder, lambda: Batches(STEPS), body, policy="skip")
    assert record(run_folder, 14)["times"] == 3
    assert "the batch always fails, like that of step 13: if more than one of 100 consecutive steps" in caplog.text
    caplog.clear()
    fail(2, run_folder, lambda: Batches(STEPS), body, policy="skip")
    assert "steps 13, 14 are not skipped, although their batches always fail: if more" in caplog.text
    assert "skipped, model and rows unchanged" not in caplog.text
    assert (record(run_folder, 13)["times"], record(run_folder, 14)["times"]) == (5, 3)
    _, checkpoints, _ = run(run_folder, lambda: Batches(STEPS), step, "skip")  # corrected
    assert checkpoints.skipped == 0
    assert names(run_folder / "poison") == []


def test_far_apart_both_are_left_out(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.loop.quarantine.MIN_STEP_DISTANCE", 5)

    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if batch.step in {3, 8}:
            raise ZeroDivisionError
        step(ctx, batch)

    fail(6, run_folder, lambda: Batches(10), body, policy="skip")
    _, checkpoints, _ = run(run_folder, lambda: Batches(10), body, "skip")
    assert checkpoints.skipped == 2


def test_a_batch_left_out_before_the_save_stops_no_later_one(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if batch.step in {13, 18}:
            raise ZeroDivisionError
        step(ctx, batch)

    fail(6, run_folder, lambda: Batches(STEPS), body, policy="skip", every=5)
    assert record(run_folder, 18)["times"] == 3
    assert "the batch always fails, like " not in caplog.text
    _, checkpoints, _ = run(run_folder, lambda: Batches(STEPS), body, "skip", every=5)
    assert checkpoints.skipped == 1
    assert "step-25" in names(run_folder)


def test_a_script_that_always_fails_leaves_nothing_out_where_each_step_is_saved(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if batch.step > BAD:
            raise ZeroDivisionError
        step(ctx, batch)

    fail(6, run_folder, lambda: Batches(STEPS), body, policy="skip", every=1)
    assert record(run_folder, 14)["times"] == 3
    assert "the batch always fails, like that of step 13" in caplog.text
    fail(1, run_folder, lambda: Batches(STEPS), body, policy="skip", every=1)
    assert "step 14 is not skipped, although its batch always fails: if more" in caplog.text
    assert names(run_folder) == ["LATEST", "poison", "step-11", "step-12", "step-13"]


def test_another_policy_is_refused(run_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"failing_batches='ignore'\): expected 'stop' or 'skip'"):
        Checkpoints(run_folder, failing_batches="ignore")
