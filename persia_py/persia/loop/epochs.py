"""A hook of the training loop that counts the epochs of a run, and stores the count in checkpoints."""

from collections.abc import Iterator

from persia.checkpoint.run_state import RunState
from persia.loop.hooks import Loop
from persia.loop.training import TrainingLoop
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

_logger = get_logger("loop")


class Epochs:
    """Counts the epochs of a context, and continues in the interrupted epoch after a resume.

    Args:
        state: The state of the run, which has the number of completed passes.

    Attributes:
        resumed: Whether the run continues after a checkpoint, and no warning about its passes was logged yet; only on
            rank 0.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.resumed = False
        self._loop: Loop | None = None
        self._began = 0
        self._running: int | None = None  # the epoch whose body is running
        self._loops = 0  # the number of training loops in the body of this epoch
        self._warned = False

    def begin(self, count: int) -> Iterator[int]:
        """Return the unfinished epochs of ``count``. Collective: every rank must call it.

        Raises:
            UsageError: ``count`` is negative or differs between ranks, or an iteration over epochs is already active.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(f"ctx.epochs({count!r}): must be an integer of at least 0")
        if self._running is not None:
            raise UsageError("ctx.epochs inside a loop over ctx.epochs: epochs cannot be nested")
        given = self._state.backend.all_gather("ctx.epochs", [count, self._state.passes])
        other = next((rank for rank, (of_rank, _) in enumerate(given) if of_rank != count), None)
        if other is not None:
            text = f"ctx.epochs: {count} on rank {settings.rank}, {given[other][0]} on rank {other}"
            raise UsageError(f"{text}; pass the same number on every rank")
        first = given[0][1]  # the value of rank 0, which loads checkpoints
        if first is None:
            _logger.warning(
                "ctx.epochs(%d): the checkpoint was written by an older version, which did not count epochs: epochs "
                "are counted from 0",
                count,
            )
        self._state.passes = first or 0
        if first and settings.rank == 0:
            _logger.info("ctx.epochs(%d): epochs before %d are finished in the checkpoint", count, first)
        return self._iterate(first or 0, count)

    def _iterate(self, first: int, count: int) -> Iterator[int]:
        try:
            for epoch in range(first, count):
                self._running, self._loops = epoch, 0
                yield epoch
                if self._loops and self._state.passes == epoch:
                    self._warn(
                        "epoch %d: its training loop was left before the end of the data. If the run is interrupted "
                        "between this loop and the next, the resumed run trains longer in this epoch: let the data "
                        "set end instead",
                        epoch,
                    )
                self._state.passes = epoch + 1
        finally:
            self._running = None

    def begin_loop(self, previous: TrainingLoop | None) -> None:
        """Record that a training loop begins.

        Warn if it is not the only one of its epoch, or if a resumed script may train too many steps.

        Args:
            previous: The last loop of the context; None if this is the first.
        """
        if self._running is not None:
            self._loops += 1
            if self._loops > 1:
                self._warn(
                    "epoch %d has more than one training loop, but a checkpoint stores the position in only one: put "
                    "the data of an epoch into one data set",
                    self._running,
                )
            return
        if previous is not None and not previous.completed and self._state.passes is not None:
            self._state.passes += 1
        if not self.resumed or previous is None:
            return
        self.resumed = False
        before = self._state.passes_loaded
        if before != 0:
            passes = "" if before is None else f"after {before} finished pass{'es' * (before > 1)}"
            _logger.warning(
                "a second training loop of a resumed run begins, and the run's checkpoint was written %s. A script "
                "that counts its passes from 0 again, as in `for epoch in range(N)`, trains too many steps after a "
                "resume: write `for epoch in ctx.epochs(N)`. If the script itself begins at the interrupted pass, "
                "ignore this warning",
                passes or "by an older version, which did not count passes",
            )

    def on_start(self, loop: Loop) -> None:
        """Record the step at which a loop starts."""
        self._loop, self._began = loop, loop.step

    def on_end(self, complete: bool) -> None:
        """Warn if a resumed script may train too many or too few steps."""
        loop, self._loop = self._loop, None
        if complete and loop is not None and loop.step == self._began and self.resumed and self._running is None:
            self.resumed, before = False, self._state.passes_loaded
            _logger.warning(
                "the first training loop of this resumed run had no batch: its checkpoint is at the end of %s over the "
                "data. A script that counts its passes from 0 again, as in `for epoch in range(N)`, trains too many "
                "steps; one that begins at the next pass, as in `range(ctx.step // STEPS, N)`, trains too few. Write "
                "`for epoch in ctx.epochs(N)`",
                "a pass" if before is None else f"pass {before + 1}",
            )

    def _warn(self, text: str, epoch: int) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(text, epoch)
