"""Embedding tables as a module of an existing model, without PersiaML's loop.

As with :class:`persia.ctx.TrainCtx`, the rows are in this process or, if ``PERSIA_NATS_URL`` is set, on embedding
servers. A forward pass is a step of the engine. The backward pass is its push.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable
from torch.utils.dlpack import from_dlpack

from persia.backend.base import Device
from persia.backend.evaluation import EvaluationReport
from persia.checkpoint import snapshot
from persia.checkpoint.run_state import saved_inputs
from persia.embedding import EmbeddingConfig
from persia.embedding.ids import as_bags, as_ids, as_offsets
from persia.embedding.inputs import InputNames
from persia.embedding.listed import listed, listed_sizes
from persia.embedding.optim import Optimizer
from persia.nn.defaults import as_optimizer
from persia.nn.session import PendingBackward, Session
from persia.nn.tables import TableConfig, check_tables
from persia.runtime.errors import BatchSizeError, DataError, FeatureTypeError, UsageError
from persia.runtime.logging import get_logger
from persia_core.data import Batch, BatchBuilder

_logger = get_logger("collection")

_FEATURES = 50
"""The maximum number of features whose order a warning lists."""

Array = torch.Tensor | npt.NDArray[Any]
Whole = Array | Sequence[int]

Feature = Whole | Sequence[Whole] | tuple[Whole, Whole] | tuple[Whole, Whole, Array]
"""Ids, one for each sample; or a list with the ids of each sample; or ids and batch + 1 offsets; or ids, offsets and
per-sample weights."""


class EmbeddingCollection(torch.nn.Module):
    """Embedding tables with autograd, which map features to one pooled vector per sample and feature.

    In training, with gradients enabled, a forward pass looks up rows. The backward pass pushes one gradient for each
    row. The push inserts missing rows, and ``optimizer`` updates the rows immediately. If gradients are accumulated
    over several backward passes, each pass updates the rows, as in torchrec's fused tables. A forward pass reads all
    updates that earlier backward passes have pushed. In evaluation (``eval()``, or under ``torch.no_grad()``), no row
    changes, and missing rows are zeros.

    A state dict does not contain the rows, but a reference to them. The state dict is refused if the collection has
    other rows. Save and load rows and state dict together, with :meth:`save` and :meth:`load`.

    The module has no parameters, so the optimizer of the model and DistributedDataParallel see only the other modules.
    ``torch.compile`` does not compile its forward pass (a graph break). Outputs are on ``device``. Do not use a
    gradient scaler, because its factor would be applied to the rows.

    Gradients are pushed once: a second backward pass through the same outputs raises
    :class:`~persia.errors.UsageError`. If a gradient has NaN or infinity, the backward pass pushes no gradient of this
    rank and changes no row. A warning names the feature and sample, and :attr:`skipped` is above 0 until the next push.
    The 25th consecutive pass without a push raises :class:`~persia.errors.NonFiniteError`. Other ranks push their
    gradients. The script runs the dense optimizer itself: call its ``step`` only if the norm that
    ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` returns is finite. Under DDP, the norm is finite on all
    ranks or on none.

    With ``PERSIA_NATS_URL`` set, the rows are on the job's servers, which are started with the slots that
    :meth:`embedding_config` returns. A process then has one collection and no TrainCtx, and every rank creates the
    collection. Embedding gradients are divided by the number of ranks, as DDP divides dense gradients. Construction,
    saving, loading and the first forward pass of training are collective: all ranks call them. Several ranks need a
    process group of torch, and torch refuses a second group. The collection starts a gloo group if there is none, so
    start a group with another backend *before* the collection::

        torch.cuda.set_device(env.get_local_rank())
        torch.distributed.init_process_group(
            "nccl", init_method="tcp://host:port", rank=env.get_rank(), world_size=env.get_world_size()
        )
        collection = EmbeddingCollection(tables)
        model = DistributedDataParallel(model.cuda(), device_ids=[env.get_local_rank()])

    Example:
        ::

            tables = [TableConfig("user", 16, ["user"]), TableConfig("item", 16, ["clicked", "bought"], pooling="mean")]
            collection = EmbeddingCollection(tables)
            for batch in batches:
                vectors = collection({"user": ids, "clicked": (ids, offsets), "bought": (ids, offsets)})
                loss = loss_fn(model(torch.cat(list(vectors.values()), 1)), batch.labels)
                loss.backward()
                dense_optimizer.step()

    Args:
        tables: The tables.
        optimizer: The optimizer of rows, by default :func:`persia.nn.default_optimizer`. None allows only evaluation:
            rows come from :meth:`load`, which then accepts a checkpoint of any optimizer, or from the training run on
            the servers.
        config: The initializer, the admission rule and the weight bound. None means
            :func:`persia.nn.default_embedding_config`. After :meth:`load`, None means the range that the checkpoint has
            for new rows.
        staleness: The maximum number of forward passes that may await their backward pass. None means
            ``EMBEDDING_STALENESS``, by default 8. With ``REPRODUCIBLE`` set, the staleness is 1. If another value is
            given, a warning is logged.
        device: The device on which vectors are pooled and their gradients summed: a CUDA device (``"cuda"`` means
            PyTorch's current device), or None for the CPU.
        dtype: The dtype of vectors on a CUDA device: float32, float16 or bfloat16.

    Raises:
        DeviceError: This build or machine has no such device.
        ConfigError: A table is invalid, or tables contradict each other. The message lists all errors.
        UsageError: The call is inside a context of :mod:`persia.ctx`, this process already has a collection over
            servers, or the staleness is out of range.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: Optimizer | Literal["default"] | None = "default",
        config: EmbeddingConfig | None = None,
        *,
        staleness: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.optimizer = as_optimizer(optimizer)
        check_tables(tables)
        self.tables = tuple(tables)
        self._pooling = {feature: table.pooling for table in tables for feature in table.feature_names}
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd record a forward pass
        self._session = Session(self.embedding_config(), self.optimizer, config, staleness, _device(device, dtype))

    def embedding_config(self) -> str:
        """Return the ``embedding_config.yml`` of these tables, for the servers of a job."""
        slots = [
            f"  {json.dumps(feature)}: {{dim: {table.embedding_dim}, pooling: {table.pooling}}}"
            for table in self.tables
            for feature in table.feature_names
        ]
        groups = [f"  {json.dumps(table.name)}: {json.dumps([*table.feature_names])}" for table in self.tables]
        parts = ["feature_index_prefix_bit: 0", "slots_config:", *slots, "feature_groups:", *groups]
        return "\n".join(parts) + "\n"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: Mapping[str, Feature]) -> dict[str, torch.Tensor]:
        """Look up and pool every feature.

        Args:
            features: For each feature name of the tables, its ids. Ids are a 1-d tensor or array of any integer dtype,
                or a list of ints, with one id for each sample. A sample may also have several ids: pass a list with
                such ids for each sample, or ``(ids, offsets)``, where sample ``i`` has
                ``ids[offsets[i]:offsets[i + 1]]``. If pooling is a sum, ``(ids, offsets, weights)`` adds a float32
                weight for each id. The weights get no gradient. Ids are those of :mod:`persia.embedding.ids`, as in a
                :class:`~persia.embedding.data.PersiaBatch`.

        Returns:
            For each feature, in the order of the tables (after :meth:`load`, of the checkpoint), a tensor ``[batch,
            embedding_dim]``, float32 unless the module was created with another dtype.

        Raises:
            DataError: A feature is missing or unknown, an id is negative or larger than 2^64 - 1, offsets or weights do
                not fit the ids, or there are more ids than a look-up may have. In the last case, pending forward passes
                must run their backward pass before the next forward pass, or their gradients are lost.
            FeatureTypeError: An input has a wrong dtype or number of dimensions.
            BatchSizeError: Features have different batch sizes, or no sample.
            UsageError: The number of forward passes without a backward pass has reached the staleness, a collection
                without an optimizer trains, or evaluates before it has rows, or weights require a gradient.
            RunLostError: With several ranks, an earlier forward pass failed for a reason other than its features. The
                other ranks end too.
        """
        training = self.training and torch.is_grad_enabled()
        batch = self._batch(features, requires_grad=training)
        if not training:
            looked = self._session.evaluate(batch)
            return dict(zip(looked.slots, map(from_dlpack, looked.embeddings()), strict=True))
        step = self._session.lookup_for_training(batch)
        tensors = _LookedUp.apply(self._anchor, step)
        return dict(zip(batch.slots, tensors, strict=True))

    def _batch(self, features: Mapping[str, Feature], *, requires_grad: bool) -> Batch:
        missing = [name for name in self._pooling if name not in features]
        unknown = [str(name) for name in features if name not in self._pooling]
        if missing or unknown:
            wrong = [f"missing: {listed(missing)}"] if missing else []
            wrong += [f"unknown: {listed(unknown)}"] if unknown else []
            names = listed(self._pooling)
            raise DataError(f"EmbeddingCollection: features {'; '.join(wrong)}; its tables have the features {names}")
        parts = {name: _Parts(name, features[name], pooling) for name, pooling in self._pooling.items()}
        sizes = {name: part.batch_size for name, part in parts.items()}
        size = next(iter(sizes.values()))
        if size <= 0 or any(other != size for other in sizes.values()):
            wanted = "at least one sample" if size <= 0 else f"the same number of samples ({size})"
            found = listed_sizes([*sizes.items()], size)
            raise BatchSizeError(f"EmbeddingCollection: expected {wanted} in all features, found {found}")
        builder = BatchBuilder(size, requires_grad, None)
        for part in parts.values():
            part.add_to(builder)
        return builder.build()

    def save(self, directory: str | os.PathLike[str], **states: dict[str, Any]) -> None:
        """Save the rows as a checkpoint in ``directory``, which is replaced atomically.

        The checkpoint includes every push of every rank so far. Every rank calls this method, which returns when the
        checkpoint is complete. Rank 0 writes the checkpoint. The ``states`` of other ranks are ignored.

        Args:
            directory: The directory, which is created if missing. A relative path is below ``PERSIA_CKPT_DIR``, if that
                is set. With servers, an absolute path must be below it too.
            **states: State dicts for the same checkpoint: ``model=model.state_dict()`` becomes ``model.pt``.

        Raises:
            StorageError: The checkpoint cannot be written. All ranks raise the error. The previous content remains.
            UsageError: The collection has no optimizer.
        """
        self._session.save(directory, [*self._pooling], {f"{name}.pt": state for name, state in states.items()})

    def load(self, directory: str | os.PathLike[str]) -> snapshot.Load:
        """Continue with the rows, the step and the learning rate of a checkpoint of a collection or of a context.

        Every file is verified before anything changes. Every rank calls this method, which returns when the rows are
        loaded. If one rank cannot load, no rank loads, so all ranks can catch the error and continue together. After
        the load, vectors are returned in the order that the model of the checkpoint used.

        Args:
            directory: The checkpoint. A relative path is below ``PERSIA_CKPT_DIR``, if that is set.

        Returns:
            The checkpoint. Its ``state("model.pt")`` is the ``model`` that was passed to :meth:`save`.

        Raises:
            CheckpointError: The directory has no checkpoint, the checkpoint is damaged (the message names the file),
                its tables or features differ, or this optimizer refuses its learning rate.
            UsageError: A forward pass has no backward pass yet.
        """
        tables = {feature: table.name for table in self.tables for feature in table.feature_names}
        loaded = self._session.load(directory, {feature: tables[feature] for feature in self._pooling})
        self._reorder(saved_inputs(loaded))
        return loaded

    def _reorder(self, names: InputNames | None) -> None:
        """Return vectors in the order of ``names``, followed by those of new features."""
        ordered = [*({} if names is None else dict.fromkeys(names.id_features)), *self._pooling]
        pooling = {name: self._pooling[name] for name in dict.fromkeys(ordered)}
        if [*pooling] != [*self._pooling]:
            _logger.warning(
                "from now on, this EmbeddingCollection returns its features in the order of the checkpoint's model, "
                "with new features at the end. The order is now: %s; before, it was: %s",
                listed(pooling, _FEATURES),
                listed(self._pooling, _FEATURES),
            )
        self._pooling = pooling

    @property
    def step(self) -> int:
        """The number of the last training step whose gradients were pushed, from 1.

        The count continues after a load.
        """
        return self._session.trained_step

    @property
    def skipped(self) -> int:
        """The number of this rank's consecutive backward passes that changed no row because of NaN or infinity."""
        return self._session.skipped

    @property
    def evaluation_report(self) -> EvaluationReport:
        """The report on looked-up ids without a row since the last training forward pass, save or load."""
        return self._session.evaluation.report

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters, gauges and times."""
        return self._session.engine.stats()

    def get_extra_state(self) -> torch.Tensor:
        """Return this module's part of a state dict: a reference to the current rows, not the rows themselves.

        After a push, the reference is to rows that no longer exist, unless a checkpoint has them: see :meth:`save`.
        """
        return self._session.rows.reference(self.step)

    def set_extra_state(self, state: object) -> None:
        """Check the reference of a state dict that is loaded. No row changes.

        Raises:
            CheckpointError: The rows of this module do not belong to the state dict. The module was trained after the
                state dict was taken, or has the rows of another checkpoint.
        """
        self._session.rows.check(state, self.step)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Load as torch does, but accept state dicts of older versions, which have no reference."""
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        key = f"{prefix}_extra_state"
        missing_keys: list[str] = arguments[2]
        if key not in state_dict:
            if key in missing_keys:
                missing_keys.remove(key)
            _logger.warning(
                "the state dict has no reference to the rows of its EmbeddingCollection (key %s), so its weights may "
                "not belong to the current rows; load the rows from the checkpoint of the state dict: "
                "collection.load(DIR)",
                key,
            )

    def close(self) -> None:
        """Apply all pushes and stop the engine. Rows in this process are lost.

        A collection is closed automatically when it is garbage collected or the process ends. Under the launcher, a run
        whose last pushes cannot be applied is not marked as finished.
        """
        self._session.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled, because the rows are not in the module.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "an EmbeddingCollection cannot be copied or pickled, because it does not contain its rows; use save()"
        )


class _LookedUp(torch.autograd.Function):
    """The vectors of one step, whose gradients are passed to the engine."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, step: PendingBackward) -> tuple[torch.Tensor, ...]:
        """Return the vectors, in the order of the batch."""
        del anchor
        ctx.step = step
        ctx.set_materialize_grads(False)
        return tuple(map(from_dlpack, step.embeddings()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        """Push the gradients. A vector on which the loss does not depend has no gradient."""
        ctx.step.push(gradients)
        return None, None


class _Parts:
    """The checked arrays of one feature, in the form that the engine takes."""

    def __init__(self, name: str, feature: Feature, pooling: str) -> None:
        given = feature if isinstance(feature, tuple) else (feature,)
        if not 1 <= len(given) <= 3:
            raise FeatureTypeError(
                f"feature {name!r}: expected ids, (ids, offsets) or (ids, offsets, weights), found a tuple of "
                f"length {len(given)}"
            )
        self.name = name
        self.offsets = self.weights = None
        if isinstance(feature, list) and any(not isinstance(each, int | np.integer) for each in feature):
            self.ids, self.offsets = as_bags(name, feature)
        else:
            self.ids = as_ids(name, given[0])
        if len(given) > 1:
            hint = ", as with include_last_offset=True of torch.nn.EmbeddingBag"
            self.offsets = as_offsets(name, given[1], len(self.ids), hint)
        if len(given) > 2:
            if isinstance(given[2], torch.Tensor) and given[2].requires_grad:
                raise UsageError(f"feature {name!r}: per-sample weights get no gradient; pass weights.detach()")
            if pooling != "sum":
                raise DataError(
                    f"feature {name!r}: per-sample weights need pooling='sum', but its table has {pooling!r}"
                )
            self.weights = _float32(name, given[2])
            if len(self.weights) != len(self.ids):
                found = f"weights: {len(self.weights)}, ids: {len(self.ids)}"
                raise DataError(f"feature {name!r}: expected one weight for each id, found {found}")

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    def add_to(self, builder: BatchBuilder) -> None:
        """Add the feature to a batch."""
        if self.offsets is None:
            builder.add_single(self.name, self.ids)
        else:
            builder.add_list(self.name, self.ids, self.offsets, self.weights)


def _float32(name: str, weights: object) -> npt.NDArray[np.float32]:
    """Return the weights as a 1-d contiguous array."""
    found = type(weights).__name__
    if isinstance(weights, torch.Tensor | np.ndarray):
        found = f"{weights.ndim}-d {str(weights.dtype).removeprefix('torch.')}"
        if found == "1-d float32":
            return np.ascontiguousarray(weights.cpu().numpy() if isinstance(weights, torch.Tensor) else weights)
    raise FeatureTypeError(f"feature {name!r}, weights: expected 1-d float32, found {found}")


def _device(device: torch.device | str | int | None, dtype: torch.dtype) -> Device | None:
    """Return the CUDA device and the dtype of vectors on it, or None for the CPU."""
    place = torch.device("cpu" if device is None else device)
    if place.type == "cuda":
        number: int | None = place.index
        if number is None:
            number = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return Device(number, dtype)
    if place.type != "cpu":
        raise UsageError(f"EmbeddingCollection(device={device!r}): expected a CUDA device, or None for the CPU")
    if dtype != torch.float32:
        raise UsageError(f"EmbeddingCollection(dtype={dtype}): on the CPU vectors are float32; pass a CUDA device")
    return None
