"""The engine behind an :class:`persia.embedding.collection.EmbeddingCollection`, and steps between their two halves."""

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from persia import checkpoint, env
from persia.common import CommonContext, Settings
from persia.configs import Configuration
from persia.ctx import cnt_ctx
from persia.distributed import DDPOption
from persia.embedded import EmbeddedContext
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.optim import Optimizer
from persia.errors import NonFiniteError, UsageError
from persia.gradients import MAX_SKIPPED_STEPS
from persia.logger import get_logger
from persia_core import backward as _backward
from persia_core.data import Batch
from persia_core.engine import Engine
from persia_core.forward import Pipeline, Tensor, TrainingBatch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_logger = get_logger("collection")

_LOOKUP_S = 600.0
"""How long a look-up may take, as in :class:`persia.data.DataLoader`."""

_over_servers: "weakref.WeakSet[Session]" = weakref.WeakSet()
"""Sessions of this process whose rows are on servers: at most one."""


class Step:
    """A training forward until its gradients are pushed, or nobody can push them any more."""

    def __init__(self, session: "Session", batch: TrainingBatch) -> None:
        self._session = session
        self._batch = batch

    def embeddings(self) -> list[Tensor]:
        """Return the vectors, in the batch's order."""
        return self._batch.embeddings()

    def push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of the vectors on their way."""
        self._session.push(self, self._batch, gradients)

    def __del__(self) -> None:
        """Give up the right to push; after a push this does nothing."""
        self._batch.discard()


class _GivenGroup(DDPOption):
    """The process group that the user's own script has started, or else one of persia's."""

    def initialize(self, store: "Store", rank: int, world_size: int, device_id: int | None) -> None:
        """Start it, if there is none."""
        if not torch.distributed.is_initialized():
            super().initialize(store, rank, world_size, device_id)


class Session:
    """One engine and the training loop that is open on it.

    Args:
        slots: The text of its embedding configuration.
        optimizer: Updates the rows.
        config: How rows start; None is the default.
        staleness: Steps that may wait for their push.
    """

    def __init__(self, slots: str, optimizer: Optimizer, config: EmbeddingConfig | None, staleness: int | None) -> None:
        if cnt_ctx() is not None:
            raise UsageError(
                "EmbeddingCollection inside a context of persia.ctx, which has tables of its own: make it outside, or "
                "give its features to the context's batches"
            )
        self._reproducible = env.flag("REPRODUCIBLE")
        self._staleness = 1 if self._reproducible else env.staleness(staleness)
        self._optimizer = optimizer
        self._waiting: weakref.WeakSet[Step] = weakref.WeakSet()
        self._skipped = 0
        self._pipeline: Pipeline | None = None
        self._common = self._open(Configuration.of(slots, "the tables of EmbeddingCollection"))
        self._finalizer = weakref.finalize(self, self._common.close, None)
        try:
            self._common.apply(Settings(optimizer, config or get_default_embedding_config()))
        except BaseException:
            self.close()
            raise

    def _open(self, configuration: Configuration) -> CommonContext:
        if not os.environ.get("PERSIA_NATS_URL", "").strip():
            return EmbeddedContext(configuration)
        if _over_servers:
            raise UsageError(
                "a second EmbeddingCollection over the servers of one job would replace the first one's rows: put all "
                "tables into one, or close() the first"
            )
        from persia.remote import RemoteContext

        common = RemoteContext(trains=True, option=_GivenGroup(backend="gloo"), configuration=configuration)
        _over_servers.add(self)
        return common

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._common.engine

    @property
    def trained_step(self) -> int:
        """The last step whose gradients were pushed."""
        return self._common.trained_step

    def evaluate(self, batch: Batch) -> TrainingBatch:
        """Look a batch up without changing anything, behind every push so far."""
        self._check_open()
        return self._common.lookup(batch)

    def train(self, batch: Batch) -> Step:
        """Look a batch up for training, behind every push so far."""
        self._check_open()
        if len(self._waiting) >= self._staleness:
            raise UsageError(
                f"EmbeddingCollection: {len(self._waiting)} forwards wait for their backward, as many as "
                f"staleness={self._staleness} allows; call backward on their losses or drop what they returned, and "
                "evaluate in eval() or under torch.no_grad()"
            )
        pipeline = self._loop()
        try:
            self._common.engine.drain()
            looked = pipeline.next(_LOOKUP_S) if pipeline.feed(batch) else None
        except BaseException:
            self._leave_loop()  # the pipeline ends with the first error; what comes next opens another
            raise
        if looked is None:
            raise UsageError("EmbeddingCollection: its training loop was closed by another thread")
        step = Step(self, looked)
        self._waiting.add(step)
        return step

    def push(self, step: Step, batch: TrainingBatch, gradients: Sequence[torch.Tensor | None]) -> None:
        """Push the gradients of a step, or none of them if one has NaN or infinity.

        Raises:
            NonFiniteError: Too many steps in a row were skipped.
            UsageError: They were pushed before.
        """
        self._waiting.discard(step)
        dense = [None if each is None else each.detach().contiguous() for each in gradients]
        for name, gradient in zip(batch.slots, dense, strict=True):
            if gradient is not None and (place := _backward.first_nonfinite(gradient)) is not None:
                batch.discard()
                self._skip(
                    f"the gradient of feature {name!r}, sample {place // gradient.shape[1]}, is "
                    f"{gradient.flatten()[place].item()}",
                    batch.step,
                )
                return
        self._skipped = 0
        batch.push(dense, self._optimizer.lr_factor(batch.step))
        self._common.trained_step = max(self._common.trained_step, batch.step)

    def _skip(self, what: str, step: int) -> None:
        self._skipped += 1
        _logger.warning("step %d changes no row: %s", step, what)
        if self._skipped >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(f"{self._skipped} steps in a row had NaN or infinity; the last, step {step}: {what}")

    def save(self, directory: str | os.PathLike[str], states: Mapping[str, dict[str, Any]]) -> None:
        """Save rows and ``states`` as one checkpoint, on rank 0."""
        self._check_open()
        if not self._common.writes:
            return
        with checkpoint.Save(self.engine, self._common.checkpoint_dir(directory), self.trained_step) as save:
            for name, state in states.items():
                save.add_state(name, state)

    def load(self, directory: str | os.PathLike[str]) -> checkpoint.Load:
        """Replace rows and step by a checkpoint's."""
        self._check_open()
        if self._waiting:
            raise UsageError(
                f"EmbeddingCollection.load: {len(self._waiting)} forwards wait for their backward; call it, or drop "
                "what they returned"
            )
        loaded = checkpoint.Load(self._common.checkpoint_dir(directory))
        self._leave_loop()
        if self._common.writes:
            loaded.restore(self.engine)
            self._common.begin(resume=(loaded.epoch, loaded.step, loaded.seed))
        return loaded

    def _loop(self) -> Pipeline:
        if self._pipeline is None:
            self._pipeline = self._common.open_loop(self._staleness, self._reproducible, 1)
            self._common.spread(dict)
        return self._pipeline

    def _leave_loop(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            self._common.close_loop(pipeline, together=False)

    def close(self) -> None:
        """Apply what was pushed and end the engine."""
        if self._finalizer.alive:
            self._leave_loop()
            _over_servers.discard(self)
            self._finalizer()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise UsageError("this EmbeddingCollection is closed: make a new one")
