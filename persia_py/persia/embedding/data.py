"""Features, labels and batches that a script makes."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from persia.runtime.errors import BatchSizeError, DataError, FeatureTypeError, MissingLabelError
from persia_core import data as _core

if TYPE_CHECKING:
    import torch

MAX_BATCH_SIZE = 65535
"""PersiaML's limit. The name is kept for its scripts; larger batches work too."""

_ND_ARRAY_SUPPORT_TYPE = {np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.float32, np.float64}
_DTYPES = sorted(map(np.dtype, _ND_ARRAY_SUPPORT_TYPE), key=lambda dtype: (dtype.kind, dtype.itemsize))


class IDTypeFeature:
    """Ids of a slot, any number for each sample.

    With ``weights`` the vector of a sample is ``sum(weight * row)``, and the gradient of a row is multiplied by its
    weight, as with ``per_sample_weights`` of :class:`torch.nn.EmbeddingBag`. The pooling of the slot must be a sum. The
    weights get no gradient.

    Args:
        name: The name of the slot in ``embedding_config.yml``.
        data: The ids of each sample: a 1-d uint64 array, which may be empty.
        weights: The weights of each sample: a 1-d float32 array with one finite number for each id. None means 1 for
            all.

    Raises:
        FeatureTypeError: The data is not a list of 1-d uint64 arrays, or the weights are not float32; the message names
            the sample.
        DataError: The numbers of weights and ids differ.
    """

    def __init__(
        self,
        name: str,
        data: Sequence[npt.NDArray[np.uint64]],
        weights: Sequence[npt.NDArray[np.float32]] | None = None,
    ) -> None:
        self.name = _name(name)
        _check_arrays(name, "", data, np.uint64)
        lengths = np.fromiter((len(ids) for ids in data), np.int64, len(data))
        self.offsets: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)])
        self.values: npt.NDArray[np.uint64] = np.concatenate(data) if len(data) else np.empty(0, np.uint64)
        self.weights: npt.NDArray[np.float32] | None = None
        if weights is not None:
            _check_arrays(name, "weights of ", weights, np.float32)
            found = [len(each) for each in weights]
            if found != lengths.tolist():
                raise DataError(f"feature {name!r}: {_first_difference(found, lengths.tolist())}")
            self.weights = np.concatenate(weights) if len(weights) else np.empty(0, np.float32)

    @classmethod
    def from_offsets(
        cls,
        name: str,
        values: npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float32] | None = None,
    ) -> "IDTypeFeature":
        """Make the feature from all ids in one array, without a Python object for each sample.

        Args:
            name: The name of the slot.
            values: All ids, sample after sample: a 1-d uint64 array.
            offsets: A 1-d int64 array of length batch size + 1: sample ``i`` has ``values[offsets[i]:offsets[i + 1]]``.
            weights: A 1-d float32 array with one finite number for each id; None means 1 for all.

        Raises:
            FeatureTypeError: An array has another dtype or shape.
            DataError: The offsets do not ascend from 0 to ``len(values)``, or the numbers of weights and ids differ.
        """
        feature = cls.__new__(cls)
        feature.name = _name(name)
        arrays: list[tuple[str, object, type]] = [("values", values, np.uint64), ("offsets", offsets, np.int64)]
        if weights is not None:
            arrays.append(("weights", weights, np.float32))
        for what, array, dtype in arrays:
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise FeatureTypeError(
                    f"feature {name!r}, {what}: want a 1-d {np.dtype(dtype)} array, got {_kind(array)}"
                )
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
            raise DataError(f"feature {name!r}: offsets must ascend from 0 to the number of ids ({len(values)})")
        if weights is not None and len(weights) != len(values):
            raise DataError(f"feature {name!r}: {len(weights)} weights for {len(values)} ids; give one for each id")
        feature.values, feature.offsets = np.ascontiguousarray(values), np.ascontiguousarray(offsets)
        feature.weights = None if weights is None else np.ascontiguousarray(weights)
        return feature

    @property
    def data(self) -> list[npt.NDArray[np.uint64]]:
        """The ids of each sample."""
        return np.split(self.values, self.offsets[1:-1]) if self.batch_size else []

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return len(self.offsets) - 1


