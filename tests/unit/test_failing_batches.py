"""Batches at which training always fails: recorded, and skipped if that is configured. In the embedded mode."""

import contextlib
import json
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Batches, Configure
from test_checkpoints import STEPS, names, step
from test_training import SLOTS, everything, make
from waiting import wait_until

from persia.backend.local import LocalBackend
from persia.checkpoint.snapshot import Save
from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import DataError, NonFiniteError, RunLostError, StorageError, UnreachableError, UsageError
from persia.loop.training import TrainingLoop
from persia.runtime import files
from persia_core import checkpoint as core
from persia_core.forward import TrainingBatch

BAD = 12
"""The number of the batch that fails, from 0; its step is one more."""
META = b"from file 7"


def refused_at(step: int, text: str) -> DataError:
    """Return the engine's error for a look-up or push of ``step``."""
    error = DataError(text)
    error.step = step
    return error


class Marked(Batches):
    """Batches of few ids, all of which occur before the failing batch, whose ``meta`` marks it."""

    def __init__(self, count: int = STEPS, bad: int = BAD, refused: bool = False) -> None:
        super().__init__(count, ids=20)
        self.bad, self.refused = bad, refused

    def batch(self, number: int, *, requires_grad: bool = True) -> PersiaBatch:
        if number != self.bad:
            return super().batch(number, requires_grad=requires_grad)
        ids = np.arange(1000, 1008, dtype=np.uint64)
        slots = ["a", "b", *(["c"] if self.refused else [])]
        features = [IDTypeFeatureWithSingleID(slot, ids) for slot in slots]
        return PersiaBatch(features, labels=[Label(np.zeros((8, 1), np.float32))], meta=META)


class Plain(Batches):
    """The same data set without a state: its batches are counted."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


@pytest.fixture
def folder(configure: Configure, tmp_path: Path) -> Path:
    """Return the folder of the run's checkpoints."""
    configure(SLOTS)
    path = tmp_path / "run"
    path.mkdir()
    return path


def fails(ctx: TrainCtx, batch: TrainingBatch) -> None:
    """Train on all batches except the failing one."""
    if batch.meta is not None:
        raise ZeroDivisionError("at this batch")
    step(ctx, batch)


def run(
    folder: Path,
    data: Callable[[], Batches],
    body: Callable[[TrainCtx, TrainingBatch], None] = fails,
    policy: str = "stop",
    every: int = 10,
) -> tuple[TrainCtx, Checkpoints, bytes]:
    """Train to the end; an error that ends it earlier is raised."""
    checkpoints = Checkpoints(folder, every=every, failing_batches=policy)
    with make(checkpoints=checkpoints) as ctx:
        for batch in DataLoader(data(), reproducible=True):
            body(ctx, batch)
        return ctx, checkpoints, everything(ctx)


def fail(times: int, *arguments: Any, **options: Any) -> None:
    """Fail at a batch this many times."""
    for _ in range(times):
        with pytest.raises((ZeroDivisionError, DataError)):
            run(*arguments, **options)


def record(folder: Path, step: int = BAD + 1) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "poison" / f"step-{step}.rank-0.json").read_bytes())
    return content


def without(batch: int) -> bytes:
    """Return the result of a run whose loop skips this batch."""
    with make() as ctx:
        for each in DataLoader(Batches(STEPS, ids=20), reproducible=True):
            if each.step != batch + 1:
                step(ctx, each)
        return everything(ctx)


