"""The contexts a training or evaluation script works in.

A context is entered once; contexts nest, and an inner one shares the outermost one's engine and rows. With
``PERSIA_NATS_URL`` unset the rows live in this process and end with the outermost context: save a checkpoint to keep
them.
"""

import os
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.dlpack import from_dlpack
from typing_extensions import Self

from persia import checkpoint
from persia.embedded import EmbeddedContext, Settings
from persia.embedding import EmbeddingConfig
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Optimizer
from persia.errors import UsageError
from persia.gradients import Backward
from persia.logger import get_logger
from persia_core import forward as _forward
from persia_core.data import Batch
from persia_core.engine import Engine

if TYPE_CHECKING:
    from persia.data import DataLoader

_logger = get_logger("ctx")
_stack: list["BaseCtx"] = []

RANK_STATE = "rank-0.state"
"""The file of a checkpoint that holds rank 0's random state."""


class PreprocessMode(Enum):
    """What look-ups of a context are for."""

    TRAIN = 1
    EVAL = 2
    INFERENCE = 3


class BaseCtx:
    """Holds the engine for everything inside its ``with`` block.

    Args:
        threadpool_worker_size: PersiaML's; accepted, the engine sizes its own threads.
        device_id: CUDA device of the model, 0 included; None trains on the CPU.

    Attributes:
        device_id: As given.
        common_context: What nested contexts share; None before entry.

    Raises:
        DeviceError: This build or machine has no such device.
    """

    def __init__(self, threadpool_worker_size: int = 10, device_id: int | None = None) -> None:
        del threadpool_worker_size
        if device_id is not None:
            _forward.check_device(device_id)
        self.device_id = device_id
        self.common_context: EmbeddedContext | None = None
        self._owner = False

    def __enter__(self) -> Self:
        """Make this the current context."""
        if self in _stack:
            raise UsageError("this context is already entered; make a new one to nest")
        if os.environ.get("PERSIA_NATS_URL", "").strip():
            raise UsageError("PERSIA_NATS_URL is set, but this version has the embedded mode only: unset it")
        self._owner = not _stack
        self.common_context = EmbeddedContext() if self._owner else _stack[-1].common_context
        _stack.append(self)
        try:
            self._enter()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the context; the outermost one ends the engine."""
        try:
            self._exit()
        finally:
            self._leave()

    def _enter(self) -> None:
        """What a subclass does on entry."""

    def _exit(self) -> None:
        """What a subclass does on exit."""

    def _leave(self) -> None:
        _stack.remove(self)
        if self._owner and self.common_context is not None:
            self.common_context.close()
        self.common_context = None

    @property
    def _common(self) -> EmbeddedContext:
        if self.common_context is None:
            raise UsageError(f"{type(self).__name__} is used outside its `with` block")
        return self.common_context

    @property
    def engine(self) -> Engine:
        """The engine of this context."""
        return self._common.engine


class EmbeddingCtx(BaseCtx):
    """Looks embeddings up and runs the model on them.

    Args:
        preprocess_mode: Training look-ups insert missing rows; the others change nothing and read them as zeros.
        model: Called as ``model(non_id_tensors, embedding_tensors)``; needed by :meth:`forward`.
        embedding_config: How rows start; None keeps the outer context's, else the default.
        *args: For :class:`BaseCtx`.
        **kwargs: For :class:`BaseCtx`.
    """

    def __init__(
        self,
        preprocess_mode: PreprocessMode,
        model: torch.nn.Module | None = None,
        embedding_config: EmbeddingConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.preprocess_mode = preprocess_mode
        self.model = model
        self.embedding_config = embedding_config
        self.current_batch: _forward.TrainingBatch | None = None
        self._embeddings: list[torch.Tensor] = []
        self._was_training = False
        self._outer: Settings | None = None

    def _enter(self) -> None:
        self._outer = None if self._owner else self._common.settings
        if self._owner or self.embedding_config is not None:
            self._common.begin(config=self.embedding_config)
        if self.preprocess_mode is not PreprocessMode.TRAIN and self.model is not None:
            self._was_training = self.model.training
            self.model.eval()

    def _exit(self) -> None:
        if self.preprocess_mode is not PreprocessMode.TRAIN and self.model is not None:
            self.model.train(self._was_training)
        self.current_batch = None
        self._embeddings = []
        if self._outer is not None and self._outer != self._common.settings:
            self._common.apply(self._outer)

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Use ``embedding_config`` for rows made from now on."""
        self._common.begin(config=embedding_config)

    def forward(self, batch: "_forward.TrainingBatch | PersiaBatch") -> tuple[Any, list[torch.Tensor]]:
        """Run the model on a batch of a :class:`persia.data.DataLoader` or of :meth:`get_embedding_from_data`.

        Returns:
            The model's output, and the labels.

        Raises:
            UsageError: The context has no model.
        """
        if self.model is None:
            raise UsageError(f"{type(self).__name__}.forward without a model; give it as model=...")
        training = self.preprocess_mode is PreprocessMode.TRAIN
        with torch.set_grad_enabled(training and torch.is_grad_enabled()):
            non_id_tensors, embedding_tensors, labels = self.prepare_features(batch)
            return self.model(non_id_tensors, embedding_tensors), labels

    def prepare_features(
        self, batch: "_forward.TrainingBatch | PersiaBatch"
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return a batch's tensors.

        Returns:
            Dense inputs ``[batch, ...]``; one ``[batch, dim]`` float32 tensor per id feature, in the batch's order,
            with ``requires_grad`` in training; labels.
        """
        if isinstance(batch, PersiaBatch):
            batch = self.get_embedding_from_data(batch)
        self.current_batch = batch
        training = self.preprocess_mode is PreprocessMode.TRAIN and batch.requires_grad
        self._embeddings = [from_dlpack(tensor).requires_grad_(training) for tensor in batch.embeddings()]
        dense = [from_dlpack(tensor) for tensor in batch.dense()]
        return dense, self._embeddings, [from_dlpack(tensor) for tensor in batch.labels()]

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch, device_id: int | None = None
    ) -> "_forward.TrainingBatch":
        """Look a batch up now, outside any data loader, without changing a row."""
        return self._lookup(persia_batch.data, device_id)

    def get_embedding_from_bytes(self, data: bytes, device_id: int | None = None) -> "_forward.TrainingBatch":
        """As :meth:`get_embedding_from_data`, for what :meth:`PersiaBatch.to_bytes` returned.

        Raises:
            DataError: Not such bytes, or damaged.
        """
        return self._lookup(Batch.from_bytes(data), device_id)

    def _lookup(self, batch: Batch, device_id: int | None) -> "_forward.TrainingBatch":
        if device_id is not None:
            _forward.check_device(device_id)
        return self.engine.lookup(batch)

    def get_embedding_size(self) -> list[int]:
        """Return the number of rows each embedding server holds; one number in the embedded mode."""
        return [sum(self.engine.stats()["rows"].values())]

    def clear_embeddings(self) -> None:
        """Drop all rows."""
        self.engine.clear()

    def dump_checkpoint(
        self,
        dst_dir: str | os.PathLike[str],
        dense_filename: str = "dense.pt",
        jit_dense_filename: str = "jit_dense.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Save rows and model as one checkpoint in ``dst_dir``, which it replaces as a whole or not at all.

        Args:
            dst_dir: A directory; made if missing.
            dense_filename: The model's state dict inside it.
            jit_dense_filename: The scripted model inside it.
            blocking: PersiaML's; the checkpoint is complete when this returns, either way.
            with_jit_model: Save the scripted model too.

        Raises:
            StorageError: It cannot be written; what was in ``dst_dir`` before is still there.
        """
        del blocking
        with checkpoint.Save(self.engine, dst_dir, self._common.trained_step) as save:
            if self.model is not None:
                save.add_state(dense_filename, self.model.state_dict())
                if with_jit_model:
                    save.add_module(jit_dense_filename, self.model)

    def load_checkpoint(
        self,
        src_dir: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
    ) -> None:
        """Load rows and model; every file is verified before anything changes.

        Raises:
            CheckpointError: No checkpoint there, damaged (the file is named), or of another configuration.
        """
        del blocking
        loaded = checkpoint.Load(src_dir)
        if self.model is None:
            self._restore(loaded)
            return
        state = loaded.state(dense_filename, map_location)
        checkpoint.check_module(self.model, state, loaded.path)
        self._restore(loaded)
        self.model.load_state_dict(state)

    def _restore(self, loaded: checkpoint.Load) -> None:
        common = self._common
        loaded.restore(common.engine)
        common.begin(resume=(loaded.epoch, loaded.step, loaded.seed))

    def dump_embedding(self, dst_dir: str | os.PathLike[str], blocking: bool = True) -> None:
        """Save the rows alone, as a checkpoint without dense files."""
        del blocking
        with checkpoint.Save(self.engine, dst_dir, self._common.trained_step):
            pass

    def load_embedding(self, src_dir: str | os.PathLike[str], blocking: bool = True) -> None:
        """Replace the rows by those of a checkpoint, whatever dense files it has."""
        del blocking
        self._restore(checkpoint.Load(src_dir))

    def wait_for_dump_embedding(self) -> None:
        """Return when the last dump is complete: at once, because dumps are when they return."""

    def wait_for_load_embedding(self) -> None:
        """Return when the last load is complete: at once, because loads are when they return."""

    def dump_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        dst_dir: str | os.PathLike[str],
        file_name: str,
        is_jit: bool = False,
    ) -> None:
        """Write the state of a module or optimizer into ``dst_dir/file_name``, whole or not at all."""
        checkpoint.dump_state(torch_instance, Path(dst_dir), file_name, is_jit)

    def load_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        src_dir: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
    ) -> None:
        """Load what :meth:`dump_torch_state_dict` wrote; ``src_dir`` is the file's path.

        Raises:
            CheckpointError: The file is missing, no state dict, or does not fit.
        """
        checkpoint.load_state(torch_instance, Path(src_dir), map_location)


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
        mixed_precision: Scale the loss for float16; without a GPU it means nothing, and a log line says so once.
        distributed_option: For several ranks; the embedded mode has one, and refuses it.
        *args: For :class:`EmbeddingCtx`, after its mode.
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
        distributed_option: Any = None,
        *args: Any,
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
        if distributed_option is not None:
            raise UsageError("TrainCtx(distributed_option=...): the embedded mode trains with one rank; leave it out")
        if grad_scalar_update_factor < 1:
            raise UsageError(f"TrainCtx(grad_scalar_update_factor={grad_scalar_update_factor}): want at least 1")
        self.embedding_optimizer = embedding_optimizer
        self.dense_optimizer = dense_optimizer
        if mixed_precision and self.device_id is None:
            _logger.info("mixed_precision: no GPU, so the loss is not scaled")
        self._backward = Backward(dense_optimizer)
        self._cursor: dict[str, Any] | None = None
        self._loader: DataLoader | None = None

    def _enter(self) -> None:
        self._outer = None if self._owner else self._common.settings
        self._common.begin(optimizer=self.embedding_optimizer, config=self.embedding_config)

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
            The loss that was back-propagated, detached.

        Raises:
            UsageError: No :meth:`forward` of a training batch came before.
            NonFiniteError: Too many steps in a row were skipped.
        """
        del embedding_gradient_check_frequency
        batch, self.current_batch = self.current_batch, None
        if batch is None or not batch.requires_grad:
            raise UsageError("TrainCtx.backward without a forward of a training batch before it")
        embeddings, self._embeddings = self._embeddings, []
        self._backward(loss, batch, embeddings, self._optimizer)
        self._common.trained_step = batch.step
        if self._loader is not None and batch.position is not None:
            self._loader.consumed(batch.position)
        return loss.detach()

    def adopt(self, loader: "DataLoader") -> dict[str, Any] | None:
        """Note that ``loader`` feeds this context; return where a loaded checkpoint wants it to start."""
        cursor, self._cursor, self._loader = self._cursor, None, loader
        return cursor

    def wait_servers_ready(self) -> None:
        """Return when the embedding servers can be used: at once in the embedded mode."""
        del self.engine.stats()["rows"]

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

        Args:
            dst_dir: A directory; made if missing.
            dense_model_filename: The model's state dict inside it.
            jit_dense_model_filename: The scripted model inside it.
            opt_filename: The dense optimizer's state dict inside it.
            blocking: PersiaML's; the checkpoint is complete when this returns, either way.
            with_jit_model: Save the scripted model too.

        Raises:
            StorageError: It cannot be written; what was in ``dst_dir`` before is still there.
        """
        del blocking
        cursor = self._cursor if self._loader is None else self._loader.cursor()
        with checkpoint.Save(self.engine, dst_dir, self._common.trained_step, cursor) as save:
            if self.model is not None:
                save.add_state(dense_model_filename, self.model.state_dict())
                if with_jit_model:
                    save.add_module(jit_dense_model_filename, self.model)
            save.add_state(opt_filename, self.dense_optimizer.state_dict())
            save.add_state(RANK_STATE, checkpoint.random_state(self._optimizer))

    def load_checkpoint(  # type: ignore[override]  # PersiaML's signature
        self,
        src_dir: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
    ) -> None:
        """Continue the run that :meth:`dump_checkpoint` saved; every file is verified before anything changes.

        The next data loader starts behind the last batch the checkpoint contains.

        Raises:
            CheckpointError: No checkpoint there, damaged (the file is named), or of another configuration.
            UsageError: A data loader of this context is being iterated.
        """
        del blocking
        if self.engine.iterating:
            raise UsageError("load_checkpoint inside the loop over a data loader; load before the loop starts")
        loaded = checkpoint.Load(src_dir)
        dense = None if self.model is None else loaded.state(dense_model_filename, map_location)
        optimizer = loaded.state(opt_filename, map_location)
        rank = loaded.state(RANK_STATE)
        if self.model is not None and dense is not None:
            checkpoint.check_module(self.model, dense, loaded.path)
        checkpoint.check_optimizer(self.dense_optimizer, optimizer, loaded.path)
        self._restore(loaded)
        if self.model is not None and dense is not None:
            self.model.load_state_dict(dense)
        self.dense_optimizer.load_state_dict(optimizer)
        checkpoint.restore_random_state(rank, self._optimizer)
        self._loader, self._cursor = None, loaded.cursor


class InferCtx(EmbeddingCtx):
    """Serving from embedding servers; not in this version."""

    def __init__(self, embedding_worker_address_list: list[str], *args: Any, **kwargs: Any) -> None:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        del embedding_worker_address_list, args, kwargs
        self.wait_for_serving()

    def wait_for_serving(self) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "InferCtx: serving from embedding servers is not in this version; evaluate with eval_ctx after "
            "load_checkpoint"
        )


def cnt_ctx() -> BaseCtx | None:
    """Return the innermost context that is entered, or None."""
    return _stack[-1] if _stack else None


def eval_ctx(*args: Any, **kwargs: Any) -> EmbeddingCtx:
    """Return a context for evaluation; the model is in evaluation mode inside it, and as before after it."""
    return EmbeddingCtx(PreprocessMode.EVAL, *args, **kwargs)
