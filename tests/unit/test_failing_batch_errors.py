"""Errors that a batch causes, and errors that it does not cause, in the embedded mode."""

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Batches
from failing_batches import BAD, Marked, fail, fails, record, refused_at, run
from test_checkpoints import STEPS, names, step
from test_training import make
from waiting import wait_until

from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader
from persia.embedding.data import PersiaBatch
from persia.errors import DataError, NonFiniteError, RunLostError, StorageError, UnreachableError, UsageError
from persia.loop.training import TrainingLoop
from persia_core.forward import TrainingBatch


def test_look_ups_ahead_do_not_blame_another_batch(run_folder: Path) -> None:
    def train(policy: str = "stop") -> Checkpoints:
        checkpoints = Checkpoints(run_folder, every=10, failing_batches=policy)
        with make(checkpoints=checkpoints) as ctx:
            for batch in DataLoader(Marked(refused=True), embedding_staleness=8):
                step(ctx, batch)
        return checkpoints

    for _ in range(3):
        with pytest.raises(DataError, match="without a slot: c"):
            train()
    assert record(run_folder)["times"] == 3
    assert train("skip").skipped == 1
    assert "step-25" in names(run_folder)


def test_the_batch_whose_look_up_failed_is_blamed(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch whose look-up failed is later than the batch for which the loop waits."""
    take = TrainingLoop._take

    def refuse(self: TrainingLoop) -> TrainingBatch | None:
        fed = self._feeder.fed
        if fed and json.loads(fed[0].position)["source"] == {"next": 13}:
            wait_until("three batches to be fed", lambda: len(fed) >= 3, 30)
            raise refused_at(15, "look-up of step 15 failed: too many ids")
        return take(self)

    monkeypatch.setattr(TrainingLoop, "_take", refuse)
    fail(1, run_folder, lambda: Batches(STEPS))
    assert names(run_folder / "poison") == ["step-15.rank-0.batch", "step-15.rank-0.json"]
    assert record(run_folder, 15)["position"]["source"] == {"next": 15}
    assert (run_folder / "poison" / "step-15.rank-0.batch").read_bytes() == Batches(STEPS).batch(14).to_bytes()


@pytest.mark.parametrize("where", ["in backward", "behind backward", "behind a loop that was left"])
def test_a_look_up_ahead_that_is_refused_is_not_blamed_on_the_batch_in_work(run_folder: Path, where: str) -> None:
    """The store refuses steps beyond 32 bits. The engine does not check steps, so the look-up itself is refused."""
    last = 2**32 - 1

    class Waiting(Batches):
        """The batch whose look-up is refused is yielded only after the test has set ``asked``."""

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
        with make(checkpoints=Checkpoints(run_folder, every=5)) as ctx:
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
                ctx.dump_checkpoint(run_folder.parent / "by hand")
            ctx.dump_checkpoint(run_folder.parent / "by hand")

    for _ in range(2):
        Waiting.asked.clear()
        with pytest.raises(DataError, match=f"look-up of step {last + 1} failed"):
            train()
    assert names(run_folder / "poison") == [f"step-{last + 1}.rank-0.batch", f"step-{last + 1}.rank-0.json"]
    written = record(run_folder, last + 1)
    assert (written["times"], written["position"]["source"]) == (2, {"next": BAD + 1})
    assert (run_folder / "poison" / f"step-{last + 1}.rank-0.batch").read_bytes() == Batches(STEPS).batch(
        BAD
    ).to_bytes()


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
def test_what_is_no_failure_of_a_batch_is_not_written_down(run_folder: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):

        def body(ctx: TrainCtx, batch: TrainingBatch) -> None:
            if batch.step == 13:
                raise error
            step(ctx, batch)

        run(run_folder, Marked, body)
    assert names(run_folder) == ["LATEST", "step-10"]


@pytest.mark.parametrize("where", ["behind backward", "behind a batch passed over", "behind the loop", "in the data"])
def test_an_error_outside_of_a_batch_is_not_written_down(run_folder: Path, where: str) -> None:
    class Failing(Batches):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                if where == "in the data" and self.next == 13:
                    raise ZeroDivisionError
                yield batch

    with contextlib.suppress(ZeroDivisionError), make(checkpoints=Checkpoints(run_folder, every=10)) as ctx:
        for batch in DataLoader(Failing(13), reproducible=True):
            if where == "behind a batch passed over" and batch.step == 13:
                continue
            step(ctx, batch)
            if where == "behind backward" and batch.step == 13:
                raise ZeroDivisionError
        raise ZeroDivisionError
    assert "poison" not in names(run_folder)


def passed_on(loader: Iterable[TrainingBatch]) -> Iterator[TrainingBatch]:
    """Wrap a loader, as a progress display does."""
    with contextlib.ExitStack():
        yield from loader


def numbered(loader: Iterable[TrainingBatch]) -> Iterator[TrainingBatch]:
    """Wrap a loader twice."""
    for _, batch in enumerate(loader):
        yield batch


def divide() -> None:
    raise ZeroDivisionError


THROUGH = [iter, passed_on, numbered]


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("how", ["break", "break under with", "return", "break, again raised", "an error caught"])
@pytest.mark.parametrize("trained", [True, False])
def test_an_error_after_a_loop_that_was_left_is_not_written_down(
    run_folder: Path, how: str, trained: bool, through: Callable[[Iterable[TrainingBatch]], Iterator[TrainingBatch]]
) -> None:
    """If the script leaves the loop at an untrained batch, that batch is still open, and the error is recorded."""

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

    with contextlib.suppress(ZeroDivisionError), make(checkpoints=Checkpoints(run_folder, every=10)) as ctx:
        with contextlib.suppress(LookupError):
            train(ctx)
        try:
            divide()
        except ZeroDivisionError:
            if how == "break, again raised":
                raise
        divide()
    assert ("poison" in names(run_folder)) == (not trained)


@pytest.mark.parametrize("then", ["evaluated", "another loop"])
def test_an_error_after_the_context_was_used_again_is_not_written_down(run_folder: Path, then: str) -> None:
    """The script leaves a loop at an untrained batch, which is a common way to stop. Then an evaluation fails."""
    with pytest.raises(ZeroDivisionError), make(checkpoints=Checkpoints(run_folder, every=10)) as ctx:
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
    assert "poison" not in names(run_folder)


def test_an_evaluation_that_is_refused_is_not_blamed_on_an_open_batch(run_folder: Path) -> None:
    """The script leaves a loop at an untrained batch. Then the look-up of another batch is refused."""
    with (
        pytest.raises(DataError, match="without a slot: c"),
        make(checkpoints=Checkpoints(run_folder, every=10)) as ctx,
    ):
        for batch in DataLoader(Batches(STEPS, ids=20), reproducible=True):
            if batch.step > BAD:
                break
            step(ctx, batch)
        ctx.get_embedding_from_data(Marked(refused=True).batch(BAD))
    assert "poison" not in names(run_folder)


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize(
    "how",
    ["here", "called", "under with", "behind finally", "raised again", "named", "from another", "around the loop"],
)
def test_an_error_of_the_body_is_written_down_however_it_leaves_the_loop(
    run_folder: Path, how: str, through: Callable[[Iterable[TrainingBatch]], Iterator[TrainingBatch]]
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

    with contextlib.suppress(ZeroDivisionError, ValueError), make(checkpoints=Checkpoints(run_folder, every=10)) as ctx:
        try:
            train(ctx)
        except ZeroDivisionError as error:
            if how == "around the loop":
                raise ValueError("training failed") from error
            raise
    assert record(run_folder)["error"] == (
        "ValueError" if how in {"from another", "around the loop"} else "ZeroDivisionError"
    )


def test_an_error_before_the_loop_is_not_that_of_the_context_before(run_folder: Path) -> None:
    checkpoints = Checkpoints(run_folder, every=10)
    with pytest.raises(ZeroDivisionError), make(checkpoints=checkpoints) as ctx:
        for batch in DataLoader(Marked(), reproducible=True):
            fails(ctx, batch)
    shutil.rmtree(run_folder / "poison")
    with pytest.raises(ZeroDivisionError), make(checkpoints=checkpoints):
        raise ZeroDivisionError
    assert "poison" not in names(run_folder)
