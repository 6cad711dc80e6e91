"""The engine of a :class:`persia.nn.EmbeddingCollection`, and its steps from forward to backward pass."""

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from persia.backend.base import Backend, Device, RowSettings
from persia.backend.evaluation import Evaluation
from persia.backend.local import LocalBackend
from persia.checkpoint import snapshot
from persia.distributed import run
from persia.distributed.options import DDPOption
from persia.embedding import EmbeddingConfig, inputs
from persia.embedding.config import Configuration
from persia.embedding.optim import Optimizer
from persia.loop import digests
from persia.loop.backward import MAX_SKIPPED_STEPS, Gradients
from persia.nn.defaults import STATE as _STATE
from persia.nn.defaults import default_embedding_config, range_of, saved_default
from persia.nn.forwards import Forwards
from persia.nn.loaded import check_features, saved_state, warn_unread_model
from persia.nn.reference import RowsVersion
from persia.runtime import clock, contexts, post_mortem
from persia.runtime.errors import (
    DataError,
    NonFiniteError,
    PersiaError,
    RunLostError,
    UsageError,
)
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia_core.data import Batch
from persia_core.engine import Engine
from persia_core.forward import Pipeline, Tensor, TrainingBatch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_logger = get_logger("collection")

_LOOKUP_S = 600.0
"""The time limit of a look-up, as in :class:`persia.data.DataLoader`."""


