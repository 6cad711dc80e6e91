"""The data loader: batches whose embeddings are looked up ahead of time."""

import json
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from persia.ctx import EmbeddingCtx, PreprocessMode, TrainCtx, cnt_ctx
from persia.data.source import Cursor, IterableDataset, Stateful
from persia.data.streaming import StreamingDataset
from persia.distributed import run
from persia.embedding.data import PersiaBatch
from persia.loop.quarantine import Work, blank
from persia.runtime import preemption, settings, watchdog
from persia.runtime.errors import DataError, FeatureTypeError, UsageError
from persia.runtime.logging import get_logger
from persia_core.forward import Pipeline, TrainingBatch

_logger = get_logger("data")

_LEAVE_S = 2.0
_REMIND_S = 30.0
_SLICE_S = 0.5
"""How long SIGTERM may have to wait."""


class DataLoader:
    """Iterates batches whose embeddings are looked up ahead of time.

    Inside a :class:`persia.ctx.TrainCtx` the look-ups of coming batches overlap the dense step and the pushes of past
    ones; inside :func:`persia.ctx.eval_ctx` nothing is changed by them.

    Args:
        dataset: Where batches come from.
        forward_buffer_size: PersiaML's; the staleness bounds the batches looked up ahead.
        timeout_ms: How long a look-up may take. Waiting for the data set has no limit, but is logged every 30 s.
        num_workers: PersiaML's; the engine sizes its own threads.
        reproducible: Bit-equal runs: staleness 1, every look-up after the push before it.
        embedding_staleness: K: at most K - 1 pushes are unacknowledged when a look-up is served. None means
            ``EMBEDDING_STALENESS``, else 8.

    Raises:
        UsageError: A number out of range, no :class:`IterableDataset`, or ``reproducible`` with a staleness of not 1.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        forward_buffer_size: int = 10,
        timeout_ms: int = 600_000,
        num_workers: int = 10,
        reproducible: bool = False,
        embedding_staleness: int | None = None,
    ) -> None:
        del num_workers
        if not isinstance(dataset, IterableDataset):
            raise UsageError(f"DataLoader(dataset=...): want an IterableDataset, got {type(dataset).__name__}")
        if forward_buffer_size < 1 or timeout_ms < 1:
            raise UsageError(
                f"DataLoader(forward_buffer_size={forward_buffer_size}, timeout_ms={timeout_ms}): want at least 1"
            )
        self.dataset = dataset
        self.reproducible = reproducible or settings.flag("REPRODUCIBLE")
        if self.reproducible and embedding_staleness not in (None, 1):
            raise UsageError(
                f"DataLoader(embedding_staleness={embedding_staleness}): reproducible training (the argument, or "
                "REPRODUCIBLE in the environment) has staleness 1"
            )
        self.staleness = 1 if self.reproducible else settings.staleness(embedding_staleness)
        self._timeout_s = timeout_ms / 1000
        self._cursor: Cursor | None = None
        self._start: Cursor | None = None  # of the whole pass, also when it is entered behind it
        self._end: Cursor | None = None
        self._skip = 0

    def __iter__(self) -> Iterator[TrainingBatch]:
        """Iterate one pass over the data set."""
        context = cnt_ctx()
        if not isinstance(context, EmbeddingCtx):
            raise UsageError("a DataLoader is iterated inside TrainCtx or eval_ctx; there is no such context here")
        if isinstance(context, TrainCtx):
            return self._train(context)
        if context.preprocess_mode is PreprocessMode.TRAIN:
            raise UsageError("training needs TrainCtx: an EmbeddingCtx has no optimizers")
        return self._evaluate(context)

    def _train(self, context: TrainCtx) -> Iterator[TrainingBatch]:
        fed: deque[Work] = deque()
        pipeline = context.open_loop(self, self.dataset.buffer_size, fed)
        arguments = (pipeline, fed, context, context.engine.step)
        feeder = threading.Thread(target=self._feed, args=arguments, name="persia-feed", daemon=True)
        whole = together = False
        try:
            self._skip = self._resume(*context.adopt(self))
            feeder.start()
            with (
                preemption.stoppable(context.saves_itself),
                watchdog.watching(lambda: context.step, run.hung),
            ):
                context.save_if_due()  # a loop before this one may have been left behind any step
                while self._all_go_on(pipeline, fed, context) and (held := self._next(pipeline, fed)):
                    work = fed.popleft()
                    if context.leaves_out(held[0], spared=work.spared):
                        held.clear()
                    else:
                        context.at_work(work)
                        preemption.begin_step()
                        yield held.pop()
                        preemption.end_step()
                        context.at_work(None)
                    watchdog.progress()
                    context.save_if_due()
                context.save_last()
                preemption.leave_if_asked()
            together = True
            if run.peers() is None or not pipeline.has_next():
                self._cursor = self._start = self._end
                whole = True
            elif not isinstance(self.dataset, StreamingDataset):  # another rank's data ended: the pass is over
                self._cursor = self._start
        except GeneratorExit:
            context.loop_left(sys._getframe().f_back)
            raise
        except DataError:  # not of the loop's body, which is not in here: the next batch was refused
            if fed:
                context.at_work(fed[0])
            raise
        finally:
            try:
                context.close_loop(pipeline, together=together)
            finally:
                self._end_reading(feeder, whole=whole)

    def _all_go_on(self, pipeline: Pipeline, fed: deque[Work], context: TrainCtx) -> bool:
        """Agree with the other ranks on the next step, before any of them looks its batch up.

        Ranks train in lock-step: when one has no batch left, all stop there. Rank 0 says who, and what is left over.
        """
        peers = run.peers()
        if peers is None and not context.saves_itself:
            return True
        with preemption.waiting_for_data(), watchdog.waiting():
            ready = pipeline.has_next()
        preemption.leave_if_asked()
        again = context.saves_again
        if run.agree(ready and not again):
            return True
        if peers is None:
            if again:
                context.save_again()
            return True
        waiting = self.dataset.waiting() if isinstance(self.dataset, StreamingDataset) else 0
        given = peers.share("batches left", [len(fed) + waiting if ready else 0, again])
        if any(again for _, again in given):
            context.save_again()
            return self._all_go_on(pipeline, fed, context)
        left = [count for count, _ in given]
        if peers.rank == 0 and any(left):
            _logger.warning(
                "all ranks stop after step %d: the data of rank %s has ended; left unused so far: %s",
                context.step,
                ", ".join(str(rank) for rank, count in enumerate(left) if not count),
                ", ".join(f"{count} batches of rank {rank}" for rank, count in enumerate(left) if count),
            )
        return False

    def _next(self, pipeline: Pipeline, fed: deque[Work]) -> list[TrainingBatch]:
        """Return the next batch in a list, empty after the last: the loop above must keep no reference to it."""
        with watchdog.waiting():
            batch = pipeline.next(self._timeout_s)
        if batch is None:
            return []
        batch.position = fed[0].position
        return [batch]

    def _resume(self, cursor: Cursor | None, passed: dict[str, Any] | None) -> int:
        """Take the data set to where this pass starts; return how many batches to skip."""
        stateful = self.dataset if isinstance(self.dataset, Stateful) else None
        if self._start is None and stateful is not None:
            self._start = _position(0, stateful.state_dict())
        if cursor is not None and cursor["source"] is not None and stateful is not None:
            stateful.load_state_dict(cursor["source"])
            if isinstance(self.dataset, StreamingDataset):
                self.dataset.expect(passed)
        elif cursor is None:
            cursor = None if stateful is None else _position(0, stateful.state_dict())
        self._cursor = cursor
        return int(cursor["batches"]) if cursor is not None and cursor["source"] is None else 0

    def _end_reading(self, reader: threading.Thread, *, whole: bool) -> None:
        """End the thread that reads ahead; the loop after one that was left early goes on behind its last step."""
        streaming = self.dataset if isinstance(self.dataset, StreamingDataset) else None
        if streaming is not None:
            streaming.interrupt()
        joined = _join(reader)
        if streaming is not None:
            streaming.settle(whole=whole)
        elif joined and not whole:
            self._rewind()

    def _rewind(self) -> None:
        if isinstance(self.dataset, Stateful) and self._cursor is not None and self._cursor["source"] is not None:
            self.dataset.load_state_dict(self._cursor["source"])

    def _feed(self, pipeline: Pipeline, fed: deque[Work], context: TrainCtx, step: int) -> None:
        """Read the data set ahead of ``step``, in a thread of its own; an error reaches the loop in its place."""
        slots = context.common.configuration.embedding.slots
        stateful = self.dataset if isinstance(self.dataset, Stateful) else None
        count = 0
        try:
            for batch in self.dataset:
                count += 1
                if count <= self._skip:
                    continue
                _check_training(batch, count)
                step += 1
                position = json.dumps(_position(count, None if stateful is None else stateful.state_dict()))
                work = Work(step, position, batch.data)
                work = replace(work, spared=context.spares(work))
                fed.append(work)
                if not pipeline.feed(blank(slots) if work.spared else batch.data):
                    return  # the loop ended early
            self._end = None if stateful is None else _position(0, stateful.state_dict())
            pipeline.end()
        except BaseException as error:  # whatever a data set raises belongs to the loop
            pipeline.fail(error)

    def consumed(self, position: str) -> None:
        """Note that training is behind the batch that carries ``position``."""
        self._cursor = json.loads(position)
        if isinstance(self.dataset, StreamingDataset) and self._cursor is not None:
            self.dataset.trained(self._cursor["source"])

    def cursor(self) -> Cursor | None:
        """Return the position behind the last trained batch, for a checkpoint; None at the start of a pass."""
        return self._cursor

    def passed(self) -> dict[str, Any] | None:
        """Return what this rank's checkpoint keeps of the batches that training is behind; None if it is nothing."""
        return self.dataset.passed() if isinstance(self.dataset, StreamingDataset) else None

    def _evaluate(self, context: EmbeddingCtx) -> Iterator[TrainingBatch]:
        ready: queue.Queue[PersiaBatch | BaseException | None] = queue.Queue(self.dataset.buffer_size)
        stop = threading.Event()

        def put(item: PersiaBatch | BaseException | None) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def read() -> None:
            try:
                for batch in self.dataset:
                    if not put(batch):
                        return
                put(None)
            except BaseException as error:
                put(error)

        reader = threading.Thread(target=read, name="persia-read", daemon=True)
        reader.start()
        try:
            while (item := _wait_for(ready)) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield context.get_embedding_from_data(item)
                if isinstance(self.dataset, StreamingDataset):
                    self.dataset.used()
        finally:
            stop.set()
            self._end_reading(reader, whole=not isinstance(self.dataset, StreamingDataset))