class IDTypeFeatureWithSingleID:
    """Ids of a slot, exactly one for each sample.

    Args:
        name: The name of the slot in ``embedding_config.yml``.
        data: A 1-d uint64 array with one id for each sample.

    Raises:
        FeatureTypeError: The data is not a 1-d uint64 array.
    """

    def __init__(self, name: str, data: npt.NDArray[np.uint64]) -> None:
        self.name = _name(name)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint64 or data.ndim != 1:
            raise FeatureTypeError(f"feature {name!r}: want a 1-d uint64 array, got {_kind(data)}")
        self.values = np.ascontiguousarray(data)

    @property
    def data(self) -> npt.NDArray[np.uint64]:
        """The id of each sample."""
        return self.values

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return len(self.values)


class NdarrayDataBase:
    """The base of dense inputs and labels: an array whose first dimension is the sample.

    Args:
        data: ``[batch, ...]`` of bool, int8, int16, int32, int64, uint8, float32 or float64.
        name: A name for messages.

    Raises:
        FeatureTypeError: The data has another dtype, or is not an array.
    """

    DEFAULT_NAME = "ndarray_base"
    kind = "dense input"

    def __init__(self, data: npt.NDArray[Any], name: str | None = None) -> None:
        self.given_name = None if name is None else _name(name)
        if not isinstance(data, np.ndarray) or data.dtype not in _DTYPES or data.ndim == 0:
            raise FeatureTypeError(
                f"{self.title}: want an array of at least one dimension and dtype {', '.join(d.name for d in _DTYPES)} "
                f"(this machine's byte order); got {_kind(data)}"
            )
        self.data = np.ascontiguousarray(data)

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.kind if self.given_name is None else f"{self.kind} {self.given_name!r}"

    @property
    def name(self) -> str:
        """The name, else the default one of the class."""
        return self.given_name or self.DEFAULT_NAME

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return len(self.data)

    def __len__(self) -> int:
        return len(self.data)


class NonIDTypeFeature(NdarrayDataBase):
    """A dense input: an array whose first dimension is the sample.

    Args:
        data: ``[batch, ...]`` of bool, int8, int16, int32, int64, uint8, float32 or float64.
        name: A name for messages. The model gets dense inputs by position.

    Raises:
        FeatureTypeError: The data has another dtype, or is not an array.
    """

    DEFAULT_NAME = "non_id_type_feature_anonymous"


class Label(NdarrayDataBase):
    """A label: an array whose first dimension is the sample.

    Args:
        data: ``[batch, ...]`` of the dtypes of :class:`NonIDTypeFeature`.
        name: A name for messages.
        binary: Refuse values other than 0 and 1.

    Raises:
        FeatureTypeError: The data has another dtype, or is not an array.
        DataError: ``binary`` is set, and a value is neither 0 nor 1; the message names the row.
    """

    DEFAULT_NAME = "label_anonymous"
    kind = "label"

    def __init__(self, data: npt.NDArray[Any], name: str | None = None, *, binary: bool = False) -> None:
        super().__init__(data, name)
        if binary:
            wrong = np.argwhere((self.data != 0) & (self.data != 1))
            if len(wrong):
                row = int(wrong[0][0])
                raise DataError(
                    f"{self.title}, row {row}: {self.data[tuple(wrong[0])]} is neither 0 nor 1 "
                    f"({len(wrong)} such values in the batch); check the column the label is read from"
                )


IDFeature = IDTypeFeature | IDTypeFeatureWithSingleID


