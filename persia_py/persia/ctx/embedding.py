"""Look-ups outside training: evaluation, saving and loading."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from persia.backend.base import RowSettings
from persia.backend.evaluation import Evaluation, EvaluationReport
from persia.backend.inputs import Arranger
from persia.checkpoint import snapshot
from persia.checkpoint.run_state import restore_rows, saved_inputs
from persia.ctx.base import BaseCtx, PreprocessMode
from persia.ctx.checks import LabelCheck, TruncatedSlots, check_rows, named_error
from persia.ctx.tensors import given_tensors
from persia.distributed.sharded import check_loads, with_whole_state
from persia.distributed.wrapped import unwrap_model, whole_model
from persia.embedding import EmbeddingConfig, inputs
from persia.embedding.data import PersiaBatch, with_mask
from persia.embedding.inputs import Arrangement, arranged
from persia.runtime import flight, preemption, watchdog
from persia.runtime.errors import UsageError
from persia.runtime.files import is_url
from persia.runtime.places import Place
from persia_core import forward as _forward
from persia_core.data import Batch


class EmbeddingCtx(BaseCtx):
    """Looks up embeddings and runs the model on them.

    Args:
        preprocess_mode: The purpose of look-ups. No look-up changes rows. For a missing row, look-ups for training
            return the initial values with which the push will insert it. Other look-ups return zeros.
        model: Called as ``model(non_id_tensors, embedding_tensors)``; :meth:`forward` requires it.
        embedding_config: The configuration of new rows; None keeps that of the outer context, or the default.
        *args: Passed to :class:`BaseCtx`.
        **kwargs: Passed to :class:`BaseCtx`.

    Raises:
        UsageError: ``embedding_config`` has another class, such as the class for the configuration of slots.
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
        check_rows(embedding_config, type(self).__name__)
        self.preprocess_mode = preprocess_mode
        self.model = model
        self.embedding_config = embedding_config
        self.current_batch: _forward.TrainingBatch | None = None
        self._embeddings: list[torch.Tensor] = []
        # the training modes of the model's modules before an evaluation
        self._modes: list[tuple[torch.nn.Module, bool]] = []
        self._outer: RowSettings | None = None
        self._truncated = TruncatedSlots()
        self._arranger = Arranger()
        self._label_check = LabelCheck()
        self._evaluation: Evaluation | None = None

    def _on_enter(self) -> None:
        self._outer = None if self._owner else self._backend.row_settings
        if self._owner or self.embedding_config is not None:
            self._backend.begin(config=self.embedding_config)
        if self.preprocess_mode is not PreprocessMode.TRAIN:
            self._evaluation = Evaluation(self._backend, "ctx.load_checkpoint(DIRECTORY)")
        if self._evaluation is not None and self.model is not None:
            self._modes = [(module, module.training) for module in self.model.modules()]
            self.model.eval()

    def _on_exit(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
        if self._modes and self.model is not None:
            self.model.train(self._modes[0][1])
            for module, was_training in self._modes:  # the script may have frozen some, such as a BatchNorm
                module.training = was_training
            self._modes = []
        self.current_batch = None
        self._embeddings = []
        if self._outer is not None and self._outer != self._backend.row_settings:
            self._backend.apply(self._outer)

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Use ``embedding_config`` for rows that are inserted from now on.

        Raises:
            UsageError: The argument is not an embedding configuration. For example, it is the configuration of slots.
        """
        check_rows(embedding_config, "configure_embedding_parameter_servers")
        self._backend.begin(config=embedding_config)

    @property
    def evaluation_report(self) -> EvaluationReport:
        """The report on the ids of this evaluation that have no row; empty in training.

        The report remains available after the ``with`` block.
        """
        return EvaluationReport() if self._evaluation is None else self._evaluation.report

    def forward(self, batch: "_forward.TrainingBatch | PersiaBatch") -> tuple[Any, Any]:
        """Run the model on a batch of a :class:`persia.data.DataLoader` or of :meth:`get_embedding_from_data`.

        Returns:
            The model's output, and the labels: a list of tensors, or None where :meth:`prepare_features` returns None.
            A label of integers or bools that has the shape of a float output is converted to float32, or to float64 if
            the output is float64. A label with values beyond 2^24 is not converted, and a warning names it.

        Raises:
            DataError: The inputs of the batch differ from those that the model was trained on. The message names them.
            UsageError: The context has no model.
            FeatureTypeError: The model does not accept the dtype of a dense input. The message names the input.
        """
        watchdog.progress()
        if self.model is None:
            raise UsageError(f"cannot call forward(): this {type(self).__name__} has no model; pass model=...")
        with torch.set_grad_enabled(self.preprocess_mode is PreprocessMode.TRAIN and torch.is_grad_enabled()):
            if isinstance(batch, PersiaBatch):
                batch = self.get_embedding_from_data(batch)
            self._arrange(batch, whole=True)
            return self._run_model(batch, *self.prepare_features(batch))

    def _run_model(
        self, batch: "_forward.TrainingBatch", dense: list[torch.Tensor], embeddings: list[torch.Tensor], labels: Any
    ) -> tuple[Any, Any]:
        """Return the model's output for the tensors of a batch, or of some of its rows, and the labels."""
        assert self.model is not None  # noqa: S101 - forward has checked it
        places, training = self._arrange(batch, whole=True), self.preprocess_mode is PreprocessMode.TRAIN
        try:  # an evaluation runs on one rank only, and must not use a collective
            with contextlib.ExitStack() as calls:
                if training:
                    calls.enter_context(self._backend.collective())
                    calls.enter_context(flight.Call(flight.FORWARD, batch.step))
                output = (self.model if training else whole_model(self.model))(dense, embeddings)
        except RuntimeError as error:
            named = named_error(error, dense, arranged(batch.dense_names, places.dense), embeddings, self.model)
            if named is error:
                raise
            raise named from error
        names = arranged(batch.label_names, places.labels)
        return output, None if labels is None else self._label_check.forward(output, labels, names)

    def prepare_features(
        self, batch: "_forward.TrainingBatch | PersiaBatch"
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        """Return a batch's tensors, in the order of the first batch that the model was trained on.

        Id features, and dense inputs and labels that have names, are found by name, so their order in the batch has no
        effect. Unnamed dense inputs and labels keep their positions. A batch that is only looked up may have only some
        of the features, but :meth:`forward` requires all.

        Returns:
            Dense inputs ``[batch, ...]``, one tensor per id feature, and a list of labels. The tensors of id features
            are float32 or ``embedding_dtype``, and gradients flow through them to the rows in training. Instead of the
            labels, None is returned for a batch without labels and in the mode ``INFERENCE``. All tensors are on the
            context's device, ready on the stream that is current in PyTorch during this call. A pooled feature is
            ``[batch, dim]``. A raw (sequence) feature is ``[batch, sample_fixed_size, dim + 1]``: the rows of the
            sample's first ids, padded with zeros. The last column is 1 for an id and 0 for padding.
            :func:`persia.utils.split_mask` splits this column off.

        Raises:
            DataError: The inputs of a training batch differ from those of the first one. The message names them.
        """
        if isinstance(batch, PersiaBatch):
            batch = self.get_embedding_from_data(batch)
        self.current_batch = batch
        training = self._trains_on(batch)
        places = self._arrange(batch, whole=training)
        self._embeddings = [from_dlpack(tensor).requires_grad_(training) for tensor in batch.embeddings()]
        dense = arranged(given_tensors(batch, batch.dense()), places.dense)
        inference = self.preprocess_mode is PreprocessMode.INFERENCE
        labels = None if inference else arranged(given_tensors(batch, batch.labels()), places.labels) or None
        embeddings = [
            rows if mask is None else with_mask(rows, from_dlpack(mask))
            for rows, mask in zip(self._embeddings, batch.masks(), strict=True)
        ]
        self._truncated.log(batch)
        return dense, arranged(embeddings, places.id_features), labels

    def _trains_on(self, batch: "_forward.TrainingBatch") -> bool:
        return self.preprocess_mode is PreprocessMode.TRAIN and batch.requires_grad

    def _arrange(self, batch: "_forward.TrainingBatch", *, whole: bool) -> Arrangement:
        known, training = self._backend.inputs, self._trains_on(batch)
        return self._arranger.arrange(batch, known, self.model, training=training, whole=whole)

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch, device_id: int | None = None
    ) -> "_forward.TrainingBatch":
        """Look up a batch outside any data loader. No row changes. ``device_id=None`` means the context's device."""
        return self._lookup(persia_batch.data, device_id)

    def get_embedding_from_bytes(self, data: bytes, device_id: int | None = None) -> "_forward.TrainingBatch":
        """Like :meth:`get_embedding_from_data`, for the result of :meth:`PersiaBatch.to_bytes`.

        Raises:
            DataError: The bytes are not an encoded batch, or are damaged.
        """
        return self._lookup(Batch.from_bytes(data), device_id)

    def _lookup(self, batch: Batch, device_id: int | None) -> "_forward.TrainingBatch":
        preemption.exit_if_requested()
        device = self._backend.device
        own = device is not None and device_id == device.number
        looked = self._backend.lookup(batch, None if own else device_id)
        if self._evaluation is not None:
            self._evaluation.add(batch, looked)
        return looked

    def get_embedding_size(self) -> list[int]:
        """Return the number of rows each embedding server holds; one number in the embedded mode.

        The numbers include all earlier pushes of this rank. Inside a loop, pushes of other ranks may be missing.
        """
        self.engine.drain()
        return self.engine.server_rows()

    def clear_embeddings(self) -> None:
        """Drop all rows.

        Raises:
            UsageError: This process only evaluates, while another process trains on the rows.
        """
        self._backend.check_alone("clear_embeddings")
        self._backend.finish_checkpoint()
        self.engine.clear()

    def dump_checkpoint(
        self,
        dst_dir: str | os.PathLike[str],
        dense_filename: str = "dense.pt",
        jit_dense_filename: str = "jit_dense.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Save rows and model as one checkpoint. ``dst_dir`` is replaced atomically.

        With several ranks, rank 0 saves. On other ranks, the call is optional and returns immediately.

        Args:
            dst_dir: A directory, which is created if missing, or a URL such as ``s3://bucket/prefix/name``. A relative
                path is below ``PERSIA_CKPT_DIR``, if that is set.
            dense_filename: The name of the file with the model's state dict.
            jit_dense_filename: The name of the file with the scripted model.
            blocking: Whether to wait until the files are written. If False, the call returns after the cut, and
                training may continue meanwhile. The next dump or load and the end of the context wait for the files and
                raise the error of writing them. If an exception leaves the context, the wait is at most 15 s.
            with_jit_model: Whether to save the scripted model too.

        Raises:
            StorageError: The checkpoint cannot be written. The previous content of ``dst_dir`` remains.
            UsageError: With servers, ``PERSIA_CKPT_DIR`` is not set, ``dst_dir`` is not below it, or this process only
                evaluates.
        """
        if not self._backend.is_rank_0:
            return
        self._backend.finish_checkpoint()
        with self._begin_save(self._backend.checkpoint_dir(dst_dir)).kept() as save:
            names = self._backend.inputs.for_evaluation(self.model)
            if self.model is not None:
                save.add_state(dense_filename, inputs.annotate(whole_model(self.model).state_dict(), names))
                if with_jit_model:
                    save.add_module(jit_dense_filename, unwrap_model(self.model))
            if names is not None:
                save.add_state(inputs.FILE, names.state())
        self._write(save, blocking=blocking)

    def _begin_save(self, directory: Place) -> snapshot.Save:
        """Wait until any other save is complete, and return a save of the current rows."""
        self._backend.join_checkpoint_thread()
        return snapshot.Save(self.engine, directory, self._backend.trained_step)

    def _write(self, save: snapshot.Save, *, blocking: bool) -> None:
        if blocking:
            with watchdog.waiting():
                save.write()
        else:
            self._backend.checkpoint_thread = snapshot.Writing(save)

    def load_checkpoint(
        self,
        src_dir: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
    ) -> None:
        """Load rows and model. All files are verified before anything changes.

        With several ranks, rank 0 loads the rows, and each rank that calls this method loads its model. Ranks do not
        wait for each other.

        Args:
            src_dir: The checkpoint: a directory or a URL. A relative path is below ``PERSIA_CKPT_DIR``, if that is set.
            map_location: As in :func:`torch.load`, but None means the CPU. The model's tensors stay on their devices.
            dense_filename: The name of the file with the model's state dict. A checkpoint of an
                :class:`~persia.nn.EmbeddingCollection` has no file of the default name. Its ``model.pt``, which
                ``save(model=...)`` writes, is used instead.
            blocking: Accepted for compatibility with PersiaML, without effect: the load is complete when this call
                returns.

        Raises:
            CheckpointError: The directory has no checkpoint, the checkpoint is damaged (the message names the file), or
                its configuration differs.
            UsageError: With servers, this process only evaluates.
        """
        del blocking
        self._backend.check_loads("load_checkpoint")
        if self.model is None and not self._backend.is_rank_0:
            return
        loaded = snapshot.Load(self._backend.checkpoint_dir(src_dir))
        state = None if self.model is None else loaded.state(loaded.model_name(dense_filename), map_location)
        if self.model is not None and state is not None:
            state = snapshot.check_module(unwrap_model(self.model), state, loaded.path)
        names = saved_inputs(loaded)
        if self._backend.is_rank_0:
            restore_rows(self._backend, loaded)
        if self.model is not None and state is not None:
            unwrap_model(self.model).load_state_dict(state)
        self._backend.inputs.set(self.model, names)

    def dump_embedding(self, dst_dir: str | os.PathLike[str], blocking: bool = True) -> None:
        """Save only the rows, as a checkpoint without dense files. With several ranks, rank 0 saves.

        ``blocking`` has the same meaning as in :meth:`dump_checkpoint`.

        Raises:
            StorageError: The checkpoint cannot be written. The previous content of ``dst_dir`` remains.
            UnreachableError: Another rank has not left its training loop in ``PERSIA_RPC_TIMEOUT`` seconds.
            UsageError: With servers, this process only evaluates.
        """
        if self._backend.is_rank_0:
            self._backend.finish_checkpoint()
            self._backend.drain_all_ranks_between_loops()
            self._write(self._begin_save(self._backend.checkpoint_dir(dst_dir)), blocking=blocking)

    def load_embedding(self, src_dir: str | os.PathLike[str], blocking: bool = True) -> None:
        """Replace the rows by those of a checkpoint. Its dense files are ignored. With several ranks, rank 0 loads.

        Raises:
            CheckpointError: The directory has no checkpoint, the checkpoint is damaged (the message names the file), or
                its configuration differs.
            UsageError: With servers, this process only evaluates.
        """
        del blocking
        self._backend.check_loads("load_embedding")
        if self._backend.is_rank_0:
            restore_rows(self._backend, snapshot.Load(self._backend.checkpoint_dir(src_dir)))

    def wait_for_dump_embedding(self) -> None:
        """Wait until the last dump is complete, including one with ``blocking=False``.

        Raises:
            StorageError: The checkpoint could not be written. The previous content of its directory remains.
        """
        self._backend.finish_checkpoint()

    def wait_for_load_embedding(self) -> None:
        """Return immediately: a load is complete when the call that loads returns."""

    def dump_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        dst_dir: str | os.PathLike[str],
        file_name: str,
        is_jit: bool = False,
    ) -> None:
        """Write the state of a module or optimizer to ``dst_dir/file_name`` atomically.

        Raises:
            UsageError: ``dst_dir`` is a URL, or the instance is sharded over ranks (FSDP) and was not gathered.
        """
        torch_instance = with_whole_state(torch_instance)
        module = torch_instance if isinstance(torch_instance, torch.nn.Module) else None
        names = None if module is None else self._backend.inputs.of(module)
        snapshot.dump_state(torch_instance, _local("dump_torch_state_dict", dst_dir), file_name, is_jit, names)

    def load_torch_state_dict(
        self,
        torch_instance: torch.nn.Module | torch.optim.Optimizer,
        src_dir: str | os.PathLike[str],
        map_location: str | torch.device | None = None,
    ) -> None:
        """Load what :meth:`dump_torch_state_dict` wrote; ``src_dir`` is the file's path.

        Raises:
            CheckpointError: The file is missing, is not a state dict, or does not fit.
            UsageError: ``src_dir`` is a URL, or the instance is sharded over ranks (FSDP).
        """
        check_loads(torch_instance)
        names = snapshot.load_state(torch_instance, _local("load_torch_state_dict", src_dir), map_location)
        if isinstance(torch_instance, torch.nn.Module):
            self._backend.inputs.set(torch_instance, names)


def _local(caller: str, path: str | os.PathLike[str]) -> Path:
    if is_url(path):
        raise UsageError(
            f"{caller}: {os.fspath(path)}: expected a local path; URLs of HDFS and object stores are not supported here"
        )
    return Path(path)


def eval_ctx(*args: Any, **kwargs: Any) -> EmbeddingCtx:
    """Return a context for evaluation. On exit it restores the mode of each module of the model."""
    return EmbeddingCtx(PreprocessMode.EVAL, *args, **kwargs)