def _position(batches: int, source: Any) -> Cursor:
    """Return a cursor, checked to be the same after a checkpoint has written and read it.

    Raises:
        UsageError: The data set's state is no plain JSON.
    """
    try:
        same = json.loads(json.dumps(source)) == source
    except (TypeError, ValueError):
        same = False
    if not same:
        raise UsageError(
            f"the data set's state_dict() cannot be kept in a checkpoint: {source!r}; return numbers, strings, lists "
            "and dicts with strings for keys"
        )
    return {"batches": batches, "source": source}


def _join(thread: threading.Thread) -> bool:
    """Wait for a reading thread; one that is stuck in the data set is left behind, with a word, and gives False."""
    if thread.ident is not None:
        thread.join(_LEAVE_S)
    if thread.is_alive():
        _logger.warning("the data set is still busy %g s after the loop ended; its thread is left behind", _LEAVE_S)
    return not thread.is_alive()


def _wait_for(ready: "queue.Queue[PersiaBatch | BaseException | None]") -> PersiaBatch | BaseException | None:
    """Return the next item; waiting for the data set has no limit, and is logged."""
    started = reminded = time.monotonic()
    while True:
        preemption.leave_if_asked()
        try:
            return ready.get(timeout=_SLICE_S)
        except queue.Empty:
            if time.monotonic() - reminded > _REMIND_S:
                reminded = time.monotonic()
                _logger.warning("waiting for a batch from the source since %.0f s", reminded - started)


def _check_training(batch: object, number: int) -> None:
    if not isinstance(batch, PersiaBatch):
        raise FeatureTypeError(f"the data set's batch {number}: want a PersiaBatch, got {type(batch).__name__}")
    if not batch.data.requires_grad:
        raise DataError(
            f"the data set's batch {number} has requires_grad=False and cannot be trained on; "
            "iterate it inside eval_ctx, or leave requires_grad out"
        )
