"""A pass over the data. Read this module top-down from :meth:`TrainingLoop.start`."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import Self

from persia.backend.base import Backend
from persia.checkpoint.run_state import RunState
from persia.distributed import run
from persia.embedding.listed import listed
from persia.loop.feeder import FedBatch, Feeder
from persia.loop.hooks import Hooks
from persia.loop.source import Source
from persia.runtime import clock, flight, preemption, watchdog
from persia.runtime.errors import DataError, PersiaError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia_core.forward import Pipeline, TrainingBatch

_logger = get_logger("loop")

_first_done = False
_newest: "weakref.ref[TrainingLoop] | None" = None


def running() -> "TrainingLoop | None":
    """Return the training loop that is running in this process, or None."""
    loop = None if _newest is None else _newest()
    return None if loop is None or loop.ended else loop


@dataclass(frozen=True)
class LoopOptions:
    """The options of a loop's look-ups.

    Attributes:
        staleness: K: a look-up may miss up to K - 1 updates.
        reproducible: Whether runs with equal inputs give bit-identical results.
        timeout_s: The time limit of a look-up.
    """

    staleness: int
    reproducible: bool
    timeout_s: float


class TrainingLoop:
    """A pass over the data on this rank. All ranks advance in lock-step.

    In each step the loop agrees with the other ranks, takes the next batch, returns it to the script, and records the
    position after it is trained on. Everything else (checkpoints, quarantine, watchdog, preemption) is a hook.

    Args:
        backend: The access to the rows and to the other ranks.
        state: The state of the run in checkpoints, apart from rows.
        source: The data set and its position.
        hooks: The hooks, in order. They must be the same on all ranks.
        options: The options of look-ups, equal on all ranks.

    Attributes:
        completed: Whether the loop has ended at the end of the data, on this rank or on another.
    """

    def __init__(self, backend: Backend, state: RunState, source: Source, hooks: Hooks, options: LoopOptions) -> None:
        self.backend = backend
        self._state = state
        self._source = source
        self._hooks = hooks
        self._options = options
        self._open: FedBatch | None = None  # the batch that was taken but not trained on yet
        self._ended = False
        self.completed = False
        self._abandoned = False  # whether the loop has ended with its context
        self._ended_at = 0
        self._pipeline: Pipeline
        self._feeder: Feeder

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return self.backend.trained_step

    @property
    def open_batch(self) -> FedBatch | None:
        """The batch that was taken but not trained on yet."""
        return self._open

    @property
    def ended(self) -> bool:
        """Whether the loop has ended."""
        return self._ended

    @property
    def permits(self) -> tuple[int, int]:
        """The number of steps between look-up and acknowledged push, and the maximum that the staleness allows."""
        return int(self.backend.engine.stats()["staleness"]), self._options.staleness

    def start(self) -> Self:
        """Open the pipeline on all ranks, resume the data, and start reading ahead."""
        backend, source, options = self.backend, self._source, self._options
        backend.join_checkpoint_thread()
        self._pipeline = backend.open_loop(
            options.staleness, options.reproducible, source.dataset.buffer_size, hooks=self._hooks.identity
        )
        self._feeder = Feeder(
            source, self._pipeline, backend.engine.step, backend.configuration.embedding.slots, self._hooks.skips_lookup
        )
        try:
            self._state.share_loaded()
            source.resume(*self._state.take_position())
            self._state.record(source.cursor, source.replay_digests())
            self._hooks.start(self)
            self._feeder.start()
            global _newest
            _newest = weakref.ref(self)
        except BaseException:
            self._end()
            raise
        return self

    def next(self) -> TrainingBatch | None:
        """Return the next batch to train on; None at the end of the pass."""
        if self._abandoned:
            raise UsageError("this training loop has ended with its context: iterate the data loader in a new context")
        if self._ended:
            return None
        try:
            self._open = None  # the script has finished the previous batch
            batch = self._advance()
            if batch is None:
                self._complete()
        except BaseException:
            self._end()
            raise
        return batch

    def _advance(self) -> TrainingBatch | None:
        """Return the next batch that is not skipped; None after the last.

        If the look-up of a batch is refused, this batch becomes the open one, so the error names it.
        """
        try:
            while True:
                self._hooks.before_step()
                if (skip := self._agree_on_step()) is None or (batch := self._take()) is None:
                    return None
                if not skip:
                    self._hooks.after_lookup(batch.step)
                    return batch
                batch.discard()
                self.trained(batch)
                del batch
        except DataError:
            self._open = next(iter(self._feeder.fed), None)
            raise

    def _agree_on_step(self) -> bool | None:
        """Agree with the other ranks on the next step, before any of them takes its batch.

        Returns:
            Whether the step is skipped; None if a rank has no batch left, so all ranks end the pass.
        """
        if self.backend.is_alone and not self._hooks.votes:
            self._wait_for_data()
            return False
        with preemption.waiting_for_data():
            ready = self._wait_for_data()
        preemption.exit_if_requested()
        fed = self._feeder.fed
        # a ready source without a batch means that the data set has failed
        fed_batch = fed[0] if ready and fed else None
        left = max(1, len(fed) + self._source.waiting()) if ready else 0
        ballots = self.backend.all_gather("next step", [left, self._hooks.vote(fed_batch)])
        if all(left for left, _ in ballots):
            return self._hooks.decide(
                self.step + 1 if fed_batch is None else fed_batch.step, [votes for _, votes in ballots]
            )
        if self.backend.is_rank_0:
            self._log_end([left for left, _ in ballots])
        return None

    def _log_end(self, left: list[int]) -> None:
        if any(left):
            _logger.warning(
                "all ranks stop after step %d: the data of rank%s %s has ended; unused batches: at least %s",
                self.step,
                "s" * (left.count(0) > 1),
                listed([rank for rank, count in enumerate(left) if not count]),
                listed([f"{count} of rank {rank}" for rank, count in enumerate(left) if count]),
            )

    def _wait_for_data(self) -> bool:
        """Wait until the data set has yielded the next batch. The look-up of the batch may be incomplete.

        Return False at the end of the data.
        """
        with watchdog.waiting_for_data(), flight.Call(flight.DATA_WAIT, self.step + 1):
            return self._pipeline.has_next()

    def _take(self) -> TrainingBatch | None:
        """Return the next batch, looked up. The batch is then open, and errors are attributed to it."""
        with watchdog.waiting(), flight.Call(flight.LOOK_UP, self.step + 1):
            batch = clock.patiently(lambda: self._pipeline.next(self._options.timeout_s), self._options.timeout_s)
        if batch is None:
            return None
        self._open = self._feeder.fed.popleft()
        run.opened(batch.step)
        batch.position = self._open.position
        return batch

    def trained(self, batch: TrainingBatch) -> None:
        """Record that a step is applied to model and rows, or skipped by all ranks."""
        self._open = None
        self.backend.trained_step = batch.step
        if batch.position is not None:
            self._source.trained(batch.position)
            self._state.record(self._source.cursor, self._source.replay_digests())
        self._hooks.after_step(batch.step)
        _log_first(batch.step)

    def committed(self, step: int) -> None:
        """Report to the hooks that a checkpoint of ``step`` is written."""
        self._hooks.after_commit(step)

    def _complete(self) -> None:
        """End the pass in agreement with the other ranks."""
        self._hooks.end(complete=True)
        completed = self.backend.is_alone or not self._pipeline.has_next()
        if completed:
            self._source.pass_ended()
        else:
            self._source.pass_cut_short()
        self.completed = True
        self._state.pass_ended(self._source.cursor, self._source.replay_digests())
        self._end(together=True, completed=completed)

    def close(self) -> None:
        """End the loop before the end of its data, because the script has left it."""
        self._end()

    def release(self) -> None:
        """End the loop together with its context.

        This removes the reference cycle of hooks and loop, which would keep the model in memory.
        """
        self._abandoned = not self._ended
        self._end()
        self._hooks = Hooks([])
        del self._feeder

    def _end(self, *, together: bool = False, completed: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._ended_at = self.backend.activity
        try:
            self._hooks.end(complete=False)
        finally:
            try:
                if self.backend.closed:  # the context has ended, so no agreement with other ranks is possible
                    self._pipeline.close()
                else:
                    self.backend.close_loop(self._pipeline, together=together)
            finally:
                self._feeder.end(completed=completed)

    def failed(self, error: Exception) -> None:
        """Report to the hooks that ``error`` leaves the context, and the batch that caused it."""
        self._hooks.error(error, self._blamed(error))

    def _blamed(self, error: Exception) -> FedBatch | None:
        """Return the batch to which an error is attributed.

        The error of a refused look-up names its step, which may be ahead of the open batch. Any other error is
        attributed to the open batch, with two exceptions: errors of persia that are not data errors, and errors after
        the script has left the loop and used the context for other work.
        """
        used_since = self._ended and self.backend.activity != self._ended_at
        open_batch = None if used_since else self._open
        if isinstance(error, PersiaError):
            if not isinstance(error, DataError):
                return None
            if error.step is not None:
                known = [*([open_batch] if open_batch else []), *self._feeder.fed]
                return next((fed_batch for fed_batch in known if fed_batch.step == error.step), None)
        return open_batch


class LoopIterator:
    """The iterator of a script's loop. It starts the loop at the first batch, and closes it when the script drops it.

    Args:
        start: Starts the loop.
    """

    def __init__(self, start: Callable[[], TrainingLoop]) -> None:
        self._start: Callable[[], TrainingLoop] | None = start
        self._loop: TrainingLoop | None = None

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    def __next__(self) -> TrainingBatch:
        """Return the next batch to train on."""
        start, self._start = self._start, None
        if start is not None:
            self._loop = start()
        batch = None if self._loop is None else self._loop.next()
        if batch is None:
            raise StopIteration
        return batch

    def close(self) -> None:
        """End the loop, unless it has already ended."""
        self._start, loop = None, self._loop
        if loop is not None:
            loop.close()

    def __del__(self) -> None:
        self.close()


def _log_first(step: int) -> None:
    """Log the first step of this process on rank 0, which shows that all parts of the job work."""
    global _first_done
    if not _first_done and settings.rank == 0:
        _logger.info("first step done: step %d", step)
    _first_done = True
