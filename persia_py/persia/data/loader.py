"""The data loader, which looks up embeddings in advance."""

import queue
import threading
import time
from collections.abc import Iterator

from persia.ctx import EmbeddingCtx, PreprocessMode, TrainCtx, cnt_ctx
from persia.data.source import IterableDataset
from persia.data.streaming import StreamingDataset
from persia.embedding.data import PersiaBatch
from persia.loop.feeder import stop_reading
from persia.loop.source import Source
from persia.loop.training import LoopIterator, LoopOptions
from persia.runtime import preemption
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia.runtime.waits import REMIND_S, SLICE_S
from persia_core.forward import TrainingBatch

_logger = get_logger("data")


class DataLoader:
    """Iterates over batches whose embeddings are looked up in advance.

    Inside a :class:`persia.ctx.TrainCtx`, the look-ups of coming batches overlap the dense step and the pushes of
    earlier batches. Inside :func:`persia.ctx.eval_ctx`, look-ups change nothing.

    Args:
        dataset: The source of batches.
        forward_buffer_size: Accepted for compatibility with PersiaML, without effect: the staleness bounds the number
            of batches looked up ahead.
        timeout_ms: The time limit of a look-up. Waiting for the data set has no limit, apart from
            ``PERSIA_DATA_TIMEOUT`` in training.
        num_workers: Accepted for compatibility with PersiaML, without effect: the engine chooses the number of threads.
        reproducible: Whether runs are bit-identical: the staleness is 1 (with a warning if another value is given), and
            every look-up waits for the previous push.
        embedding_staleness: K: at most K - 1 pushes are unacknowledged when a look-up for training is served. None
            means ``EMBEDDING_STALENESS``, by default 8.

    Raises:
        UsageError: An argument is out of range, or ``dataset`` is not an :class:`IterableDataset`.
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
            raise UsageError(f"DataLoader(dataset=...): expected an IterableDataset, found {type(dataset).__name__}")
        if forward_buffer_size < 1 or timeout_ms < 1:
            raise UsageError(
                f"DataLoader(forward_buffer_size={forward_buffer_size}, timeout_ms={timeout_ms}): "
                "both must be at least 1"
            )
        self.reproducible = reproducible or settings.reproducible
        self.staleness = settings.staleness(embedding_staleness)
        if self.reproducible:
            if embedding_staleness is not None and self.staleness > 1:
                _logger.warning(
                    "DataLoader(embedding_staleness=%d): training is reproducible (reproducible=True, or REPRODUCIBLE "
                    "in the environment), so the staleness is 1",
                    self.staleness,
                )
            self.staleness = 1
        self._timeout_s = timeout_ms / 1000
        self.dataset = dataset

    @property
    def dataset(self) -> IterableDataset:
        """The source of batches. A newly assigned data set is iterated from its start."""
        return self._dataset

    @dataset.setter
    def dataset(self, dataset: IterableDataset) -> None:
        self._dataset, self._source = dataset, Source(dataset)

    def __iter__(self) -> Iterator[TrainingBatch]:
        """Make one pass over the data set."""
        context = cnt_ctx()
        if not isinstance(context, EmbeddingCtx):
            raise UsageError(
                "a DataLoader must be iterated inside TrainCtx or eval_ctx; no such context is entered here"
            )
        if isinstance(context, TrainCtx):
            options = LoopOptions(self.staleness, self.reproducible, self._timeout_s)
            return LoopIterator(lambda: context.start_loop(self._source, options))
        if context.preprocess_mode is PreprocessMode.TRAIN:
            raise UsageError("training needs TrainCtx: an EmbeddingCtx has no optimizers")
        return self._evaluate(context)

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
            stop_reading(reader, self._source, completed=not isinstance(self.dataset, StreamingDataset))


def _wait_for(ready: "queue.Queue[PersiaBatch | BaseException | None]") -> PersiaBatch | BaseException | None:
    """Return the next item. Waiting for the data set has no time limit, but is logged every 30 s."""
    started = reminded = time.monotonic()
    while True:
        preemption.exit_if_requested()
        try:
            return ready.get(timeout=SLICE_S)
        except queue.Empty:
            if time.monotonic() - reminded > REMIND_S:
                reminded = time.monotonic()
                _logger.warning("still waiting for a batch of the data set after %.0f s", reminded - started)