class PersiaBatch:
    """One batch: ids, dense inputs and labels. Its ids are deduplicated when it is made.

    Args:
        id_type_features: The ids of at least one slot.
        non_id_type_features: The dense inputs.
        labels: The labels; required with ``requires_grad``.
        batch_size: The number of samples that every part must have; None means that of the first feature.
        requires_grad: Whether the batch is for training.
        meta: Bytes that are sent with the batch.

    Raises:
        MissingLabelError: ``requires_grad`` is set, and there is no label.
        FeatureTypeError: A feature has another class, or is not in a list.
        BatchSizeError: There is no sample, or parts differ in size; the message names all parts.
        DataError: Two features have one name, a weight or a dense input has NaN or infinity (of a dense input, the
            message names row and column), or there are more ids than a batch may hold.
    """

    def __init__(
        self,
        id_type_features: Sequence[IDFeature],
        non_id_type_features: Sequence[NonIDTypeFeature] | None = None,
        labels: Sequence[Label] | None = None,
        batch_size: int | None = None,
        requires_grad: bool = True,
        meta: bytes | None = None,
    ) -> None:
        dense = [] if non_id_type_features is None else non_id_type_features
        targets = [] if labels is None else labels
        _check_classes("id_type_features", id_type_features, (IDTypeFeature, IDTypeFeatureWithSingleID))
        _check_classes("non_id_type_features", dense, (NonIDTypeFeature,))
        _check_classes("labels", targets, (Label,))
        if not id_type_features:
            raise BatchSizeError("PersiaBatch: id_type_features is empty; a batch has at least one id feature")
        if requires_grad and not targets:
            raise MissingLabelError(
                "PersiaBatch(requires_grad=True) without labels; evaluation takes requires_grad=False"
            )
        sizes = [(feature.name, feature.batch_size) for feature in id_type_features]
        sizes += [(part.title, part.batch_size) for part in (*dense, *targets)]
        expected = sizes[0][1] if batch_size is None else batch_size
        if expected <= 0 or any(size != expected for _, size in sizes):
            listed = ", ".join(f"{name}: {size}" for name, size in sizes)
            raise BatchSizeError(
                f"PersiaBatch: want the same number of samples ({expected}) in all parts, got {listed}"
            )
        builder = _core.BatchBuilder(expected, requires_grad, meta)
        for feature in id_type_features:
            if isinstance(feature, IDTypeFeatureWithSingleID):
                builder.add_single(feature.name, feature.values)
            else:
                builder.add_list(feature.name, feature.values, feature.offsets, feature.weights)
        for item in dense:
            builder.add_dense(item.given_name, item.data)
        for target in targets:
            builder.add_label(target.given_name, target.data)
        self._batch = builder.build()

    @classmethod
    def wrap(cls, batch: _core.Batch) -> "PersiaBatch":
        """Return a batch around one that is built and checked already."""
        wrapped = cls.__new__(cls)
        wrapped._batch = batch
        return wrapped

    @property
    def data(self) -> _core.Batch:
        """The batch in the form of the engine."""
        return self._batch

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return self._batch.batch_size

    def to_bytes(self) -> bytes:
        """Return the encoded batch: versioned, with a checksum."""
        return self._batch.to_bytes()


def split_mask(raw: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Split the tensor that the model gets for a raw slot.

    Args:
        raw: ``[batch, sample_fixed_size, dim + 1]``.

    Returns:
        The rows, ``[batch, sample_fixed_size, dim]``, and a bool mask, ``[batch, sample_fixed_size]``, which is true
        where there is an id.
    """
    return raw[..., :-1], raw[..., -1] != 0


def _name(name: str) -> str:
    if not isinstance(name, str) or not name or not name.isascii() or len(name) > 128:
        raise DataError(f"feature name {name!r}: want 1 to 128 ASCII characters")
    return name


def _check_arrays(name: str, what: str, arrays: Sequence[object], dtype: type[np.generic]) -> None:
    for sample, array in enumerate(arrays):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            raise FeatureTypeError(
                f"feature {name!r}, {what}sample {sample}: want a 1-d {np.dtype(dtype)} array, got {_kind(array)}"
            )


def _first_difference(weights: list[int], ids: list[int]) -> str:
    if len(weights) != len(ids):
        return f"weights for {len(weights)} samples, ids for {len(ids)}"
    sample = next(index for index, (one, other) in enumerate(zip(weights, ids, strict=True)) if one != other)
    return f"sample {sample} has {weights[sample]} weights for {ids[sample]} ids; give one for each id"


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"a {value.ndim}-d {value.dtype} array"
    return f"{type(value).__name__}"


def _check_classes(argument: str, items: object, allowed: tuple[type, ...]) -> None:
    wanted = " or ".join(cls.__name__ for cls in allowed)
    if isinstance(items, allowed) or not isinstance(items, Sequence) or isinstance(items, str | os.PathLike):
        raise FeatureTypeError(f"PersiaBatch({argument}=...): want a list of {wanted}, got {type(items).__name__}")
    for index, item in enumerate(items):
        if not isinstance(item, allowed):
            raise FeatureTypeError(f"PersiaBatch({argument}[{index}]): want {wanted}, got {_kind(item)}")