def test_a_batch_that_fails_is_written_down(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for times, said in enumerate(("the 1st time", "the 2nd time", "the 3rd time", "the 4th time"), 1):
        caplog.clear()
        fail(1, folder, Marked)
        assert f"step 13 failed on rank 0 for {said}: ZeroDivisionError: at this batch; see {folder}" in caplog.text
        assert ("skip its step by Checkpoints(failing_batches='skip')" in caplog.text) == (times >= 3)
        assert record(folder) == {
            "step": 13,
            "rank": 0,
            "times": times,
            "position": {"batches": 13 if times == 1 else 3, "source": {"next": 13}},
            "checksum": zlib.crc32(Marked().batch(BAD).to_bytes()),
            "error": "ZeroDivisionError",
            "text": "at this batch",
            "meta": META.decode(),
        }
    assert names(folder / "poison") == ["step-13.rank-0.batch", "step-13.rank-0.json"]
    kept = (folder / "poison" / "step-13.rank-0.batch").read_bytes()
    assert kept == Marked().batch(BAD).to_bytes()
    with make() as ctx:
        assert ctx.get_embedding_from_bytes(kept).batch_size == 8


def test_it_is_no_checkpoint(folder: Path) -> None:
    fail(1, folder, Marked)
    assert names(folder) == ["LATEST", "poison", "step-10"]
    assert [Path(each["path"]).name for each in core.listing(folder)] == ["step-10"]
    assert core.prune(folder, 1) == []
    assert len(names(folder / "poison")) == 2


@pytest.mark.parametrize("where", ["in the loop's body", "behind forward", "refused"])
@pytest.mark.parametrize("data", ["with a state", "counted"])
def test_a_batch_that_always_fails_is_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture, where: str, data: str
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

    fail(3, folder, source, body, policy="skip")
    assert "it always fails, and its step is skipped when the run is restarted" in caplog.text
    ctx, checkpoints, found = run(folder, source, body, "skip")
    assert ctx.common_context is None and checkpoints.skipped == 1
    assert "step 13 skipped, model and rows unchanged: its batch on rank 0 always fails; 1 skipped" in caplog.text
    assert found == without(BAD)
    assert names(folder) == ["LATEST", "poison", "step-10", "step-20", "step-25"]
    assert record(folder)["times"] == 3  # it is kept, so that it can be examined


def test_look_ups_ahead_do_not_blame_another_batch(folder: Path) -> None:
    def train(policy: str = "stop") -> Checkpoints:
        checkpoints = Checkpoints(folder, every=10, failing_batches=policy)
        with make(checkpoints=checkpoints) as ctx:
            for batch in DataLoader(Marked(refused=True), embedding_staleness=8):
                step(ctx, batch)
        return checkpoints

    for _ in range(3):
        with pytest.raises(DataError, match="without a slot: c"):
            train()
    assert record(folder)["times"] == 3
    assert train("skip").skipped == 1
    assert "step-25" in names(folder)


def test_the_batch_whose_look_up_failed_is_blamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is later than the batch for which the loop waits."""
    take = TrainingLoop._take

    def refuse(self: TrainingLoop) -> TrainingBatch | None:
        fed = self._feeder.fed
        if fed and json.loads(fed[0].position)["source"] == {"next": 13}:
            wait_until("three batches to be fed", lambda: len(fed) >= 3, 30)
            raise refused_at(15, "look-up of step 15 failed: too many ids")
        return take(self)

    monkeypatch.setattr(TrainingLoop, "_take", refuse)
    fail(1, folder, lambda: Batches(STEPS))
    assert names(folder / "poison") == ["step-15.rank-0.batch", "step-15.rank-0.json"]
    assert record(folder, 15)["position"]["source"] == {"next": 15}
    assert (folder / "poison" / "step-15.rank-0.batch").read_bytes() == Batches(STEPS).batch(14).to_bytes()


@pytest.mark.parametrize("where", ["in backward", "behind backward", "behind a loop that was left"])
def test_a_look_up_ahead_that_is_refused_is_not_blamed_on_the_batch_in_work(folder: Path, where: str) -> None:
    """The store has 32-bit steps, which the engine itself does not check."""
    last = 2**32 - 1

    class Waiting(Batches):
        """The refused batch follows when it is requested."""

        asked = threading.Event()

        def batch(self, number: int, *, requires_grad: bool = True) -> PersiaBatch:
            assert number != BAD or self.asked.wait(30)
            return super().batch(number, requires_grad=requires_grad)

    def refused(ctx: TrainCtx) -> bool:
        try:
            ctx.engine.drain()
        except DataError:
            return True
        return False

    def train() -> None:
        with make(checkpoints=Checkpoints(folder, every=5)) as ctx:
            if ctx.step == 0:
                assert ctx.common_context is not None
                ctx.common_context.begin(resume=(0, last - BAD, 1))
            for batch in DataLoader(Waiting(STEPS), embedding_staleness=16):
                if batch.step < last - 5 or where != "in backward":
                    step(ctx, batch)
                if batch.step < last - 5:
                    continue
                Waiting.asked.set()
                wait_until("the look-up to be refused", lambda: refused(ctx), 30)
                if where == "in backward":
                    step(ctx, batch)
                if where == "behind a loop that was left":
                    break
                ctx.dump_checkpoint(folder.parent / "by hand")
            ctx.dump_checkpoint(folder.parent / "by hand")

    for _ in range(2):
        Waiting.asked.clear()
        with pytest.raises(DataError, match=f"look-up of step {last + 1} failed"):
            train()
    assert names(folder / "poison") == [f"step-{last + 1}.rank-0.batch", f"step-{last + 1}.rank-0.json"]
    written = record(folder, last + 1)
    assert (written["times"], written["position"]["source"]) == (2, {"next": BAD + 1})
    assert (folder / "poison" / f"step-{last + 1}.rank-0.batch").read_bytes() == Batches(STEPS).batch(BAD).to_bytes()


def test_a_save_right_behind_a_batch_that_is_left_out(folder: Path) -> None:
    fail(3, folder, Marked, every=13)
    _, _, expected = run(folder, Marked, policy="skip", every=13)
    assert names(folder) == ["LATEST", "poison", "step-13", "step-25"]
    shutil.rmtree(folder / "step-25")
    (folder / "LATEST").write_text("step-13\n")
    _, checkpoints, found = run(folder, Marked, policy="skip", every=13)
    assert checkpoints.skipped == 0
    assert found == expected


def test_the_end_is_behind_a_batch_that_is_left_out(folder: Path) -> None:
    fail(3, folder, lambda: Marked(BAD + 1))
    with make(checkpoints=Checkpoints(folder, every=10, failing_batches="skip")) as ctx:
        for batch in DataLoader(Marked(BAD + 1)):
            fails(ctx, batch)
        assert ctx.step == BAD + 1
    assert "step-13" in names(folder)


def test_a_batch_is_left_out_with_that_of_another_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This is not because of its own, fewer failures; if their batch has changed, nothing is skipped."""
    fail(2, folder, Marked)
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
    _, checkpoints, _ = run(folder, Marked, policy="skip")
    assert checkpoints.skipped == 1 and "its batch on rank 1 always fails" in caplog.text
    assert record(folder)["times"] == 2
    (folder / "step-25").rename(folder.parent / "step-25")
    (folder / "step-20").rename(folder.parent / "step-20")
    (folder / "LATEST").write_text("step-10\n")
    theirs = False
    with pytest.raises(ZeroDivisionError):
        run(folder, Marked, policy="skip")
    assert record(folder)["times"] == 3


def test_another_batch_of_that_step_is_trained(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail(3, folder, Marked)

    class Moved(Batches):
        def state_dict(self) -> dict[str, int]:
            return {"next": self.next, "file": 8}

    _, checkpoints, _ = run(folder, lambda: Moved(STEPS, ids=20), policy="skip")
    assert checkpoints.skipped == 0
    assert "step 13 is trained: its batch is not the one that failed" in caplog.text
    assert names(folder / "poison") == []

    fail(2, folder / "other", Marked)
    fail(1, folder / "other", type("MovedToo", (Marked,), {"state_dict": Moved.state_dict}))
    assert record(folder / "other")["times"] == 1


class Repaired(Marked):
    """The same batch without its defect, at the same position."""

    def batch(self, number: int, *, requires_grad: bool = True) -> PersiaBatch:
        if number != self.bad:
            return super().batch(number, requires_grad=requires_grad)
        ids = np.arange(10, 18, dtype=np.uint64)
        features = [IDTypeFeatureWithSingleID(slot, ids) for slot in ("a", "b")]
        return PersiaBatch(features, labels=[Label(np.zeros((8, 1), np.float32))], meta=b"repaired")


@pytest.mark.parametrize("data", ["with a state", "counted"])
def test_a_batch_that_was_repaired_at_its_place_is_trained(
    folder: Path, caplog: pytest.LogCaptureFixture, data: str
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

    fail(3, folder, lambda: source(Marked()), policy="skip")
    _, checkpoints, _ = run(folder, lambda: source(Repaired()), body, "skip")
    assert checkpoints.skipped == 0 and seen == [(BAD + 1, b"repaired")]
    assert "step 13 is trained: its batch is not the one that failed" in caplog.text


def test_other_batches_at_one_place_are_counted_each_by_itself(folder: Path) -> None:
    fail(2, folder, Marked)
    fail(1, folder, Repaired)
    assert record(folder)["times"] == 1 and record(folder)["meta"] == "repaired"
    assert (folder / "poison" / "step-13.rank-0.batch").read_bytes() == Repaired().batch(BAD).to_bytes()


def test_a_record_without_a_checksum_is_of_another_batch(folder: Path) -> None:
    fail(3, folder, Marked)
    older = record(folder)
    del older["checksum"]
    (folder / "poison" / "step-13.rank-0.json").write_text(json.dumps(older))
    fail(1, folder, Marked, policy="skip")
    assert record(folder)["times"] == 1


@pytest.mark.parametrize("times", [2, 3])
def test_a_step_that_was_trained_after_all_is_forgotten(folder: Path, times: int) -> None:
    fail(times, folder, Marked)

    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        step(ctx, batch)
        if batch.step == 15:  # not saved yet
            assert record(folder)["times"] == times

    _, checkpoints, _ = run(folder, lambda: Batches(STEPS, ids=20), body)
    assert checkpoints.skipped == 0
    assert names(folder / "poison") == []


@pytest.mark.parametrize("how", ["refused", "not ended"])
def test_a_step_is_not_forgotten_before_its_save_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    fail(2, folder, Marked)
    write, over = Save._write, threading.Event()

    def refuse(_: Save) -> None:
        assert how == "refused" or over.wait(30)
        raise StorageError("no space left on the device")

    checkpoints = Checkpoints(folder, every=10)
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
    assert record(folder)["times"] == 2
    over.set()
    monkeypatch.setattr(Save, "_write", write)
    fail(1, folder, Marked)
    assert record(folder)["times"] == 3


def test_a_step_is_forgotten_once_its_save_is_known_to_be_written(folder: Path) -> None:
    fail(2, folder, Marked)

    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        step(ctx, batch)
        if ctx.common_context is not None and ctx.common_context.checkpoint_thread is not None:
            ctx.common_context.checkpoint_thread.wait()
        assert (names(folder / "poison") == []) == (batch.step > 20)

    run(folder, lambda: Batches(STEPS, ids=20), body, every=5)


def test_a_script_that_always_fails_leaves_nothing_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if batch.step > BAD:
            raise ZeroDivisionError
        step(ctx, batch)

    fail(3, folder, lambda: Batches(STEPS), body, policy="skip")
    fail(3, folder, lambda: Batches(STEPS), body, policy="skip")
    assert record(folder, 14)["times"] == 3
    assert "it always fails, and so do the steps 13: if more than one of 100 steps" in caplog.text
    caplog.clear()
    fail(2, folder, lambda: Batches(STEPS), body, policy="skip")
    assert "steps 13, 14 are not skipped" in caplog.text
    assert "skipped, model and rows unchanged" not in caplog.text
    assert (record(folder, 13)["times"], record(folder, 14)["times"]) == (5, 3)
    _, checkpoints, _ = run(folder, lambda: Batches(STEPS), step, "skip")  # corrected
    assert checkpoints.skipped == 0
    assert names(folder / "poison") == []


def test_far_apart_both_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.loop.quarantine.MIN_STEP_DISTANCE", 5)

    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if batch.step in {3, 8}:
            raise ZeroDivisionError
        step(ctx, batch)

    fail(6, folder, lambda: Batches(10), body, policy="skip")
    _, checkpoints, _ = run(folder, lambda: Batches(10), body, "skip")
    assert checkpoints.skipped == 2


def test_a_batch_left_out_before_the_save_stops_no_later_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if batch.step in {13, 18}:
            raise ZeroDivisionError
        step(ctx, batch)

    fail(6, folder, lambda: Batches(STEPS), body, policy="skip", every=5)
    assert record(folder, 18)["times"] == 3
    assert "so do the steps" not in caplog.text
    _, checkpoints, _ = run(folder, lambda: Batches(STEPS), body, "skip", every=5)
    assert checkpoints.skipped == 1
    assert "step-25" in names(folder)


def test_a_script_that_always_fails_leaves_nothing_out_where_each_step_is_saved(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
        if batch.step > BAD:
            raise ZeroDivisionError
        step(ctx, batch)

    fail(6, folder, lambda: Batches(STEPS), body, policy="skip", every=1)
    assert record(folder, 14)["times"] == 3
    assert "it always fails, and so do the steps 13" in caplog.text
    fail(1, folder, lambda: Batches(STEPS), body, policy="skip", every=1)
    assert "steps 14 are not skipped" in caplog.text
    assert names(folder) == ["LATEST", "poison", "step-11", "step-12", "step-13"]


@pytest.mark.parametrize(
    "error",
    [
        RunLostError(),
        UnreachableError(),
        StorageError(),
        NonFiniteError(),
        UsageError(),
        SystemExit(),
        KeyboardInterrupt(),
        refused_at(11, "push of step 11 failed"),
    ],
)
def test_what_is_no_failure_of_a_batch_is_not_written_down(folder: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):

        def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
            if batch.step == 13:
                raise error
            step(ctx, batch)

        run(folder, Marked, body)
    assert names(folder) == ["LATEST", "step-10"]


@pytest.mark.parametrize("where", ["behind backward", "behind a batch passed over", "behind the loop", "in the data"])
def test_an_error_outside_of_a_batch_is_not_written_down(folder: Path, where: str) -> None:
    class Failing(Batches):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                if where == "in the data" and self.next == 13:
                    raise ZeroDivisionError
                yield batch

    with contextlib.suppress(ZeroDivisionError), make(checkpoints=Checkpoints(folder, every=10)) as ctx:
        for batch in DataLoader(Failing(13), reproducible=True):
            if where == "behind a batch passed over" and batch.step == 13:
                continue
            step(ctx, batch)
            if where == "behind backward" and batch.step == 13:
                raise ZeroDivisionError
        raise ZeroDivisionError
    assert "poison" not in names(folder)


def passed_on(loader: Iterable[TrainingBatch]) -> Iterator[TrainingBatch]:
    """A wrapper around a loader, as for a progress display."""
    with contextlib.ExitStack():
        yield from loader


def numbered(loader: Iterable[TrainingBatch]) -> Iterator[TrainingBatch]:
    """The same, in two layers."""
    for _, batch in enumerate(loader):
        yield batch


def divide() -> None:
    raise ZeroDivisionError


THROUGH = [iter, passed_on, numbered]


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("how", ["break", "break under with", "return", "break, again raised", "an error caught"])
@pytest.mark.parametrize("trained", [True, False])
def test_an_error_after_a_loop_that_was_left_is_not_written_down(
    folder: Path, how: str, trained: bool, through: Callable[[Iterable[TrainingBatch]], Iterator[TrainingBatch]]
) -> None:
    """Unless the script left the loop at a batch that was not trained on, which is still open."""

    def train(ctx: TrainCtx) -> None:
        for batch in through(DataLoader(Batches(STEPS, ids=20), reproducible=True)):
            if batch.step <= BAD or trained:
                step(ctx, batch)
            if batch.step <= BAD:
                continue
            if how == "return":
                return
            if how == "break under with":
                with contextlib.ExitStack():
                    break
            elif how == "an error caught":
                raise LookupError
            else:
                break
        if how == "break" and trained:
            raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError), make(checkpoints=Checkpoints(folder, every=10)) as ctx:
        with contextlib.suppress(LookupError):
            train(ctx)
        try:
            divide()
        except ZeroDivisionError:
            if how == "break, again raised":
                raise
        divide()
    assert ("poison" in names(folder)) == (not trained)


@pytest.mark.parametrize("then", ["evaluated", "another loop"])
def test_an_error_after_the_context_was_used_again_is_not_written_down(folder: Path, then: str) -> None:
    """A loop was left at a batch that was not trained on, which is a common way to stop; an evaluation fails then."""
    with pytest.raises(ZeroDivisionError), make(checkpoints=Checkpoints(folder, every=10)) as ctx:
        loader = DataLoader(Batches(STEPS, ids=20), reproducible=True)
        for batch in loader:
            if batch.step > BAD:
                break
            step(ctx, batch)
        if then == "evaluated":
            ctx.get_embedding_from_data(Batches(1).batch(0))
        else:
            for batch in loader:
                step(ctx, batch)
                break
        divide()
    assert "poison" not in names(folder)


def test_an_evaluation_that_is_refused_is_not_blamed_on_an_open_batch(folder: Path) -> None:
    """A loop was left at a batch that was not trained on; then the look-up of another batch is refused."""
    with (
        pytest.raises(DataError, match="without a slot: c"),
        make(checkpoints=Checkpoints(folder, every=10)) as ctx,
    ):
        for batch in DataLoader(Batches(STEPS, ids=20), reproducible=True):
            if batch.step > BAD:
                break
            step(ctx, batch)
        ctx.get_embedding_from_data(Marked(refused=True).batch(BAD))
    assert "poison" not in names(folder)


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize(
    "how",
    ["here", "called", "under with", "behind finally", "raised again", "named", "from another", "around the loop"],
)
def test_an_error_of_the_body_is_written_down_however_it_leaves_the_loop(
    folder: Path, how: str, through: Callable[[Iterable[TrainingBatch]], Iterator[TrainingBatch]]
) -> None:
    def train(ctx: TrainCtx) -> None:
        for batch in through(DataLoader(Marked(), reproducible=True)):
            if batch.meta is None:
                step(ctx, batch)
            elif how == "here":
                raise ZeroDivisionError
            elif how == "under with":
                with contextlib.ExitStack():
                    divide()
            elif how == "behind finally":
                try:
                    divide()
                finally:
                    assert True
            elif how == "raised again":
                try:
                    divide()
                except ZeroDivisionError:
                    assert True
                    raise
            elif how == "named":
                try:
                    divide()
                except ZeroDivisionError as error:
                    raise error
            elif how == "from another":
                try:
                    divide()
                except ZeroDivisionError as error:
                    raise ValueError from error
            else:
                divide()

    with contextlib.suppress(ZeroDivisionError, ValueError), make(checkpoints=Checkpoints(folder, every=10)) as ctx:
        try:
            train(ctx)
        except ZeroDivisionError as error:
            if how == "around the loop":
                raise ValueError("training failed") from error
            raise
    assert record(folder)["error"] == (
        "ValueError" if how in {"from another", "around the loop"} else "ZeroDivisionError"
    )


def test_an_error_before_the_loop_is_not_that_of_the_context_before(folder: Path) -> None:
    checkpoints = Checkpoints(folder, every=10)
    with pytest.raises(ZeroDivisionError), make(checkpoints=checkpoints) as ctx:
        for batch in DataLoader(Marked(), reproducible=True):
            fails(ctx, batch)
    shutil.rmtree(folder / "poison")
    with pytest.raises(ZeroDivisionError), make(checkpoints=checkpoints):
        raise ZeroDivisionError
    assert "poison" not in names(folder)


def test_a_failure_that_cannot_be_written_down_hides_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "poison").write_text("a file")
    fail(1, folder, Marked)
    assert "step 13 failed, but that cannot be recorded" in caplog.text
    (folder / "poison").unlink()
    monkeypatch.setattr(files, "publish", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    fail(1, folder, Marked)
    assert "that cannot be recorded: no space left" in caplog.text
    assert names(folder / "poison") == []


def test_a_damaged_record_counts_for_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail(1, folder, Marked)
    whole = record(folder)
    changes: list[dict[str, Any]] = [{"times": "many"}, {"position": {}}, {"position": None}]
    wrong = [json.dumps({**whole, **change}) for change in changes]
    for content in ("{", "[]", '{"step": 13}', *wrong):
        (folder / "poison" / "step-13.rank-0.json").write_text(content)
        fail(1, folder, Marked, policy="skip")
        assert record(folder)["times"] == 1
    assert len(re.findall("is not a record of a failed batch", caplog.text)) == 6


def test_another_policy_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"failing_batches='ignore'\): want 'stop' or 'skip'"):
        Checkpoints(folder, failing_batches="ignore")
