"""Features, labels and batches that a script creates."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from persia.embedding.ids import as_bags, as_ids, as_offsets, kind_of
from persia.embedding.listed import listed_sizes
from persia.runtime.errors import BatchSizeError, DataError, FeatureTypeError, MissingLabelError
from persia.runtime.logging import get_logger
from persia_core import data as _core

if TYPE_CHECKING:
    import torch

IdArray: TypeAlias = "npt.NDArray[np.integer] | Sequence[int] | torch.Tensor"
"""Whole numbers from 0 to 2^64 - 1."""

_logger = get_logger("data")

MAX_BATCH_SIZE = 65535
"""PersiaML's limit on the batch size. The name is kept for PersiaML's scripts; larger batches work too."""

_EXACT = 2**24
_rounded: set[str] = set()  # dense inputs and labels whose rounding has been logged

_ND_ARRAY_SUPPORT_TYPE = {np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.float32, np.float64}
_DTYPES = sorted(map(np.dtype, _ND_ARRAY_SUPPORT_TYPE), key=lambda dtype: (dtype.kind, dtype.itemsize))


class IDTypeFeature:
    """Ids of a slot, with any number of ids for each sample.

    With ``weights`` the vector of a sample is ``sum(weight * row)``, and the gradient of a row is multiplied by its
    weight, as with ``per_sample_weights`` of :class:`torch.nn.EmbeddingBag`. The pooling of the slot must be a sum. The
    weights get no gradient.

    Args:
        name: The name of the slot in ``embedding_config.yml``.
        data: The ids of each sample: a 1-d array of any integer dtype or a list of ints, which may be empty. See
            :mod:`persia.embedding.ids`.
        weights: The weights of each sample: a 1-d float32 array with one finite number for each id. None means 1 for
            all.

    Raises:
        FeatureTypeError: The ids of a sample have another type, or the weights are not float32; the message names the
            sample.
        DataError: An id is negative or larger than 2^64 - 1, or a sample has different numbers of weights and ids; the
            message names the sample.
    """

    def __init__(
        self,
        name: str,
        data: Sequence[IdArray],
        weights: Sequence[npt.NDArray[np.float32]] | None = None,
    ) -> None:
        self.name = _name(name)
        self.values, self.offsets = as_bags(name, data)
        self.weights: npt.NDArray[np.float32] | None = None
        if weights is not None:
            _check_weights(name, weights)
            found, lengths = [len(each) for each in weights], np.diff(self.offsets).tolist()
            if found != lengths:
                raise DataError(f"feature {name!r}{_first_difference(found, lengths)}")
            self.weights = np.concatenate(weights) if len(weights) else np.empty(0, np.float32)

    @classmethod
    def from_offsets(
        cls,
        name: str,
        values: IdArray,
        offsets: IdArray,
        weights: npt.NDArray[np.float32] | None = None,
    ) -> "IDTypeFeature":
        """Make the feature from all ids in one array, without a Python object for each sample.

        Args:
            name: The name of the slot.
            values: All ids, sample after sample: a 1-d array of any integer dtype, or a list of ints.
            offsets: Batch size + 1 integers: sample ``i`` has ``values[offsets[i]:offsets[i + 1]]``.
            weights: A 1-d float32 array with one finite number for each id; None means 1 for all.

        Raises:
            FeatureTypeError: An array has another dtype or shape.
            DataError: An id is negative or larger than 2^64 - 1, the offsets do not ascend from 0 to ``len(values)``,
                or there are different numbers of weights and ids.
        """
        feature = cls.__new__(cls)
        feature.name = _name(name)
        feature.values = as_ids(name, values)
        feature.offsets = as_offsets(name, offsets, len(feature.values))
        feature.weights = None
        if weights is not None:
            if not isinstance(weights, np.ndarray) or weights.dtype != np.float32 or weights.ndim != 1:
                raise FeatureTypeError(
                    f"feature {name!r}, weights: expected a 1-d float32 array, found {kind_of(weights)}"
                )
            if len(weights) != len(feature.values):
                raise DataError(
                    f"feature {name!r}: expected one weight for each id, found weights: {len(weights)}, ids: "
                    f"{len(feature.values)}"
                )
            feature.weights = np.ascontiguousarray(weights)
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
        data: One id for each sample: a 1-d array of any integer dtype, or a list of ints. See
            :mod:`persia.embedding.ids`.

    Raises:
        FeatureTypeError: The data has another type.
        DataError: An id is negative or larger than 2^64 - 1.
    """

    def __init__(self, name: str, data: IdArray) -> None:
        self.name = _name(name)
        self.values = as_ids(name, data)

    @property
    def data(self) -> npt.NDArray[np.uint64]:
        """The id of each sample."""
        return self.values

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return len(self.values)


