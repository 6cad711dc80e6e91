"""Training: forward, backward, and checkpoints of the whole run."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from persia.backend.base import Backend
from persia.checkpoint import rng_state, snapshot
from persia.checkpoint.autosave import Checkpoints
from persia.ctx.base import PreprocessMode
from persia.ctx.embedding import EmbeddingCtx, bare
from persia.distributed import run
from persia.distributed.options import DistributedBaseOption
from persia.embedding.optim import Optimizer
from persia.loop.backward import Backward
from persia.loop.loss_scale import LossScale
from persia.loop.quarantine import Work
from persia.runtime import preemption, settings, watchdog
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia_core.forward import Pipeline, TrainingBatch

if TYPE_CHECKING:
    from persia.data import DataLoader

_logger = get_logger("ctx")

_first_done = False

_LOSS_SCALE = "loss_scale.pt"
"""The file of a checkpoint that holds the scale of the loss."""
_PASSED = "passed"
"""The name of what a rank's state has of the batches that training is behind."""


class TrainCtx(EmbeddingCtx):
    """Trains: an :class:`EmbeddingCtx` with a dense optimizer and an embedding optimizer.

    Args:
        embedding_optimizer: Updates the rows.
        dense_optimizer: Updates the model.
        grad_scalar_update_factor: With mixed precision, the loss scale's growth interval in steps.
        backward_buffer_size: PersiaML's; the staleness bounds what is in flight.
        backward_workers_size: PersiaML's; the engine sizes its own threads.
        grad_update_buffer_size: PersiaML's; the staleness bounds what is in flight.
        lookup_emb_directly: PersiaML's; look-ups always start when a batch is there.
        mixed_precision: Scale the loss for float16, dense and embedding gradients together (``torch.autocast`` is the
            model's own); without a GPU it means nothing, and a log line says so once.
        distributed_option: How several ranks train the model, one of :mod:`persia.distributed`; None is DDP. It has no
            effect where there is one rank.
        *args: For :class:`EmbeddingCtx`, after its mode.
        checkpoints: Saves the run as it goes on, and goes on from the newest save when it is started again. The same on
            every rank.
        embedding_gradient_scale: With several ranks, ``mean`` divides embedding gradients by their number, as DDP does
            the dense ones; ``none`` sums them, as PersiaML does.
        **kwargs: For :class:`EmbeddingCtx`.

    Raises:
        UsageError: An optimizer or the model is missing.
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
        **kwargs: Any,
    ) -> None:
        del backward_buffer_size, backward_workers_size, grad_update_buffer_size, lookup_emb_directly
        super().__init__(PreprocessMode.TRAIN, *args, **kwargs)
        if not isinstance(embedding_optimizer, Optimizer):
            raise UsageError(
                f"TrainCtx(embedding_optimizer=...): want one of persia.embedding.optim, got "
                f"{type(embedding_optimizer).__name__}"
            )
        if not isinstance(dense_optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"TrainCtx(dense_optimizer=...): want a torch.optim.Optimizer, got {type(dense_optimizer).__name__}"
            )
        if distributed_option is not None and not isinstance(distributed_option, DistributedBaseOption):
            raise UsageError(
                f"TrainCtx(distributed_option=...): want one of persia.distributed, got "
                f"{type(distributed_option).__name__}"
            )
        if embedding_gradient_scale not in {"mean", "none"}:
            raise UsageError(f"TrainCtx(embedding_gradient_scale={embedding_gradient_scale!r}): want 'mean' or 'none'")
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            raise UsageError(
                f"TrainCtx(checkpoints=...): want persia.ctx.Checkpoints, got {type(checkpoints).__name__}"
            )
        if grad_scalar_update_factor < 1:
            raise UsageError(f"TrainCtx(grad_scalar_update_factor={grad_scalar_update_factor}): want at least 1")
        self.embedding_optimizer = embedding_optimizer
        self.dense_optimizer = dense_optimizer
        scale = LossScale(int(grad_scalar_update_factor)) if mixed_precision and self.device_id is not None else None
        if mixed_precision and scale is None:
            _logger.info("mixed_precision: no GPU, so the loss is not scaled")
        self._checkpoints = checkpoints
        self._option = distributed_option
        self._gradient_scale = embedding_gradient_scale
        self._bare: torch.nn.Module | None = None
        self._backward = Backward(dense_optimizer, scale)
        self._cursor: dict[str, Any] | None = None
        self._passed: dict[str, Any] | None = None  # of this rank, as a checkpoint has it
        self._random: dict[str, dict[str, Any]] = {}  # of all ranks, as a checkpoint has it
        self._loader: DataLoader | None = None
        self._stopping = contextlib.ExitStack()

    def _open(self) -> Backend:
        if settings.nats_url() is not None:
            if run.holds_session():
                raise UsageError(
                    "TrainCtx beside an EmbeddingCollection, whose rows are on the same servers: it would begin with "
                    "empty tables; close() the collection first"
                )
            from persia.backend.remote import RemoteBackend

            return RemoteBackend(
                trains=True, device=self._device, option=self._option, gradient_scale=self._gradient_scale
            )
        return super()._open()

    def _enter(self) -> None:
        self._outer = None if self._owner else self._common.settings
        self._common.begin(optimizer=self.embedding_optimizer, config=self.embedding_config)
        if self.model is not None and bare(self.model) is self.model:
            self._bare, self.model = self.model, self._common.wrap(self.model)
        if self._checkpoints is not None:
            self._checkpoints.poison.forget()
            if self._common.writes:
                self._checkpoints.load(self)
            self._stopping.enter_context(preemption.saving_run())

    def _exit(self) -> None:
        if self._bare is not None:
            self._bare, self.model = None, self._bare
        super()._exit()

    def _leave_if_asked(self, left_by: BaseException | None) -> None:
        if self._checkpoints is not None:
            if isinstance(left_by, Exception):
                self._checkpoints.poison.failed(left_by)
            self._checkpoints.leave_if_asked(self, left_by)

    def _leave(self, error: BaseException | None) -> None:
        try:
            super()._leave(error)
        finally:
            self._stopping.close()

    def open_loop(self, loader: "DataLoader", buffer: int, fed: Sequence[Work]) -> Pipeline:
        """Start a training loop over ``loader``; every rank calls this. For :class:`persia.data.DataLoader`."""
        self._common.wait_writing()
        pipeline = self._common.open_loop(loader.staleness, loader.reproducible, buffer)
        self._spread()
        if self._checkpoints is not None:
            self._checkpoints.learn_failures(self, fed)
        return pipeline

    def close_loop(self, pipeline: Pipeline, *, together: bool) -> None:
        """End a training loop, whole or left early; one that outlives this context has no other ranks to tell."""
        if self.common_context is None:
            pipeline.close()
        else:
            self.common_context.close_loop(pipeline, together=together)

    def _spread(self) -> None:
        """Give the other ranks what rank 0 has loaded from a checkpoint."""
        module = None if self.model is None else bare(self.model)
        state = self._common.spread(
            lambda: {
                "dense": None if module is None else module.state_dict(),
                "optimizer": self.dense_optimizer.state_dict(),
                "loss_scale": self._loss_scale_state(),
                "embedding_lr": self._optimizer.lr,
                "cursor": self._cursor,
                "more": None if self._checkpoints is None else self._checkpoints.state_dict(),
                "saved": 0 if self._checkpoints is None else self._checkpoints.saved,
                "random": self._random,
            }
        )
        if state is None:
            return
        if module is not None:
            module.load_state_dict(state["dense"])
        self.dense_optimizer.load_state_dict(state["optimizer"])
        self._load_loss_scale(state["loss_scale"])
        self._optimizer.update_lr(state["embedding_lr"])
        self._loader, self._cursor = None, state["cursor"]
        if self._checkpoints is not None and state["more"] is not None:
            self._checkpoints.go_on(state["saved"], state["more"])
        random = state["random"].get(rng_state.rank_state(settings.get_rank()))
        self._passed = None if random is None else random.get(_PASSED)
        if random is not None:
            rng_state.restore_random_state(random, self._optimizer)

    def _loss_scale_state(self) -> dict[str, Any] | None:
        scale = self._backward.loss_scale
        return None if scale is None else scale.state_dict()

    def _load_loss_scale(self, state: dict[str, Any] | None) -> None:
        scale = self._backward.loss_scale
        if scale is not None and state is not None:
            scale.load_state_dict(state)

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """What scales the loss, and the dense gradients back; None without mixed precision or a GPU."""
        scale = self._backward.loss_scale
        return None if scale is None else scale.scaler

    @property
    def common(self) -> Backend:
        """What nested contexts share. For :class:`Checkpoints`."""
        return self._common

    def rank_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank: its generators, and what its data was."""
        passed = self._passed if self._loader is None else self._loader.passed()
        return {**rng_state.random_state(self._optimizer), _PASSED: passed}

    @property
    def step(self) -> int:
        """The number of the last batch that was trained on, from 1; a resumed run counts on."""
        return self._common.trained_step

    @property
    def _optimizer(self) -> Optimizer:
        """The embedding optimizer in force: the last one applied."""
        return self._common.settings.optimizer or self.embedding_optimizer

    def backward(self, loss: torch.Tensor, embedding_gradient_check_frequency: int = 20) -> torch.Tensor:
        """Back-propagate, update the model, and send the embedding gradients on their way.

        A step with NaN or infinity in the loss or any gradient changes nothing, neither model nor rows, and is logged
        with the first tensor that has one.

        Args:
            loss: A scalar that depends on the last :meth:`forward`.
            embedding_gradient_check_frequency: PersiaML's; every step is checked.

        Returns:
            The loss that was back-propagated, detached: scaled with mixed precision.

        Raises:
            UsageError: No :meth:`forward` of a training batch came before.
            NonFiniteError: Too many steps in a row were skipped.
        """
        del embedding_gradient_check_frequency
        watchdog.progress()
        batch, self.current_batch = self.current_batch, None
        if batch is None or not batch.requires_grad:
            raise UsageError("TrainCtx.backward without a forward of a training batch before it")
        embeddings, self._embeddings = self._embeddings, []
        loss = self._backward(loss, batch, embeddings, self._optimizer, self._common)
        self._behind(batch)
        _log_first(batch.step)
        return loss.detach()

    def _behind(self, batch: TrainingBatch) -> None:
        """Note that training is behind a batch."""
        self.at_work(None)
        self._common.trained_step = batch.step
        preemption.trained()
        if self._loader is not None and batch.position is not None:
            self._loader.consumed(batch.position)

    def spares(self, work: Work) -> bool:
        """Whether this batch of this rank always fails and is left out. For :class:`persia.data.DataLoader`."""
        return self._checkpoints is not None and self._checkpoints.poison.spares(work)

    def leaves_out(self, batch: TrainingBatch, *, spared: bool) -> bool:
        """Leave a batch out if all ranks do, because one has ``spared`` its own; every rank calls this.

        For :class:`persia.data.DataLoader`.
        """
        if self._checkpoints is None or not self._checkpoints.poison.leaves_out(
            self._common, batch.step, spared=spared
        ):
            return False
        batch.discard()
        self._behind(batch)
        return True

    def at_work(self, work: Work | None) -> None:
        """Note which batch is in work: what ends the context meanwhile is its failure."""
        if self._checkpoints is not None:
            self._checkpoints.poison.at_work(work)

    def loop_left(self, frame: FrameType | None) -> None:
        """Note where the callers of a loop are that ends before its data. For :class:`persia.data.DataLoader`."""
        if self._checkpoints is not None:
            self._checkpoints.poison.loop_left(frame)

    @property
    def saves_itself(self) -> bool:
        """Whether this run was given :class:`Checkpoints`."""
        return self._checkpoints is not None

    def save_if_due(self) -> None:
        """Save the run where that is due, between two steps; on every rank. For :class:`persia.data.DataLoader`."""
        if self._checkpoints is not None:
            self._checkpoints.save_if_due(self, self.step)

    def save_last(self) -> None:
        """Save the run at the end of a training loop; on every rank. For :class:`persia.data.DataLoader`."""
        if self._checkpoints is not None:
            self._checkpoints.save_last(self, self.step)

    @property
    def saves_again(self) -> bool:
        """Whether the last save could not be written and is due again; only rank 0 knows."""
        return self._checkpoints is not None and self._checkpoints.due_again()

    def save_again(self) -> None:
        """Save the run behind the step it is at, because the last save could not be written; every rank does."""
        if self._checkpoints is not None:
            self._checkpoints.save(self, self.step)

    def adopt(self, loader: "DataLoader") -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Note that ``loader`` feeds this context.

        Returns:
            Where a loaded checkpoint wants it to start, and what that knows of the batches before, or None.
        """
        found = self._cursor, self._passed
        self._cursor, self._passed, self._loader = None, None, loader
        return found

    def wait_servers_ready(self) -> None:
        """Return when the embedding servers can be used: at once in the embedded mode."""
        self._common.wait_ready()

    def dump_checkpoint(  # type: ignore[override]  # PersiaML's signature
        self,
        dst_dir: str | os.PathLike[str],
        dense_model_filename: str = "dense.pt",
        jit_dense_model_filename: str = "jit_dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Save one consistent cut of the run: every push of the steps so far is applied, none is in flight.

        Rows with their optimizer state, the model, the dense optimizer, the random state and the data loader's
        position go into one checkpoint, which replaces what ``dst_dir`` held as a whole or not at all.

        With several ranks, rank 0 saves and the others return; it does not matter whether they call this. Between two
        training loops rank 0 waits until every rank has left the last one, so that the pushes of all ranks are in it.
        Inside a loop the rows are cut where rank 0 stands, after its own pushes; those of other ranks may be missing.

        Args:
            dst_dir: A directory; made if missing. A relative one is below ``PERSIA_CKPT_DIR``, where that is set; with
                servers every one has to be.
            dense_model_filename: The model's state dict inside it.
            jit_dense_model_filename: The scripted model inside it.
            opt_filename: The dense optimizer's state dict inside it.
            blocking: False returns as soon as rows and model are as they will be saved; training may go on while files
                are written. The next dump or load and the end of the context wait for that, and raise what it met; a
                context that is left by an error waits for 15 s.
            with_jit_model: Save the scripted model too.

        Raises:
            StorageError: It cannot be written; what was in ``dst_dir`` before is still there.
            UnreachableError: Another rank has not left its training loop in ``PERSIA_RPC_TIMEOUT`` seconds.
        """
        if not self._common.writes:
            return
        self._common.wait_written()
        self._common.settle_between_loops()
        names = (dense_model_filename, opt_filename, jit_dense_model_filename if with_jit_model else None)
        self._write(self.begin_checkpoint(self._common.checkpoint_dir(dst_dir), {}, *names), blocking=blocking)

    def begin_checkpoint(
        self,
        directory: Path,
        more: dict[str, dict[str, Any]],
        dense: str = "dense.pt",
        optimizer: str = "opt.pt",
        jit: str | None = None,
    ) -> snapshot.Save:
        """Return a save of the run as it is now into ``directory``, on rank 0, with ``more`` states by file name."""
        cursor = self._cursor if self._loader is None else self._loader.cursor()
        with self._begin_save(directory, cursor).kept() as save:
            if self.model is not None:
                save.add_state(dense, bare(self.model).state_dict())
                if jit is not None:
                    save.add_module(jit, bare(self.model))
            save.add_state(optimizer, self.dense_optimizer.state_dict())
            if (scale := self._loss_scale_state()) is not None:
                save.add_state(_LOSS_SCALE, scale)
            for name, state in {rng_state.rank_state(0): self.rank_state(), **more}.items():
                save.add_state(name, state)
        return save

    def load_checkpoint(  # type: ignore[override]  # PersiaML's signature
        self,
        src_dir: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
    ) -> None:
        """Continue the run that :meth:`dump_checkpoint` saved; every file is verified before anything changes.

        The next data loader starts behind the last batch the checkpoint contains. In a context with ``checkpoints``,
        what their ``state`` names goes on as well, if the checkpoint is one of theirs.

        With several ranks, rank 0 loads and the others return; it does not matter whether they call this. They get
        model, optimizer and data position from rank 0 when the next training loop starts.

        Args:
            src_dir: The checkpoint; a relative one is below ``PERSIA_CKPT_DIR``, where that is set.
            map_location: As in :func:`torch.load`, but None is the CPU; the model's tensors stay where they are.
            dense_model_filename: The model's state dict inside it.
            opt_filename: The dense optimizer's state dict inside it.
            blocking: PersiaML's; everything is loaded when this returns, either way.

        Raises:
            CheckpointError: No checkpoint there, damaged (the file is named), of another configuration, or with a
                learning rate that the embedding optimizer cannot have.
            UsageError: A data loader of this context is being iterated.
        """
        del blocking
        if not self._common.writes:
            return
        if self.engine.iterating:
            raise UsageError("load_checkpoint inside the loop over a data loader; load before the loop starts")
        loaded = snapshot.Load(self._common.checkpoint_dir(src_dir))
        self.go_on_from(loaded, map_location, dense_model_filename, opt_filename)

    def go_on_from(
        self,
        loaded: snapshot.Load,
        map_location: str | torch.device | None = None,
        dense_name: str = "dense.pt",
        optimizer_name: str = "opt.pt",
    ) -> None:
        """Continue the run of a verified checkpoint, on rank 0; nothing has changed where it does not fit."""
        dense = None if self.model is None else loaded.state(dense_name, map_location)
        optimizer = loaded.state(optimizer_name, map_location)
        ranks = {name: loaded.state(name) for name in loaded.names if rng_state.is_rank_state(name)}
        rank = loaded.state(rng_state.rank_state(0))
        more = None if self._checkpoints is None else self._checkpoints.state_in(loaded)
        scale = loaded.state(_LOSS_SCALE) if _LOSS_SCALE in loaded.names else None
        if self.model is not None and dense is not None:
            snapshot.check_module(bare(self.model), dense, loaded.path)
        snapshot.check_optimizer(self.dense_optimizer, optimizer, loaded.path)
        rng_state.check_random_state(rank, self._optimizer, loaded.path / rng_state.rank_state(0))
        self._restore(loaded)
        if self.model is not None and dense is not None:
            bare(self.model).load_state_dict(dense)
        self.dense_optimizer.load_state_dict(optimizer)
        self._load_loss_scale(scale)
        rng_state.restore_random_state(rank, self._optimizer)
        self._loader, self._cursor, self._random = None, loaded.cursor, ranks
        self._passed = rank.get(_PASSED)
        if self._checkpoints is not None:
            self._checkpoints.go_on(loaded.step, more)


def _log_first(step: int) -> None:
    """Log the first step of this process, on rank 0: everything is up and runs."""
    global _first_done
    if not _first_done and settings.get_rank() == 0:
        _logger.info("first step done: step %d", step)
    _first_done = True
