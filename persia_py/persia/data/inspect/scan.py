"""One pass over the files: statistics of each column, and a sample of the rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from persia.data.inspect.columns import Column, ColumnScan, RowPlace
from persia.data.inspect.sketches import Repeats, RowSample
from persia.data.records.files import Files, Unit
from persia.data.records.split import mix
from persia.embedding.listed import listed
from persia.runtime.errors import DataError

ROWS = 5_000_000
"""The default limit on the number of rows that are read."""
SAMPLE = 100_000
"""The number of rows in the sample. Tables with many columns use fewer."""
_SAMPLE_CELLS = 10_000_000
_UNITS = 64
"""The maximum number of positions at which files are read, if they are not read completely."""
_TEXT = ("csv", "tsv")


@dataclass
class Table:
    """The result of one pass.

    Attributes:
        files: The files.
        columns: The statistics of each column by name, in the order of the file.
        rows: The number of rows that were read.
        total: The number of rows of the files; None if it is unknown without reading all of them.
        whole: Whether all rows were read.
        sample: A uniform sample of the rows that were read.
        repeats: The estimate of repeated rows.
    """

    files: Files
    columns: dict[str, Column]
    rows: int
    total: int | None
    whole: bool
    sample: pa.Table
    repeats: Repeats

    @property
    def expected_rows(self) -> int:
        """The number of rows; if it is not known, the number of rows that were read."""
        return self.total if self.total is not None else self.rows


def scan(files: Files, limit: int = ROWS, *, typed: bool = False) -> Table:
    """Read files once, at most ``limit`` rows of them, in memory that does not depend on their size.

    If the files have more rows, up to 64 positions are read, spread evenly over the files: the first rows of Parquet
    row groups, and of files of other formats.

    Args:
        files: The files.
        limit: The maximum number of rows that are read.
        typed: Whether the columns of text files already have types; otherwise types are proposed.

    Raises:
        DataError: The files have no rows or no columns, or a file is damaged.
    """
    names = files.schema.names
    if not names:
        raise DataError(f"{files.paths[0]}: the file has no columns")
    text_file = files.format in _TEXT and not typed
    scans = [ColumnScan(field.name, _plain_type(field.type), text_file=text_file) for field in files.schema]
    sample = RowSample(max(1000, min(SAMPLE, _SAMPLE_CELLS // len(names))))
    repeats = Repeats()
    reading = _Reading(files, limit)
    rows = 0
    for batch, place in reading:
        hashes = np.zeros(batch.num_rows, np.uint64)
        for number, column in enumerate(scans):
            hashes = mix(hashes ^ column.add(batch.column(number), place), number)
        repeats.add(hashes)
        sample.add(batch, rows)
        rows += batch.num_rows
    if not rows:
        raise DataError(f"{listed(files.paths)}: found no rows")
    table = sample.table
    columns = {each.name: each.finish(table.column(each.name).combine_chunks()) for each in scans}
    table = pa.table({name: column.values for name, column in columns.items()})
    total = rows if reading.whole else files.rows
    return Table(files, columns, rows, total, reading.whole, table, repeats)


def count_repeats(table: Table, test: Files, limit: int = SAMPLE) -> int:
    """Read rows of the test files, record which of them also occur in training, and return the number of rows read.

    Raises:
        DataError: A file is damaged or lacks a column.
    """
    rows = 0
    for batch, place in _Reading(test, limit):
        scans = [ColumnScan(name, batch.schema.field(name).type, text_file=False) for name in table.files.schema.names]
        hashes = np.zeros(batch.num_rows, np.uint64)
        for number, column in enumerate(scans):
            hashes = mix(hashes ^ column.add(batch.column(column.name), place), number)
        table.repeats.add(hashes, test=True)
        rows += batch.num_rows
    return rows


class _Reading:
    """Iterates over the rows that are read, with a function that returns the location of a row.

    Attributes:
        whole: After the iteration, whether all rows were read.
    """

    def __init__(self, files: Files, limit: int) -> None:
        self._files, self._limit = files, limit
        self.whole = True

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, RowPlace]]:
        units: Sequence[Unit] = self._files.units
        total = self._files.rows
        if total is not None and total <= self._limit:
            quota = self._limit
        else:
            chosen = np.linspace(0, len(units) - 1, min(len(units), _UNITS)).astype(int)
            self.whole = len(chosen) == len(units)
            units = [units[index] for index in chosen]
            quota = -(-self._limit // len(units))
        for unit in units:
            left, first = quota, unit.first_row
            for batch in self._files.read(unit):
                if left <= 0:
                    self.whole = False
                    break
                yield _plain(batch.slice(0, left)), partial(self._place, unit, first)
                first += batch.num_rows
                if batch.num_rows > left:
                    self.whole = False
                left -= batch.num_rows

    def _place(self, unit: Unit, first: int, row: int) -> str:
        """Return the location of a row of a unit; name the file if there are several."""
        place = unit.place(first + row)
        return place if len(self._files.paths) == 1 else f"{unit.path}, {place}"


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with dictionary-encoded columns decoded."""
    if not any(pa.types.is_dictionary(field.type) for field in batch.schema):
        return batch
    columns = [
        column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.record_batch(columns, names=batch.schema.names)
