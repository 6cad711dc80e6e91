"""The training context: forward, backward, and checkpoints of the whole run."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from persia.backend.base import Backend
from persia.checkpoint import snapshot
from persia.checkpoint.policy import Checkpoints
from persia.checkpoint.resume import resume
from persia.checkpoint.run_state import RunState
from persia.ctx.checks import check_training
from persia.ctx.step import StepCtx, StepPolicy
from persia.distributed import run
from persia.distributed.options import DistributedBaseOption
from persia.distributed.sharded import ShardedModel
from persia.distributed.wrapped import unwrap_model
from persia.embedding.optim import Optimizer
from persia.loop.autosave import Autosave
from persia.loop.epochs import Epochs
from persia.loop.gather_model import GatherModel
from persia.loop.hooks import Hooks
from persia.loop.inputs import InputAgreement
from persia.loop.preemption import Preemption
from persia.loop.quarantine import Quarantine
from persia.loop.source import Source
from persia.loop.trained import TrainedBatches
from persia.loop.training import LoopOptions, TrainingLoop
from persia.loop.watchdog import Watchdog
from persia.monitor import trace
from persia.monitor import trainer as monitor
from persia.monitor.exporter import Exporter
from persia.monitor.trace import StepSpans
from persia.monitor.trainer import TrainerMetrics
from persia.runtime import preemption
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.places import Place
from persia.runtime.settings import settings

_logger = get_logger("ctx")


class TrainCtx(StepCtx):
    """Trains a model: an :class:`EmbeddingCtx` with a dense optimizer and an embedding optimizer.

    Args:
        embedding_optimizer: The optimizer of rows.
        dense_optimizer: The optimizer of the model.
        grad_scalar_update_factor: With mixed precision, the loss scale's growth interval in steps.
        backward_buffer_size: Accepted for compatibility with PersiaML, without effect: the staleness bounds the pushes
            in flight.
        backward_workers_size: Accepted for compatibility, without effect: the engine chooses the number of threads.
        grad_update_buffer_size: Accepted for compatibility, without effect: the staleness bounds the pushes in flight.
        lookup_emb_directly: Accepted for compatibility, without effect: a look-up always starts when its batch arrives.
        mixed_precision: Whether to scale the loss for float16, for dense and embedding gradients together. The model
            itself calls ``torch.autocast``. Without a GPU, this has no effect and is logged once. With ``precision``,
            this has no effect.
        distributed_option: How several ranks train the model: an option of :mod:`persia.distributed`. None means DDP.
            The option has no effect with one rank.
        *args: As in :class:`EmbeddingCtx`, after its mode.
        checkpoints: Saves the run during training, and resumes it from the newest checkpoint after a restart. Must be
            the same on every rank.
        embedding_gradient_scale: With several ranks, ``mean`` divides embedding gradients by the number of ranks, as
            DDP divides dense gradients; ``none`` sums them, as PersiaML does.
        precision: ``fp32``, ``bf16`` or ``fp16``: the model's forward runs under :func:`torch.autocast` of that dtype,
            and its outputs are converted to float32. ``fp16`` also scales the loss. None: autocast is left to the
            model.
        nonfinite: The reaction to NaN or infinity in the loss or a gradient. ``skip``: all ranks skip the step.
            ``raise``: all ranks end with NonFiniteError. In both cases, model and rows do not change.
        clip_norm: The maximum norm of the gradient of the model's weights. None: gradients are not clipped.
        hooks: Additional hooks of the training loop, equal on all ranks: see :mod:`persia.loop.hooks`.
        **kwargs: Passed to :class:`EmbeddingCtx`.

    Raises:
        UsageError: An optimizer or the model is missing, or the value of an argument is not allowed.
    """

    def __init__(
        self,
        embedding_optimizer: Optimizer,
        dense_optimizer: torch.optim.Optimizer,
        grad_scalar_update_factor: float = 4,
        backward_buffer_size: int = 10,
        backward_workers_size: int = 8,
        grad_update_buffer_size: int = 60,
        lookup_emb_directly: bool = True,
        mixed_precision: bool = True,
        distributed_option: DistributedBaseOption | None = None,
        *args: Any,
        checkpoints: Checkpoints | None = None,
        embedding_gradient_scale: str = "mean",
        precision: str | None = None,
        nonfinite: str = "skip",
        clip_norm: float | None = None,
        hooks: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        del backward_buffer_size, backward_workers_size, grad_update_buffer_size, lookup_emb_directly
        check_training(
            {
                "embedding_optimizer": embedding_optimizer,
                "dense_optimizer": dense_optimizer,
                "distributed_option": distributed_option,
                "checkpoints": checkpoints,
                "embedding_gradient_scale": embedding_gradient_scale,
                "nonfinite": nonfinite,
                "clip_norm": clip_norm,
                "grad_scalar_update_factor": grad_scalar_update_factor,
            }
        )
        policy = StepPolicy(nonfinite, clip_norm, precision, mixed_precision, int(grad_scalar_update_factor))
        super().__init__(dense_optimizer, policy, *args, **kwargs)
        self.embedding_optimizer = embedding_optimizer
        self._checkpoints = checkpoints
        self._option = distributed_option
        self._gradient_scale = embedding_gradient_scale
        self._more_hooks = tuple(hooks)
        self._unwrapped: torch.nn.Module | None = None
        self._autosave: Autosave | None = None
        self._epochs: Epochs | None = None
        self._preemption = contextlib.ExitStack()
        self._exported: tuple[TrainerMetrics, Exporter] | None = None
        self._spans: StepSpans | None = None

    def _open_backend(self) -> Backend:
        if self._checkpoints is not None:
            self._checkpoints.validate_storage()
        self._exported = monitor.start()
        if settings.nats_url is not None:
            if run.holds_session():
                raise UsageError(
                    "cannot enter TrainCtx together with an EmbeddingCollection: both use the same servers, and "
                    "TrainCtx starts from empty tables, so the rows of the collection would be dropped; close() the "
                    "collection first"
                )
            from persia.backend.remote import RemoteBackend  # imported here, because it imports gRPC

            return RemoteBackend(
                trains=True,
                device=self._device,
                option=self._option,
                gradient_scale=self._gradient_scale,
                configuration=self._configuration,
                metrics="" if self._exported is None else self._exported[1].address,
            )
        return super()._open_backend()

    def _on_enter(self) -> None:
        self._spans = trace.start()
        self._outer = None if self._owner else self._backend.row_settings
        self._backend.begin(optimizer=self.embedding_optimizer, config=self.embedding_config)
        if self.model is not None and unwrap_model(self.model) is self.model:
            self._unwrapped, self.model = self.model, self._backend.wrap(self.model)
            if isinstance(self.model, ShardedModel):
                self.model.bind(self.dense_optimizer)
        self._loop = None
        self._trained_batches = TrainedBatches()
        self._trained_batches.skipped = self._backward.skipped_steps
        self._state = RunState(
            self._backend,
            lambda: self.model,
            lambda: self.dense_optimizer,
            self.embedding_optimizer,
            self._backward.loss_scale,
            self._checkpoints,
        )
        self._epochs = Epochs(self._state)
        if self._checkpoints is not None:
            self._checkpoints.begin()
            self._autosave = Autosave(self._checkpoints, self._state)
            if self._backend.is_rank_0:
                self._epochs.resumed = resume(self._checkpoints, self._state)
            self._preemption.enter_context(preemption.saving_run())
        if self._exported is not None:
            self._exported[0].open(self, self._checkpoints if self._backend.is_rank_0 else None)
        if self._spans is not None:
            self._spans.open(self)

    def _on_exit(self) -> None:
        self._trained_batches.end_step(self._embeddings)
        super()._on_exit()

    def _stop_if_requested(self, left_by: BaseException | None) -> None:
        if self._loop is not None and isinstance(left_by, Exception):
            self._loop.failed(left_by)
        if left_by is None:
            self._trained_batches.check()
        if self._autosave is not None:
            self._autosave.exit_if_requested(left_by)

    def _unwrap(self) -> None:
        """Replace the wrapped model by the script's own model, after the last checkpoint, which gathers the shards."""
        if self._unwrapped is not None:
            if isinstance(self.model, ShardedModel):
                self.model.release(self.dense_optimizer)
            self._unwrapped, self.model = None, self._unwrapped

    def _release(self, error: BaseException | None) -> None:
        try:
            self._end_metrics()
        finally:
            try:
                self._release_run(error)
            finally:
                spans, self._spans = self._spans, None
                trace.stop(spans)  # the last pushes are applied at this point

    def _end_metrics(self) -> None:
        exported, self._exported = self._exported, None
        if exported is not None:
            try:
                exported[1].push()
            finally:
                exported[0].close(self)

    def _release_run(self, error: BaseException | None) -> None:
        try:
            self._unwrap()
            super()._release(error)
        finally:
            loop, self._loop, self._autosave, self._state = self._loop, None, None, None
            self._epochs = None
            if loop is not None:
                loop.release()
            self._preemption.close()

    def start_loop(self, source: Source, options: LoopOptions) -> TrainingLoop:
        """Start a pass over ``source``, for :class:`persia.data.DataLoader`. Collective: every rank must call it."""
        epochs = self._open_epochs
        epochs.begin_loop(self._loop)
        hooks: list[Any] = [Watchdog(run.hung, run.verdict), self._trained_batches, epochs]
        if self._checkpoints is not None:
            hooks = [Preemption(), *hooks, Quarantine(self._checkpoints), self._autosave]
        if not self._backend.is_alone:
            hooks += [InputAgreement(self._backend.inputs, lambda: self.model), GatherModel(self._run_state)]
        hooks += self._more_hooks
        self._loop = TrainingLoop(self._backend, self._run_state, source, Hooks(hooks), options).start()
        if self._exported is not None:
            self._exported[0].begin_loop(options.staleness, self._loop.step, self.model)
        if self._spans is not None:
            self._spans.begin_loop(self._loop.step)
        return self._loop

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the indices of the unfinished epochs. The body of the loop must have only one training loop.

        ::

            for epoch in ctx.epochs(10):
                for batch in loader:
                    ...

        A new run yields 0 to ``count - 1``. A resumed run begins with the interrupted epoch, whose training loop
        continues after the last batch of the checkpoint. If this batch was the last one of the epoch, the loop gets no
        batch, and the code after the loop runs again. Collective: every rank must call this method.

        Args:
            count: The number of epochs of the whole run.

        Raises:
            UsageError: ``count`` is negative or differs between ranks, or an iteration over epochs is already active.
        """
        return self._open_epochs.begin(count)

    @property
    def _open_epochs(self) -> Epochs:
        if self._epochs is None:
            raise UsageError(f"{type(self).__name__} is used outside its `with` block")
        return self._epochs

    def _begin_save(self, directory: Place) -> snapshot.Save:
        self._trained_batches.warn_untrained_save()
        return super()._begin_save(directory)

    def gather_model(self) -> None:
        """With FSDP, gather the weights of all ranks so that rank 0 can evaluate or save; otherwise do nothing.

        Every rank calls this after the same step. Automatic checkpoints and the end of a loop gather the weights
        themselves.
        """
        self._run_state.gather_model()

    def wait_servers_ready(self) -> None:
        """Wait until the embedding servers are ready. In the embedded mode, return immediately."""
        self._backend.wait_ready()

    def dump_checkpoint(  # type: ignore[override]  # PersiaML's signature
        self,
        dst_dir: str | os.PathLike[str],
        dense_model_filename: str = "dense.pt",
        jit_dense_model_filename: str = "jit_dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Save one consistent cut of the run: every push of the steps so far is applied, and no push is in flight.

        Rows with their optimizer state, the model, the dense optimizer, the random state and the data loader's
        position go into one checkpoint, which replaces the content of ``dst_dir`` atomically.

        With several ranks, rank 0 saves. On other ranks, the call is optional and returns immediately. Between two
        training loops, rank 0 waits until every rank has left the first loop, so the checkpoint includes the pushes of
        all ranks. Inside a loop, the cut is after rank 0's own pushes, and pushes of other ranks may be missing.

        Args:
            dst_dir: A directory, which is created if missing, or a URL such as ``s3://bucket/prefix/name``, to which
                this process and every server write. A relative path is below ``PERSIA_CKPT_DIR``, if that is set. With
                servers, an absolute path must also be below it.
            dense_model_filename: The name of the file with the model's state dict.
            jit_dense_model_filename: The name of the file with the scripted model.
            opt_filename: The name of the file with the dense optimizer's state dict.
            blocking: Whether to wait until the files are written. If False, the call returns after the cut, and
                training may continue meanwhile. The next dump or load and the end of the context wait for the files and
                raise the error of writing them. If an exception leaves the context, the wait is at most 15 s.
            with_jit_model: Whether to save the scripted model too.

        Raises:
            StorageError: The checkpoint cannot be written. The previous content of ``dst_dir`` remains.
            UnreachableError: Another rank has not left its training loop in ``PERSIA_RPC_TIMEOUT`` seconds.
        """
        if not self._backend.is_rank_0:
            return
        self._trained_batches.warn_untrained_save()
        self._backend.finish_checkpoint()
        self._backend.drain_all_ranks_between_loops()
        names = (dense_model_filename, opt_filename, jit_dense_model_filename if with_jit_model else None)
        save = self._run_state.begin_save(self._backend.checkpoint_dir(dst_dir), {}, *names)
        self._write(save, blocking=blocking)

    def save_run(self) -> None:
        """Save the run now, as ``checkpoints`` does at its interval.

        The call returns when the checkpoint is written or abandoned. Every rank calls this method after the same step,
        between two steps or after a loop that the script has left early.

        Raises:
            UsageError: The context has no ``checkpoints``.
        """
        if self._autosave is None:
            raise UsageError("cannot save the run without checkpoints; pass TrainCtx(checkpoints=Checkpoints(FOLDER))")
        self._autosave.save_last()

    def load_checkpoint(  # type: ignore[override]  # PersiaML's signature
        self,
        src_dir: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
    ) -> None:
        """Continue the run that :meth:`dump_checkpoint` saved. All files are verified before anything changes.

        The next data loader starts after the last batch that the checkpoint contains. In a context with
        ``checkpoints``, the objects in their ``state`` are also loaded, if ``checkpoints`` wrote the checkpoint.

        With several ranks, rank 0 loads. On other ranks, the call is optional and returns immediately. These ranks
        receive model, optimizer and data position from rank 0 when the next training loop starts.

        Args:
            src_dir: The checkpoint: a directory or a URL. A relative path is below ``PERSIA_CKPT_DIR``, if that is set.
            map_location: As in :func:`torch.load`, but None means the CPU. The model's tensors stay on their devices.
            dense_model_filename: The name of the file with the model's state dict.
            opt_filename: The name of the file with the dense optimizer's state dict.
            blocking: Accepted for compatibility with PersiaML, without effect: the load is complete when this call
                returns.

        Raises:
            CheckpointError: The directory has no checkpoint, the checkpoint is damaged (the message names the file),
                its configuration differs, or the embedding optimizer refuses its learning rate.
            UsageError: A data loader of this context is being iterated.
        """
        del blocking
        if not self._backend.is_rank_0:
            return
        if self.engine.iterating:
            raise UsageError("load_checkpoint cannot run inside a loop over a data loader; load before the loop")
        loaded = snapshot.Load(self._backend.checkpoint_dir(src_dir))
        self._run_state.restore(loaded, map_location, dense_model_filename, opt_filename)
