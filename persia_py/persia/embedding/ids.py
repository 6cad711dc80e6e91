"""Converts ids for the engine, in the same way for batches and for :class:`persia.nn.EmbeddingCollection`.

An id is an integer from 0 to 2^64 - 1. Arrays and tensors of any integer dtype and lists of ints are converted to
uint64; an empty array may have any dtype. Negative values are refused, because a placeholder, such as -1 for a missing
category, would get a row. Convert 64-bit hashes in an int64 array with ``.view(np.uint64)``.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from persia.runtime.errors import DataError, FeatureTypeError

Ids = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]

_FIRST_NEGATIVE = np.uint64(2**63)
"""The smallest value that a negative int64 becomes when it is read as unsigned."""
_SHOWN = 5
"""The maximum number of wrong ids that a message lists."""


def as_ids(feature: str, value: object, *, what: str = "ids") -> Ids:
    """Return the ids as a 1-d contiguous uint64 array.

    Args:
        feature: The name of the feature, for messages.
        value: A 1-d array, tensor or list of integers.
        what: The location in the feature, for messages.

    Raises:
        FeatureTypeError: The value has another type.
        DataError: An id is negative, or larger than 2^64 - 1.
    """
    values, signed = _unsigned(feature, value, what)
    if signed and len(values) and values.max() >= _FIRST_NEGATIVE:
        row = int(np.argmax(values >= _FIRST_NEGATIVE))
        raise _negative(feature, f"{what}, row {row}" if what == "ids" else what, values[row])
    return values


def as_bags(feature: str, samples: Sequence[object]) -> tuple[Ids, Offsets]:
    """Return the ids of all samples in one array, and offsets: sample ``i`` has ``ids[offsets[i]:offsets[i + 1]]``.

    Args:
        feature: The name of the feature, for messages.
        samples: The ids of each sample, in a form that :func:`as_ids` accepts.

    Raises:
        FeatureTypeError: The ids of a sample have another type.
        DataError: An id is negative, or larger than 2^64 - 1; the message names the sample.
    """
    if not hasattr(samples, "__len__") or isinstance(samples, str | bytes):
        raise FeatureTypeError(
            f"feature {feature!r}: expected a list with the ids of each sample, found {kind_of(samples)}"
        )
    parts = [_unsigned(feature, ids, f"sample {sample}") for sample, ids in enumerate(samples)]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(ids) for ids, _ in parts], out=offsets[1:])
    values = np.concatenate([ids for ids, _ in parts]) if parts else np.empty(0, np.uint64)
    if any(signed for _, signed in parts):
        for row in np.flatnonzero(values >= _FIRST_NEGATIVE):
            sample = int(np.searchsorted(offsets, row, side="right")) - 1
            if parts[sample][1]:
                raise _negative(feature, f"sample {sample}", values[row])
    return values, offsets


def as_offsets(feature: str, value: object, ids: int, hint: str = "") -> Offsets:
    """Return the offsets of samples as a 1-d contiguous int64 array.

    Args:
        feature: The name of the feature, for messages.
        value: A 1-d array, tensor or list of batch size + 1 integers.
        ids: The number of ids.
        hint: The end of the message about wrong offsets.

    Raises:
        FeatureTypeError: The value has another type.
        DataError: The offsets do not ascend from 0 to ``ids``.
    """
    offsets = _integers(feature, value, "offsets").astype(np.int64, copy=False)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != ids or (np.diff(offsets) < 0).any():
        found = f"{len(offsets)}, from {offsets[0]} to {offsets[-1]}" if len(offsets) else "none"
        falls = ", not ascending" if (np.diff(offsets) < 0).any() else ""
        raise DataError(
            f"feature {feature!r}: expected batch size + 1 offsets that ascend from 0 to the number of ids "
            f"({ids}){hint}; found {found}{falls}"
        )
    return np.ascontiguousarray(offsets)


def kind_of(value: object) -> str:
    """Return a description of the type of a value, for messages."""
    array = None if isinstance(value, np.generic) else _array(value)
    if array is None:
        return type(value).__name__
    return f"a {array.ndim}-d {array.dtype} {'array' if isinstance(value, np.ndarray) else type(value).__name__}"


def _unsigned(feature: str, value: object, what: str) -> tuple[Ids, bool]:
    """Return the ids, and whether they may contain negative values, which appear as large unsigned values."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint64 and value.ndim == 1:
        return np.ascontiguousarray(value), False
    integers = _integers(feature, value, what)
    return np.ascontiguousarray(integers.astype(np.uint64, copy=False)), integers.dtype.kind == "i"


def _integers(feature: str, value: object, what: str) -> npt.NDArray[np.integer]:
    try:
        array = _array(value)
    except OverflowError as error:
        wrong = [each for each in value if not 0 <= each < 2**64] if isinstance(value, list | tuple) else [value]
        found = ", ".join(map(str, wrong[:_SHOWN])) + (", …" if len(wrong) > _SHOWN else "")
        raise DataError(f"feature {feature!r}, {what}: expected integers from 0 to 2^64 - 1, found {found}") from error
    if array is None or array.ndim != 1 or not (array.dtype.kind in "iu" or array.size == 0):
        raise FeatureTypeError(
            f"feature {feature!r}, {what}: expected a 1-d array or list of integers, such as uint64 or int64; "
            f"found {kind_of(value)}{_TEXT if isinstance(value, str | bytes) or _is_text(array) else ''}"
        )
    integers: npt.NDArray[np.integer] = array if array.dtype.kind in "iu" else array.astype(np.uint64)  # type: ignore[assignment]
    return integers


_TEXT = (
    ". To make ids of strings, use persia.features: a feature of type id in persia.yml, whose transform takes the "
    "column, or np.array([hash_text(text) for text in column], np.uint64)"
)


def _is_text(array: npt.NDArray[np.generic] | None) -> bool:
    """Whether the values are strings."""
    if array is None or not array.size:
        return False
    return array.dtype.kind in "UST" or (array.dtype.kind == "O" and isinstance(array.flat[0], str | bytes))


def _array(value: object) -> npt.NDArray[np.generic] | None:
    """Return numpy arrays, torch tensors, pandas columns and lists as an array; None for anything else."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        return _of_list(value)
    if hasattr(value, "detach"):  # a torch tensor; this module does not import torch
        value = value.detach().cpu()
    return np.asarray(value) if hasattr(value, "__array__") else None


def _of_list(value: list[object] | tuple[object, ...]) -> npt.NDArray[np.generic] | None:
    if not value:
        return np.empty(0, np.uint64)
    if not all(isinstance(each, int | np.integer) and not isinstance(each, bool) for each in value):
        try:
            return np.asarray(value)
        except ValueError:  # the lists have different lengths
            return None
    try:  # for a mix of large and small integers numpy chooses float64, which rounds them
        return np.array(value, np.int64)
    except OverflowError:
        return np.array(value, np.uint64)


def _negative(feature: str, place: str, unsigned: np.uint64) -> DataError:
    return DataError(
        f"feature {feature!r}, {place}: {int(unsigned) - 2**64} is negative; an id is an integer from 0 to "
        "2^64 - 1. Leave out padding; use a separate id for missing values; pass hashes of 64 bits as "
        "array.view(np.uint64)"
    )