class NdarrayDataBase:
    """The base class of dense inputs and labels: an array whose first dimension is the sample.

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
                f"{self.title}: expected an array of at least one dimension and dtype "
                f"{', '.join(d.name for d in _DTYPES)} (this machine's byte order); found {kind_of(data)}"
            )
        self.data = np.ascontiguousarray(data)

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.kind if self.given_name is None else f"{self.kind} {self.given_name!r}"

    @property
    def name(self) -> str:
        """The name, or the default name of the class."""
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
        name: A name for messages. The name also identifies the input in batches with another order, because the model
            gets named inputs in the order of its first training batch.

    Raises:
        FeatureTypeError: The data has another dtype, or is not an array.
    """

    DEFAULT_NAME = "non_id_type_feature_anonymous"


class Label(NdarrayDataBase):
    """A label: an array whose first dimension is the sample.

    Args:
        data: ``[batch, ...]`` of the dtypes of :class:`NonIDTypeFeature`.
        name: A name for messages. The name also identifies the label in batches with another order of labels.
        binary: Whether to refuse values other than 0 and 1.

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
                    f"(wrong values in the batch: {len(wrong)}); check the column from which the label is read"
                )


IDFeature = IDTypeFeature | IDTypeFeatureWithSingleID


class PersiaBatch:
    """A batch of ids, dense inputs and labels. The ids are deduplicated on construction.

    Dense inputs and labels of float64 are rounded to the nearest float32. A value beyond the largest float32 is
    refused. If an integer beyond 2^24 changes, such as a time in seconds, a warning names it.

    Args:
        id_type_features: The ids of at least one slot.
        non_id_type_features: The dense inputs.
        labels: The labels; required with ``requires_grad``.
        batch_size: The number of samples that every part must have; None takes it from the first feature.
        requires_grad: Whether the batch is for training.
        meta: Bytes that are sent with the batch.

    Raises:
        MissingLabelError: ``requires_grad`` is set, and the batch has no label.
        FeatureTypeError: A feature has another class, or is not in a list.
        BatchSizeError: The batch has no sample, or parts differ in size; the message names the parts.
        DataError: Two features have the same name, the batch has too many ids, or a weight or a dense input has NaN,
            infinity or a value beyond float32. For a dense input, the message names row and column.
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
                "PersiaBatch(requires_grad=True): a batch for training needs labels; for evaluation, pass "
                "requires_grad=False"
            )
        sizes = [(feature.name, feature.batch_size) for feature in id_type_features]
        sizes += [(part.title, part.batch_size) for part in (*dense, *targets)]
        expected = sizes[0][1] if batch_size is None else batch_size
        if expected <= 0 or any(size != expected for _, size in sizes):
            given = [] if batch_size is None else [("batch_size", batch_size)]
            found = listed_sizes([*given, *sizes], expected)
            wanted = "at least one sample" if expected <= 0 else f"the same number of samples ({expected})"
            raise BatchSizeError(f"PersiaBatch: expected {wanted} in all parts, found {found}")
        builder = _core.BatchBuilder(expected, requires_grad, meta)
        for feature in id_type_features:
            if isinstance(feature, IDTypeFeatureWithSingleID):
                builder.add_single(feature.name, feature.values)
            else:
                builder.add_list(feature.name, feature.values, feature.offsets, feature.weights)
        for item in dense:
            builder.add_dense(item.given_name, _narrowed(item))
        for target in targets:
            builder.add_label(target.given_name, _narrowed(target))
        self._batch = builder.build()

    @classmethod
    def wrap(cls, batch: _core.Batch) -> "PersiaBatch":
        """Return a batch for an engine batch that is already built and checked."""
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
    """Split the tensor of a raw slot into rows and mask.

    Args:
        raw: ``[batch, sample_fixed_size, dim + 1]``.

    Returns:
        The rows, ``[batch, sample_fixed_size, dim]``, and a bool mask, ``[batch, sample_fixed_size]``, which is true
        where there is an id.
    """
    return raw[..., :-1], raw[..., -1] != 0


