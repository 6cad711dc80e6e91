"""Converts the forms of rows that a bundle accepts: tables, records, and columns."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from persia.embedding.listed import listed
from persia.runtime.errors import DataError
from persia.serving.manifest import Input


def as_rows(data: Any, inputs: Sequence[Input], *, strict: bool) -> Any:
    """Return rows in a form that a transform reads.

    Args:
        data: An Arrow table of any library, a list of records, JSON text of them, or a dictionary of columns.
        inputs: The columns of the model.
        strict: Whether to refuse records with unknown keys.

    Raises:
        DataError: A value of the dictionary is not a column, a key is unknown, or the columns have different
            lengths; the message names them.
    """
    names = [each.name for each in inputs]
    if not isinstance(data, Mapping):
        if strict:
            _check_keys(_keys(data), names)
        return data
    _check_keys(data, names)
    if values := [name for name, column in data.items() if not _is_column(column)]:
        types = dict.fromkeys(type(data[name]).__name__ for name in values)
        raise DataError(
            f"input {listed([*map(repr, values)])}: found {listed(types)}, expected a list or an array with a value "
            "for each row",
            hint="pass a list, a NumPy array or an Arrow array; to score one row, pass a list with one dictionary: "
            "score([{...}])",
        )
    columns = {name: _column(name, column) for name, column in data.items()}
    if len({len(column) for column in columns.values()}) > 1:
        rows = [f"{name!r} {len(column):,}" for name, column in columns.items()]
        raise DataError(f"the inputs have different numbers of rows: {listed(rows)}")
    return pa.RecordBatch.from_pydict(columns)


def _check_keys(keys: Iterable[Any], names: list[str]) -> None:
    if unknown := [key for key in keys if key not in names]:
        raise DataError(f"no input {listed([*map(repr, unknown)])}; the inputs are {listed(names)}")


def _keys(data: Any) -> Iterable[Any]:
    """Return the keys of records, each once; none if the values are not records, which the transform reports."""
    if isinstance(data, str | bytes):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError):
            return []
    if not isinstance(data, list | tuple):
        return []
    return dict.fromkeys(key for record in data if isinstance(record, Mapping) for key in record)


def _is_column(column: Any) -> bool:
    return isinstance(column, list | tuple | np.ndarray | pa.Array | pa.ChunkedArray)


def _column(name: str, column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    if isinstance(column, np.ndarray) and column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    try:
        array = column if isinstance(column, pa.Array) else pa.array(column)
        if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
            array = array.cast(pa.string())
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"input {name!r}: expected one value for each row, all of one type: {error}") from error
    return array
