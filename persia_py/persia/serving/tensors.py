"""Tensors of the Open Inference Protocol: their bytes and values, and their conversion to a table of rows.

A column with one value in each row is the tensor ``<name>``, ``[rows]`` or ``[rows, 1]``. A column of lists, for a bag
or a sequence, is two tensors: ``<name>`` has the values of all rows, and ``<name>.offsets``, ``[rows + 1]``, the
positions at which rows begin and end, as in Arrow. Row i has the values from offset i to offset i + 1.

The optional tensor ``<name>.valid``, BOOL ``[rows]``, is false for each row whose value is missing, because bytes and
the values of gRPC cannot be null.
"""

import difflib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persia.embedding.listed import listed
from persia.serving.refusals import InvalidError

OFFSETS = ".offsets"
"""The suffix of the name of the tensor with the offsets of a column of lists."""
VALID = ".valid"
"""The suffix of the name of the tensor that marks missing values."""

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
"""The NumPy type of each datatype except BYTES."""

_NAMED = 10
"""The maximum number of unknown tensors in an error message."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a request.

    Attributes:
        name: The name of the tensor.
        datatype: The datatype, a key of :data:`DTYPES` or ``BYTES``.
        shape: The shape of the tensor.
        values: The elements, row-major: a NumPy array, or for BYTES an Arrow array of strings.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Any


def from_raw(name: str, datatype: str, shape: Iterable[int], raw: bytes | memoryview) -> Tensor:
    """Return the tensor with these bytes, in little-endian order.

    Raises:
        InvalidError: The number of bytes does not match the shape, or the datatype is unknown.
    """
    sizes, count = _count(name, shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, sizes, _strings(name, _split(name, raw, count)))
    dtype = _dtype(name, datatype)
    if len(raw) != count * dtype.itemsize:
        size = count * dtype.itemsize
        raise InvalidError(
            f"{name}: the number of bytes is {len(raw)}, expected {size} for {datatype} of shape {[*sizes]}"
        )
    if datatype == "BOOL":
        return Tensor(name, datatype, sizes, np.frombuffer(raw, np.uint8) != 0)
    return Tensor(name, datatype, sizes, np.frombuffer(raw, dtype))


def from_values(name: str, datatype: str, shape: Iterable[int], values: Any) -> Tensor:
    """Return the tensor with these elements: a list, nested like the shape or flat, or a repeated field.

    Raises:
        InvalidError: The number of elements does not match the shape, or an element is not of the datatype.
    """
    sizes, count = _count(name, shape)
    while isinstance(values, list) and values and isinstance(values[0], list):
        if not all(isinstance(part, list) for part in values):
            raise InvalidError(f"{name}: data mixes lists and values at one level")
        values = [each for part in values for each in part]
    if len(values) != count:
        raise InvalidError(f"{name}: the number of values is {len(values)}, expected {count} for shape {[*sizes]}")
    if datatype == "BYTES":
        return Tensor(name, datatype, sizes, _strings(name, values))
    dtype = _dtype(name, datatype)
    return Tensor(name, datatype, sizes, _numbers(name, datatype, dtype, values))


def to_table(tensors: Iterable[Tensor], columns: Mapping[str, str]) -> pa.RecordBatch:
    """Return the rows that tensors hold.

    Args:
        tensors: All columns, each once.
        columns: The names of the columns, and their kinds.

    Raises:
        InvalidError: A tensor is unknown, missing or repeated, or tensors have different numbers of rows.
    """
    given: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name in given:
            raise InvalidError(f"{tensor.name}: the input is given twice")
        given[tensor.name] = tensor
    endings = ("", OFFSETS, VALID)
    unknown = [name for name in given if not any(name.removesuffix(ending) in columns for ending in endings)]
    if unknown:
        more = [f"and {len(unknown) - _NAMED} more"] if len(unknown) > _NAMED else []
        raise InvalidError("; ".join([*(_unknown(name, columns) for name in unknown[:_NAMED]), *more]))
    if missing := [name for name in columns if name not in given]:
        raise InvalidError(f"inputs are missing: {listed(missing)}; the model takes {listed(columns)}")
    beside = {name: tensor for name, tensor in given.items() if name not in columns}
    arrays = {
        name: _with_missing(_column(given[name], beside.get(f"{name}{OFFSETS}")), beside.get(f"{name}{VALID}"))
        for name in columns
    }
    counts = {name: len(array) for name, array in arrays.items()}
    if len({*counts.values()}) > 1:
        found = listed([f"{name} {count}" for name, count in counts.items()])
        raise InvalidError(f"inputs have different numbers of rows: {found}")
    return pa.RecordBatch.from_arrays([*arrays.values()], names=[*arrays])


def check_outputs(names: Iterable[str]) -> None:
    """Check that a request names each output at most once, because the size of the response must be bounded.

    Raises:
        InvalidError: The request names an output twice.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidError(f"outputs: {name!r} is listed twice")
        seen.add(name)