class PendingBackward:
    """A training forward pass until its gradients are pushed, or can no longer be pushed."""

    def __init__(self, session: "Session", batch: TrainingBatch) -> None:
        self._session = session
        self._batch = batch
        self._pushed = False

    def embeddings(self) -> list[Tensor]:
        """Return the vectors, in the order of the batch."""
        return self._batch.embeddings()

    def push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Push the gradients of the vectors."""
        self._pushed = True
        self._session.push(self, self._batch, gradients)

    def discard(self) -> None:
        """Discard the step, which is then never pushed. After a push this does nothing."""
        self._batch.discard()

    def lose(self) -> None:
        """Discard the step because another forward pass was refused. This is not an error of the script."""
        self._pushed = True
        self.discard()

    def __del__(self) -> None:
        self.discard()
        if not self._pushed:
            self._session.forwards.drop()


class _GivenGroup(DDPOption):
    """The process group that the script has started, or a group that Persia starts.

    torch refuses a second process group in a process, so the script cannot start one later.
    """

    def initialize(self, store: "Store", rank: int, world_size: int, device_id: int | None) -> None:
        """Start a process group, unless one exists."""
        if not torch.distributed.is_initialized():
            super().initialize(store, rank, world_size, device_id)


class Session:
    """An engine and the training loop that is open on it.

    Args:
        slots: The text of the embedding configuration.
        optimizer: The optimizer of rows; None for evaluation only.
        config: The configuration of new rows; None means that of :mod:`persia.nn.defaults`.
        staleness: The maximum number of steps that may wait for their push.
        device: The device that pools vectors; None means the CPU.

    Attributes:
        forwards: The counter of training forward passes.
        rows: The names of the collection's rows.
    """

    def __init__(
        self,
        slots: str,
        optimizer: Optimizer | None,
        config: EmbeddingConfig | None,
        staleness: int | None,
        device: Device | None = None,
    ) -> None:
        if contexts.current() is not None:
            raise UsageError(
                "cannot create an EmbeddingCollection inside a context of persia.ctx, which has its own tables: create "
                "it outside, or add its features to the batches of the context"
            )
        self._reproducible = settings.reproducible
        self._staleness = settings.staleness(staleness)
        if self._reproducible:
            if staleness is not None and self._staleness > 1:
                _logger.warning(
                    "EmbeddingCollection(staleness=%d): training is reproducible (REPRODUCIBLE in the environment), "
                    "so the staleness is 1",
                    self._staleness,
                )
            self._staleness = 1
        self._optimizer = optimizer
        self._is_default = config is None
        self._waiting: weakref.WeakSet[PendingBackward] = weakref.WeakSet()
        self.forwards = Forwards()
        self.rows = RowsVersion(known=optimizer is not None or settings.nats_url is None)
        self._loaded_from: snapshot.Load | None = None
        self.skipped = 0
        self._pipeline: Pipeline | None = None
        self._refused = False  # whether a refused batch, which was not looked up, has ended the pipeline
        self._lost = ""
        self._backend = self._open_backend(Configuration.of(slots, "the tables of EmbeddingCollection"), device)
        self.evaluation = Evaluation(self._backend, "collection.load(DIRECTORY)")
        self._finalizer = weakref.finalize(self, _end, self._backend, self.forwards, self.evaluation)
        try:
            self._backend.apply(RowSettings(optimizer, config or default_embedding_config()))
        except BaseException as error:
            self.close(error)
            raise

    def _open_backend(self, configuration: Configuration, device: Device | None) -> Backend:
        if settings.nats_url is None:
            return LocalBackend(configuration, device)
        if run.holds_session():
            raise UsageError(
                "cannot create a second EmbeddingCollection on the servers of one job, because they hold the rows of "
                "one collection; put all tables into one collection, or close() the first"
            )
        from persia.backend.remote import RemoteBackend

        if self._optimizer is None:
            return RemoteBackend(trains=False, device=device, configuration=configuration)
        group = _GivenGroup(backend="gloo")
        backend = RemoteBackend(
            trains=True, device=device, option=group, configuration=configuration, takes_batches=False
        )
        run.hold(self)
        return backend

    @property
    def engine(self) -> Engine:
        """The engine of the backend."""
        return self._backend.engine

    @property
    def trained_step(self) -> int:
        """The last step whose gradients were pushed."""
        return self._backend.trained_step

    def evaluate(self, batch: Batch) -> TrainingBatch:
        """Look up a batch after all pushes so far, without changing rows."""
        self._check_open()
        if self._optimizer is None and self._loaded_from is None and isinstance(self._backend, LocalBackend):
            raise UsageError(
                "this EmbeddingCollection evaluates only (optimizer=None) and has no rows: load a checkpoint first, "
                "collection.load(DIRECTORY)"
            )
        warn_unread_model(self._loaded_from, self.rows)
        looked = self._backend.lookup(batch)
        self.evaluation.add(batch, looked)
        return looked

    def lookup_for_training(self, batch: Batch) -> PendingBackward:
        """Look up a batch for training, after all pushes so far."""
        self._check_open()
        self._training_optimizer("a forward pass in training")
        self.evaluation.end()
        warn_unread_model(self._loaded_from, self.rows)
        if len(self._waiting) >= self._staleness:
            never = "" if self.forwards.backwards else " (no forward pass has had a backward pass)"
            raise UsageError(
                f"EmbeddingCollection: forward passes without a backward pass: {len(self._waiting)}, and "
                f"staleness={self._staleness} allows no more{never}; call backward() on a loss that depends on their "
                "outputs, or drop the outputs (a loss in a list keeps them: store loss.item() instead); to evaluate, "
                "use eval() or torch.no_grad()"
            )
        try:
            pipeline = self._loop()
            self.engine.drain()
            looked = clock.patiently(lambda: pipeline.next(_LOOKUP_S), _LOOKUP_S) if pipeline.feed(batch) else None
        except BaseException as error:
            self._fail(error)
            raise
        if looked is None:
            raise UsageError("EmbeddingCollection: another thread closed the collection during this forward pass")
        self.forwards.forward()
        step = PendingBackward(self, looked)
        self._waiting.add(step)
        return step

    def push(self, step: PendingBackward, batch: TrainingBatch, gradients: Sequence[torch.Tensor | None]) -> None:
        """Push the gradients of a step, or none of them if one has NaN or infinity.

        Raises:
            NonFiniteError: Too many steps in a row were skipped.
            UsageError: The gradients of the step were already pushed.
        """
        self._waiting.discard(step)
        self.forwards.backward()
        digests.record_push(batch, gradients)
        mine = Gradients(batch, list(gradients))
        if mine.nonfinite is None or bool(mine.nonfinite):
            nonfinite = mine.first_nonfinite("feature")
            if nonfinite is None and mine.nonfinite is not None:
                nonfinite = "the sum of the gradients of one id is not finite"
            if nonfinite is not None:
                batch.discard()
                if run.peers() is not None:  # other ranks may push, and change the rows
                    self.rows.changed()
                self._skip(nonfinite, batch.step)
                return
        self.skipped = 0
        self.rows.changed()
        mine.push(self._training_optimizer("a backward pass").lr_factor(batch.step))
        self._backend.trained_step = max(self._backend.trained_step, batch.step)

    def _skip(self, what: str, step: int) -> None:
        self.skipped += 1
        _logger.warning("step %d: this rank pushes no gradient: %s", step, what)
        if self.skipped >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{self.skipped} steps in a row had NaN or infinity; the last, step {step}: {what}",
                hint="lower the learning rate, or inspect the loss and the batch of this step",
            )

    def save(
        self, directory: str | os.PathLike[str], features: Sequence[str], states: Mapping[str, dict[str, Any]]
    ) -> None:
        """Save rows, learning rate and ``states`` as one checkpoint. Every rank calls this. Rank 0 writes."""
        self._check_open()
        optimizer = self._training_optimizer("save()")
        self.forwards.warn_untrained_save()
        self.evaluation.end()
        with self._backend.together("save, which every rank calls"):
            self.engine.drain()
        self.rows.set(name for names in self._backend.all_gather("rows", self.rows.names()) for name in names)
        with self._backend.together("the end of save"):
            if self._backend.is_rank_0:
                with snapshot.Save(self.engine, self._backend.checkpoint_dir(directory), self.trained_step) as save:
                    new_rows = range_of(self._backend.row_settings.config) if self._is_default else {}
                    save.add_state(_STATE, {"lr": float(optimizer.lr), "rows": self.rows.names(), **new_rows})
                    save.add_state(inputs.FILE, inputs.InputNames(tuple(features)).state())
                    for name, state in states.items():
                        save.add_state(name, state)

    def load(self, directory: str | os.PathLike[str], features: Mapping[str, str]) -> snapshot.Load:
        """Replace rows, step and learning rate by a checkpoint's. Every rank calls this. Rank 0 restores the rows.

        ``features`` maps each feature to the name of its table.
        """
        self._check_open()
        self._backend.check_loads("EmbeddingCollection.load")
        self.evaluation.rows_change()
        with self._backend.together("load, which every rank calls"):
            if self._waiting:
                raise UsageError(
                    "cannot load into this EmbeddingCollection: forward passes without a backward pass: "
                    f"{len(self._waiting)}; call backward(), or drop their outputs"
                )
            loaded = snapshot.Load(self._backend.checkpoint_dir(directory))
            lr, rows = saved_state(loaded, self._optimizer)
            check_features(loaded, features)
            settings_of_rows = self._backend.row_settings
            if self._is_default:
                settings_of_rows = RowSettings(self._optimizer, saved_default(loaded))
        with self._backend.together("the loop before a load"):  # in this block all ranks return, or all raise an error
            self._leave_loop()
            self.engine.drain()
        with self._backend.together("the end of load"):
            if self._backend.is_rank_0:
                self._backend.drain_all_ranks()
                loaded.restore(self.engine)
                self._backend.apply(settings_of_rows, (loaded.generation, loaded.step, loaded.seed))
        self._backend.row_settings = settings_of_rows
        self._backend.trained_step = loaded.step
        self.rows.set(rows)
        self._loaded_from = loaded
        if lr is not None and self._optimizer is not None:
            self._optimizer.update_lr(lr)
        return loaded

    def _loop(self) -> Pipeline:
        if self._pipeline is None:
            self._pipeline = self._backend.open_loop(self._staleness, self._reproducible, 1)
            self._backend.broadcast(dict)
        elif self._refused:
            for step in list(self._waiting):
                step.lose()  # its pipeline is closed below, so it can no longer be pushed
            self._waiting.clear()
            self._pipeline.close()
            self._pipeline = self.engine.open(self._staleness, self._reproducible, 1, self._backend.gradient_scale)
        self._refused = False
        return self._pipeline

    def _fail(self, error: BaseException) -> None:
        """Decide how the collection continues after a failed forward pass.

        A batch that was refused before its look-up has no step, and the next forward pass continues in the same
        generation. After any other failure the next loop needs a new generation, which all ranks must begin together.
        Other ranks do not know about the failure, so with several ranks the run ends.
        """
        if isinstance(error, DataError) and self._pipeline is not None and self._is_sound():
            self._refused = True
        elif run.peers() is None:
            self._leave_loop()
        else:
            self._lost = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            post_mortem.examine(error)
            run.fail(self._lost)

    def _is_sound(self) -> bool:
        try:
            self.engine.drain()
        except PersiaError:  # the look-up itself has failed
            return False
        return True

    def _leave_loop(self) -> None:
        pipeline, self._pipeline, self._refused = self._pipeline, None, False
        if pipeline is not None:
            self._backend.close_loop(pipeline, together=False)

    def close(self, error: BaseException | None = None) -> None:
        """Apply all pushes and stop the engine. An ``error`` is reported to the other ranks, and the run fails."""
        if self._finalizer.detach() is None:
            return
        run.release(self)
        try:
            if error is None and not run.failure():
                self._leave_loop()
        finally:
            _end(self._backend, self.forwards, self.evaluation, error)

    def _training_optimizer(self, what: str) -> Optimizer:
        if self._optimizer is not None:
            return self._optimizer
        raise UsageError(
            f"EmbeddingCollection: {what} needs an optimizer, but the collection was created with optimizer=None, for "
            "evaluation only. To evaluate, call eval() or use torch.no_grad(); to train, create the collection with an "
            "optimizer, such as Adagrad(lr=0.1)"
        )

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise UsageError("this EmbeddingCollection is closed; create a new one")
        if self._lost:
            raise RunLostError(
                f"a forward pass of this EmbeddingCollection failed, which ends the run on all ranks: {self._lost}"
            )


def _end(backend: Backend, forwards: Forwards, evaluation: Evaluation, error: BaseException | None = None) -> None:
    """Close the backend, and log how much was trained. The finalizer calls this at garbage collection and at exit.

    If the run has failed, close with that error.
    """
    evaluation.end()
    if error is None:
        forwards.log("EmbeddingCollection is closed")
    failed = run.failure()
    backend.close(error or (RunLostError(failed) if failed else None))
