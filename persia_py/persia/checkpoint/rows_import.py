"""Makes a checkpoint of rows from Parquet files with vectors that were trained elsewhere, for a warm start."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from persia.checkpoint.foreign import check_not_persiaml
from persia.embedding.listed import listed
from persia.features import Features, Transform
from persia.runtime.errors import DataError, StorageError, UsageError
from persia_core import checkpoint as _core

BATCH_BYTES = 16 << 20
"""The size of the vectors that are read at a time, in bytes."""
_SHOWN = 5
"""The maximum number of rows that a message lists for each kind of error."""
_COLUMNS = 50
"""The maximum number of columns that a message lists."""
_MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class Columns:
    """The columns of ids and vectors in a file, and how values become ids.

    Attributes:
        id: The column of ids, integers or strings.
        weights: The column of vectors, lists of floats.
        prefix: The ``prefix`` of the ``id`` feature in ``persia.yml``: strings and integers become the id of the
            prefixed string.
        lower: The ``lower`` of that feature: whether ASCII letters of strings are changed to lower case.
    """

    id: str = "id"
    weights: str = "weights"
    prefix: str = ""
    lower: bool = False


def import_rows(
    sources: Sequence[tuple[Path, str]],
    directory: str | os.PathLike[str],
    columns: Columns | None = None,
    *,
    force: bool = False,
) -> dict[str, int]:
    """Write a checkpoint of step 0 into ``directory``. The checkpoint appears when it is complete.

    Its rows have no optimizer state: a run that starts from it begins with the initial state of its optimizer.

    Args:
        sources: Parquet files, each with the name of its table.
        directory: The folder of the new checkpoint.
        columns: The columns of all files.
        force: Whether to replace a checkpoint in ``directory``.

    Returns:
        The number of rows of each table.

    Raises:
        DataError: A file has no rows, lacks a column, or has rows that are not valid (null, NaN, infinity, vectors of
            different lengths, a repeated id); the message names the rows, counted from 1.
        UsageError: Two files are for the same table, or ``directory`` already has a checkpoint.
        CheckpointError: A source is a PersiaML checkpoint.
        StorageError: A file cannot be read or written.
    """
    columns = columns or Columns()
    names = [table for _, table in sources]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"table {repeated[0]!r} is given for several files; specify a separate table for each file")
    _check_target(Path(directory), force=force)
    readers = [_Reader(path, table, columns) for path, table in sources]
    tables = [(reader.table, reader.dim) for reader in readers]
    importer = _core.Importer(os.fspath(directory), tables)
    try:
        for number, reader in enumerate(readers):
            for row, ids, weights in reader.rows():
                importer.add(number, row, ids, weights)
        rows = importer.commit(datetime.now(timezone.utc).isoformat(timespec="seconds"))
    finally:
        importer.abort()
        for reader in readers:
            reader.close()
    return dict(zip(names, rows, strict=True))


def _check_target(folder: Path, *, force: bool) -> None:
    if (folder / _MANIFEST).exists() and not force:
        raise UsageError(f"{folder} already contains a checkpoint; choose another folder, or replace it with --force")
    inside = next(folder.glob(f"*/{_MANIFEST}"), None)
    if inside is not None:
        raise UsageError(
            f"{folder} contains checkpoints, such as {inside.parent.name}; choose a folder without checkpoints, "
            f"such as {folder / 'imported'}"
        )


@dataclass
class _Mistakes:
    """The rows that have one kind of error.

    Attributes:
        what: The description of the error, for messages.
        count: The number of rows with this error.
        shown: The first such rows.
    """

    what: str
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, first: int, wrong: npt.NDArray[np.bool_], of: Callable[[int], str] = lambda _: "") -> None:
        """Add the rows of a batch that are marked in ``wrong``; ``first`` is the row number of its first row."""
        places = np.flatnonzero(wrong)
        self.count += len(places)
        room = max(0, _SHOWN - len(self.shown))
        self.shown += [f"{first + place:,}{of(int(place))}" for place in places[:room].tolist()]

    def __str__(self) -> str:
        rows = f"{self.count:,} rows" if self.count > 1 else "1 row"
        return f"{self.what} in {rows}: {', '.join(self.shown)}{', …' if self.count > len(self.shown) else ''}"


class _Reader:
    """Reads the rows of one file.

    Args:
        path: The Parquet file.
        table: The table that its rows are for.
        columns: The columns to read.
    """

    def __init__(self, path: Path, table: str, columns: Columns) -> None:
        self.path, self.table, self._columns = path, table, columns
        self._file = _open(path)
        schema = self._file.schema_arrow
        for name, option in ((columns.id, "--id-column"), (columns.weights, "--weights-column")):
            if name not in schema.names:
                raise DataError(
                    f"{path} has no column {name!r}; its columns are {listed(schema.names, _COLUMNS)}; "
                    f"choose one with {option}"
                )
        self._transform = _id_transform(path, schema.field(columns.id), columns)
        self._check_weights(schema.field(columns.weights).type)
        self.dim = self._dim()

    def _check_weights(self, kind: pa.DataType) -> None:
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not lists or not pa.types.is_floating(kind.value_type):
            raise DataError(
                f"{self.path}: column {self._columns.weights!r} is {kind}: expected a list of floats in each row, such "
                "as list<float>"
            )

    def _dim(self) -> int:
        """Return the length of the first vector. All vectors must have this length."""
        for row, batch in enumerate(self._batches(1), start=1):
            first = batch.column(1)[0]
            if first.is_valid and len(first) == 0:
                raise DataError(
                    f"{self.path}: column {self._columns.weights!r}: the vector of row {row:,} is empty; expected at "
                    "least one float"
                )
            if first.is_valid:
                return len(first)
        if self._file.metadata.num_rows == 0:
            raise DataError(f"{self.path} has no rows")
        raise DataError(
            f"{self.path}: column {self._columns.weights!r} is null in every row; specify the column of vectors: "
            "--weights-column"
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _batches(self, size: int) -> Iterator[pa.RecordBatch]:
        names = [self._columns.id, self._columns.weights]
        try:
            for batch in self._file.iter_batches(size, columns=names):
                yield batch.select(names)
        except OSError as error:
            raise _unread(self.path, error) from error
        except pa.ArrowException as error:
            raise DataError(f"cannot read {self.path}: {error}") from error

    def rows(self) -> Iterator[tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.float32]]]:
        """Yield the row number of the first row (counted from 1), ids, and vectors ``[rows, dim]``.

        After an error, the remaining rows are only checked.

        Raises:
            DataError: The file has errors; the message has the number and the first rows of each kind of error.
        """
        id_column, weights_column = self._columns.id, self._columns.weights
        no_id = _Mistakes(f"column {id_column!r} is null")
        no_vector = _Mistakes(f"column {weights_column!r} is null, or has a null,")
        other_dim = _Mistakes(f"column {weights_column!r} differs in length from the first vector ({self.dim})")
        not_finite = _Mistakes(f"column {weights_column!r} has NaN, infinity, or a number outside the range of float32")
        mistakes = [no_id, no_vector, other_dim, not_finite]
        first = 1
        for batch in self._batches(max(1, BATCH_BYTES // (4 * self.dim))):
            ids, lists = batch.column(0), batch.column(1)
            no_id.add(first, _true(ids.is_null()))
            lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
            values, null = lists.flatten(), _true(lists.is_null())
            wrong = (lengths != self.dim) & ~null
            other_dim.add(first, wrong, lambda place, of=lengths: f" (length {of[place]})")  # type: ignore[misc]
            # a float64 value beyond float32 becomes infinity; the next check finds it
            with np.errstate(over="ignore"):
                floats = pc.fill_null(values, 0).to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
            infinite = ~np.isfinite(floats)
            if values.null_count or infinite.any():
                parents = np.repeat(np.arange(len(batch)), lengths)
                null[parents[_true(values.is_null())]] = True
                not_finite.add(first, np.bincount(parents[infinite], minlength=len(batch)) > 0)
            no_vector.add(first, null)
            if not any(each.count for each in mistakes):
                yield first, self._ids(batch, first), np.ascontiguousarray(floats.reshape(-1, self.dim))
            first += len(batch)
        if any(each.count for each in mistakes):
            found = "; ".join(str(each) for each in mistakes if each.count)
            raise DataError(f"{self.path}: {found}. Correct or remove these rows; nothing is written")

    def _ids(self, batch: pa.RecordBatch, first: int) -> npt.NDArray[np.uint64]:
        table = pa.table({"id": batch.column(0)})
        return np.ascontiguousarray(self._transform(table, labels=False, first_row=first).ids("id")[0])


def _true(mask: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = mask.to_numpy(zero_copy_only=False).astype(np.bool_)
    return found


def _unread(path: Path, error: OSError) -> DataError | StorageError:
    """Return the error for a file that cannot be read. Arrow's errors for a damaged file have no number."""
    if error.errno is None:
        return DataError(f"{path} is damaged: {' '.join(str(error).split())}", hint="write or copy the file again")
    return StorageError(f"cannot read {path}: {error.strerror or error}", hint="check the path and its owner")


def _open(path: Path) -> pq.ParquetFile:
    if path.is_dir():
        check_not_persiaml(path)
        raise UsageError(f"{path}: expected a Parquet file, found a folder")
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file") from error
    except OSError as error:
        raise _unread(path, error) from error
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _id_transform(path: Path, column: "pa.Field[Any]", columns: Columns) -> Transform:
    """Return the transform that converts a column to ids, by the rules of an ``id`` feature."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_integer(kind):
        values = "integer"
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        values = "string"
    else:
        raise DataError(
            f"{path}: column {columns.id!r} has type {column.type}, expected an integer or string type; convert the "
            "column to the type that the feature has in the training data"
        )
    described = {"type": "id", "column": "id", "values": values, "dim": 1}
    described |= {"prefix": columns.prefix} if columns.prefix else {}
    described |= {"lower": True} if columns.lower else {}
    # A configuration requires a label, but this label is not read.
    text = json.dumps({"features": {"id": described}, "labels": {"none": {}}})
    return Features.parse(text, "persia ckpt import").transform()