def _column(tensor: Tensor, offsets: Tensor | None) -> pa.Array:
    values = tensor.values if isinstance(tensor.values, pa.Array) else pa.array(tensor.values)
    if offsets is None:
        if not (len(tensor.shape) == 1 or (len(tensor.shape) == 2 and tensor.shape[1] == 1)):
            raise InvalidError(
                f"{tensor.name}: shape {[*tensor.shape]}, expected [rows], or [values] with {tensor.name}{OFFSETS}"
            )
        return values
    if offsets.datatype not in ("INT64", "INT32", "UINT32", "UINT64") or len(offsets.shape) != 1:
        raise InvalidError(f"{offsets.name}: {offsets.datatype} {[*offsets.shape]}, expected INT64 [rows + 1]")
    if len(tensor.shape) != 1:
        raise InvalidError(f"{tensor.name}: shape {[*tensor.shape]}, expected [values]")
    numbers = offsets.values
    whole = len(numbers) > 0 and numbers[0] == 0 and int(numbers[-1]) == len(values)
    if not whole or bool(np.any(numbers[1:] < numbers[:-1])):
        raise InvalidError(
            f"{offsets.name}: expected offsets that start at 0, never decrease, and end at {len(values)}, the "
            f"number of values of {tensor.name}"
        )
    return pa.LargeListArray.from_arrays(pa.array(numbers.astype(np.int64)), values)


def _with_missing(column: pa.Array, valid: Tensor | None) -> pa.Array:
    """Return a column in which the values that are not valid are null."""
    if valid is None:
        return column
    marks = valid.values if isinstance(valid.values, pa.Array) else pa.array(valid.values)
    is_column = len(valid.shape) == 1 or valid.shape[1] == 1
    if valid.datatype != "BOOL" or marks.null_count or not is_column or len(marks) != len(column):
        nulls = " with nulls" if marks.null_count else ""
        raise InvalidError(
            f"{valid.name}: {valid.datatype} {[*valid.shape]}{nulls}, expected BOOL [{len(column)}]: false for each "
            "row whose value is missing"
        )
    return pc.if_else(marks, column, pa.scalar(None, column.type))


def _count(name: str, shape: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return a shape as a tuple, and the number of elements."""
    sizes = tuple(shape)
    count = 1
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 40:
            raise InvalidError(f"{name}: shape {[*sizes]}: expected integers from 0 to {(1 << 40) - 1}")
        count *= size
    if not sizes or len(sizes) > 2:
        raise InvalidError(f"{name}: shape {[*sizes]}: expected 1 or 2 dimensions")
    return sizes, count


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    found = DTYPES.get(datatype) if isinstance(datatype, str) else None
    if found is None:
        raise InvalidError(f"{name}: datatype {datatype!r}: expected one of {', '.join([*DTYPES, 'BYTES'])}")
    return found


def _numbers(name: str, datatype: str, dtype: np.dtype[Any], values: Any) -> Any:
    """Return numbers and nulls as an array. A number that the type cannot represent is refused, never changed."""
    try:
        found = np.asarray(values) if len(values) else np.empty(0, dtype)
        if found.dtype == np.object_ and None in values:
            return pa.array(values, pa.from_numpy_dtype(dtype))
        if dtype.kind != "b" and bool in {*map(type, values)}:
            raise ValueError("found bool")
        if dtype.kind in "iu" and found.dtype.kind in "fO" and all(type(each) is int for each in values):
            # numpy has rounded the integers to float64, because only some of them are 2**63 or more.
            return np.array(pa.array(values, pa.from_numpy_dtype(dtype)))
        if found.ndim != 1:
            raise ValueError("expected one number for each element")
        allowed = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.kind]
        if len(found) and found.dtype.kind not in allowed:
            raise ValueError("found strings" if found.dtype.kind in "SU" else f"found {found.dtype}")
        if dtype.kind in "iu" and len(found):
            limits = np.iinfo(dtype)
            if int(found.min()) < limits.min or int(found.max()) > limits.max:
                raise ValueError(f"a value is outside {limits.min} to {limits.max}")
        return found.astype(dtype)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        raise InvalidError(f"{name}: data is not {datatype}: {error}") from error


def _split(name: str, raw: bytes | memoryview, count: int) -> list[bytes]:
    """Return the strings of a BYTES tensor. Each string is preceded by four bytes with its length."""
    found: list[bytes] = []
    at, end = 0, len(raw)
    while at < end and len(found) <= count:
        if at + 4 > end:
            break
        (length,) = _LENGTH.unpack_from(raw, at)
        if at + 4 + length > end:
            break
        found.append(bytes(raw[at + 4 : at + 4 + length]))
        at += 4 + length
    if at != end or len(found) != count:
        raise InvalidError(
            f"{name}: expected strings, each preceded by its length in four bytes, little-endian; the number of "
            f"strings must be {count}"
        )
    return found


def _strings(name: str, values: Iterable[Any]) -> pa.Array:
    """Return texts, which may include nulls, as an Arrow array."""
    try:
        texts = [each.decode() if isinstance(each, bytes) else each for each in values]
        return pa.array(texts, pa.large_string())
    except (UnicodeDecodeError, pa.ArrowException, TypeError, AttributeError) as error:
        raise InvalidError(f"{name}: data is not BYTES in UTF-8: {error}") from error


def _unknown(name: str, columns: Mapping[str, str]) -> str:
    ending = next((each for each in (OFFSETS, VALID) if name.endswith(each)), "")
    near = difflib.get_close_matches(name.removesuffix(ending), [*columns], 1)
    hint = f"did you mean {near[0]}{ending}?" if near else f"the model takes {listed(columns)}"
    return f"{name}: no such input; {hint}"
