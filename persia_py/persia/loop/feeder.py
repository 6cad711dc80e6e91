"""Reads a data set ahead of training, in a separate thread."""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
from persia.loop.source import Source
from persia.runtime import flight
from persia.runtime.logging import get_logger
from persia_core.data import Batch
from persia_core.forward import Pipeline

_logger = get_logger("data")

LEAVE_S = 2.0
"""Seconds within which a reading thread must end."""


@dataclass(frozen=True)
class FedBatch:
    """A batch that was passed to the engine.

    Attributes:
        step: The step of the batch.
        position: The position of the data set after the batch, as text.
        batch: The batch from the data set; the engine has this batch, or an empty one in its place.
        quarantined: Whether the batch always fails on this rank. The engine then has an empty batch in its place.
    """

    step: int
    position: str
    batch: Batch
    quarantined: bool = False


class Feeder:
    """Feeds the batches of a source to a pipeline.

    An error of the data set is raised after the batches that precede it.

    Args:
        source: The data set that is read.
        pipeline: The pipeline that receives the batches.
        step: The number of the step before the first batch.
        slots: The slots of the run, for an empty batch.
        quarantined: Returns whether a batch must not be looked up.

    Attributes:
        fed: The batches that the engine has, in the order of their steps. The loop removes each when it takes its step
            from the pipeline.
    """

    def __init__(
        self, source: Source, pipeline: Pipeline, step: int, slots: list[str], quarantined: Callable[[FedBatch], bool]
    ) -> None:
        self.fed: deque[FedBatch] = deque()
        self._source = source
        self._pipeline = pipeline
        self._step = step
        self._slots = slots
        self._quarantined = quarantined
        self._thread = threading.Thread(target=self._run, name="persia-feed", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def _run(self) -> None:
        try:
            batches = self._source.batches()
            for step in itertools.count(self._step + 1):
                with flight.Call(flight.READ, step):
                    found = next(batches, None)
                if found is None:
                    break
                batch, position = found
                fed_batch = FedBatch(step, position, batch.data)
                fed_batch = replace(fed_batch, quarantined=self._quarantined(fed_batch))
                self.fed.append(fed_batch)
                if not self._pipeline.feed(empty_batch(self._slots) if fed_batch.quarantined else fed_batch.batch):
                    return  # the loop has ended early
            self._pipeline.end()
        except BaseException as error:  # the loop raises this error
            self._pipeline.fail(error)

    def end(self, *, completed: bool) -> None:
        """Stop reading, and prepare the source for the next loop. ``completed`` means that the loop reached its end."""
        stop_reading(self._thread, self._source, completed=completed)


def stop_reading(thread: threading.Thread, source: Source, *, completed: bool) -> None:
    """Stop a thread that reads ``source``, and prepare the source for the next loop."""
    source.interrupt()
    source.prepare_next_pass(completed=completed, read_to_end=_join(thread))


def _join(thread: threading.Thread) -> bool:
    """Wait for a reading thread, and return whether it has ended.

    A thread that hangs in the data set is left running.
    """
    if thread.ident is not None:
        thread.join(LEAVE_S)
    if thread.is_alive():
        _logger.warning("the data set is still busy %g s after the loop ended; its thread is left running", LEAVE_S)
    return not thread.is_alive()


def empty_batch(slots: list[str]) -> Batch:
    """Return a batch without ids. It is looked up instead of a batch that always fails, and is never trained on."""
    none = [np.empty(0, np.uint64)]
    return PersiaBatch([IDTypeFeature(slot, none) for slot in slots], labels=[Label(np.zeros((1, 1), np.float32))]).data