def with_mask(rows: "torch.Tensor", mask: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor of a raw slot: the rows, with their mask as the last column.

    Args:
        rows: ``[batch, sample_fixed_size, dim]``.
        mask: ``[batch, sample_fixed_size]``.
    """
    import torch

    return torch.cat([rows, mask.unsqueeze(2).to(rows.dtype)], 2)


def _name(name: str) -> str:
    if not isinstance(name, str) or not name or not name.isascii() or len(name) > 128:
        raise DataError(
            f"name {name!r} of a feature, dense input or label: expected a string of 1 to 128 ASCII characters"
        )
    return name


def _narrowed(item: NdarrayDataBase) -> npt.NDArray[Any]:
    """Return the data, converting float64 to float32."""
    if item.data.dtype != np.float64:
        return item.data
    with np.errstate(over="ignore"):
        narrow = item.data.astype(np.float32)
    large = np.argwhere(np.isinf(narrow) & np.isfinite(item.data))
    if len(large):
        raise DataError(
            f"{item.title}, {_place(large[0])}: {item.data[tuple(large[0])]} is beyond the largest float32 (3.4e38); "
            "scale the column"
        )
    if item.title not in _rounded and item.data.size and np.abs(item.data).max() > _EXACT:
        changed = np.argwhere((np.abs(item.data) > _EXACT) & (narrow != item.data) & (item.data == np.rint(item.data)))
        if len(changed):
            _rounded.add(item.title)
            place = tuple(changed[0])
            _logger.warning(
                "%s, %s: %.0f becomes %.0f as float32, which holds integers up to 2^24 exactly. Scale the column "
                "before a batch is made: (data - data.mean()) / data.std(), or hours instead of seconds",
                item.title,
                _place(changed[0]),
                item.data[place],
                narrow[place],
            )
    return narrow


def _place(index: npt.NDArray[np.int64]) -> str:
    return f"row {index[0]}" + (f", column {index[1]}" if len(index) > 1 else "")


def _check_weights(name: str, weights: Sequence[object]) -> None:
    for sample, array in enumerate(weights):
        if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != 1:
            raise FeatureTypeError(
                f"feature {name!r}, weights of sample {sample}: expected a 1-d float32 array, found {kind_of(array)}"
            )


def _first_difference(weights: list[int], ids: list[int]) -> str:
    if len(weights) != len(ids):
        return f": expected weights for each sample, found samples with weights: {len(weights)}, with ids: {len(ids)}"
    sample = next(index for index, (one, other) in enumerate(zip(weights, ids, strict=True)) if one != other)
    return f", sample {sample}: expected one weight for each id, found weights: {weights[sample]}, ids: {ids[sample]}"


def _check_classes(argument: str, items: object, allowed: tuple[type, ...]) -> None:
    wanted = " or ".join(cls.__name__ for cls in allowed)
    if isinstance(items, allowed) or not isinstance(items, Sequence) or isinstance(items, str | os.PathLike):
        raise FeatureTypeError(
            f"PersiaBatch({argument}=...): expected a list of {wanted}, found {type(items).__name__}"
        )
    for index, item in enumerate(items):
        if not isinstance(item, allowed):
            raise FeatureTypeError(f"PersiaBatch({argument}[{index}]): expected {wanted}, found {kind_of(item)}")
