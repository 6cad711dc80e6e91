"""Records of failing batches in the embedded mode: the batch that they name, and when they are deleted."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import Batches
from failing_batches import BAD, Marked, Plain, Repaired, fail, record, run
from test_checkpoints import STEPS, names, step
from test_training import make

from persia.checkpoint.snapshot import Save
from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader
from persia.errors import StorageError
from persia.runtime import files
from persia_core.forward import TrainingBatch


def test_another_batch_of_that_step_is_trained(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail(3, run_folder, Marked)

    class Moved(Batches):
        def state_dict(self) -> dict[str, int]:
            return {"next": self.next, "file": 8}

    _, checkpoints, _ = run(run_folder, lambda: Moved(STEPS, ids=20), policy="skip")
    assert checkpoints.skipped == 0
    assert "step 13 is trained, not skipped: its batch is not the one that failed before" in caplog.text
    assert names(run_folder / "poison") == []

    fail(2, run_folder / "other", Marked)
    fail(1, run_folder / "other", type("MovedToo", (Marked,), {"state_dict": Moved.state_dict}))
    assert record(run_folder / "other")["times"] == 1


@pytest.mark.parametrize("data", ["with a state", "counted"])
def test_a_batch_that_was_repaired_at_its_place_is_trained(
    run_folder: Path, caplog: pytest.LogCaptureFixture, data: str
) -> None:
    def source(marked: Batches) -> Batches:
        plain = Plain(STEPS)
        plain.batch = marked.batch  # type: ignore[method-assign]
        return plain if data == "counted" else marked

    seen = []

    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if batch.meta is None:
            step(ctx, batch)
        else:
            seen.append((batch.step, batch.meta))

    fail(3, run_folder, lambda: source(Marked()), policy="skip")
    _, checkpoints, _ = run(run_folder, lambda: source(Repaired()), body, "skip")
    assert checkpoints.skipped == 0 and seen == [(BAD + 1, b"repaired")]
    assert "step 13 is trained, not skipped: its batch is not the one that failed before" in caplog.text


def test_other_batches_at_one_place_are_counted_each_by_itself(run_folder: Path) -> None:
    fail(2, run_folder, Marked)
    fail(1, run_folder, Repaired)
    assert record(run_folder)["times"] == 1 and record(run_folder)["meta"] == "repaired"
    assert (run_folder / "poison" / "step-13.rank-0.batch").read_bytes() == Repaired().batch(BAD).to_bytes()


def test_a_record_without_a_checksum_is_of_another_batch(run_folder: Path) -> None:
    fail(3, run_folder, Marked)
    older = record(run_folder)
    del older["checksum"]
    (run_folder / "poison" / "step-13.rank-0.json").write_text(json.dumps(older))
    fail(1, run_folder, Marked, policy="skip")
    assert record(run_folder)["times"] == 1


@pytest.mark.parametrize("times", [2, 3])
def test_a_step_that_was_trained_after_all_is_forgotten(run_folder: Path, times: int) -> None:
    fail(times, run_folder, Marked)

    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        step(ctx, batch)
        if batch.step == 15:  # not saved yet
            assert record(run_folder)["times"] == times

    _, checkpoints, _ = run(run_folder, lambda: Batches(STEPS, ids=20), body)
    assert checkpoints.skipped == 0
    assert names(run_folder / "poison") == []


@pytest.mark.parametrize("how", ["refused", "not ended"])
def test_a_step_is_not_forgotten_before_its_save_is_written(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    fail(2, run_folder, Marked)
    write, over = Save._write, threading.Event()

    def refuse(_: Save) -> None:
        assert how == "refused" or over.wait(30)
        raise StorageError("no space left on the device")

    checkpoints = Checkpoints(run_folder, every=10)
    monkeypatch.setattr(Save, "_write", refuse)
    monkeypatch.setattr("persia.loop.autosave.RETRY_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr("persia.ctx.base._WRITTEN_S", 0.1)
    with pytest.raises(ZeroDivisionError), make(checkpoints=checkpoints) as ctx:
        for batch in DataLoader(Marked(), reproducible=True):
            if batch.meta is None:
                step(ctx, batch)
            if batch.step == 22:
                break
        assert checkpoints.saved >= 20
        raise ZeroDivisionError
    assert record(run_folder)["times"] == 2
    over.set()
    monkeypatch.setattr(Save, "_write", write)
    fail(1, run_folder, Marked)
    assert record(run_folder)["times"] == 3


def test_a_step_is_forgotten_once_its_save_is_known_to_be_written(run_folder: Path) -> None:
    fail(2, run_folder, Marked)

    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        step(ctx, batch)
        if ctx.common_context is not None and ctx.common_context.checkpoint_thread is not None:
            ctx.common_context.checkpoint_thread.wait()
        assert (names(run_folder / "poison") == []) == (batch.step > 20)

    run(run_folder, lambda: Batches(STEPS, ids=20), body, every=5)


def test_a_failure_that_cannot_be_written_down_hides_no_error(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (run_folder / "poison").write_text("a file")
    fail(1, run_folder, Marked)
    assert "step 13 failed, but the failure cannot be recorded" in caplog.text
    (run_folder / "poison").unlink()
    monkeypatch.setattr(files, "publish", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    fail(1, run_folder, Marked)
    assert "the failure cannot be recorded: no space left" in caplog.text
    assert names(run_folder / "poison") == []


def test_a_damaged_record_counts_for_nothing(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail(1, run_folder, Marked)
    whole = record(run_folder)
    changes: list[dict[str, Any]] = [{"times": "many"}, {"position": {}}, {"position": None}]
    wrong = [json.dumps({**whole, **change}) for change in changes]
    for content in ("{", "[]", '{"step": 13}', *wrong):
        (run_folder / "poison" / "step-13.rank-0.json").write_text(content)
        fail(1, run_folder, Marked, policy="skip")
        assert record(run_folder)["times"] == 1
    assert len(re.findall("which is not a record of a failed batch", caplog.text)) == 6


def test_records_that_cannot_be_listed_stop_no_training(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sharing the recorded steps is collective: if it failed on one rank, the others would wait for that rank."""
    whole = Path.glob

    def glob(path: Path, pattern: str) -> Any:
        if path.name == "poison":
            raise PermissionError(13, "Permission denied")
        return whole(path, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    fail(1, run_folder, Marked)
    assert re.search("cannot list the records of failed batches in .*poison: Permission denied", caplog.text)
    assert "step 13" in caplog.text
