"""Text files: their header, their values, and the locations of their errors."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.fs

from persia.runtime.errors import DataError

FORMATS = ("csv", "tsv")
"""The formats whose values are stored as text."""
_CONVERSION = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (.+?): invalid value '(.*)'", re.S)
"""Arrow's message for a value; it counts columns from 0, and records, the header included, from 1."""
_LENGTH = re.compile(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", re.S)
"""Arrow's message for a record with the wrong number of columns; it counts in the same way."""
_GONE = re.compile(r"Column '(.*)' in include_columns does not exist in CSV file")
"""Arrow's message for a column that was removed from the first line after the columns were determined."""
_SHOWN = 60


@dataclass(frozen=True)
class TextFiles:
    """The text files of a data set.

    Attributes:
        filesystem: The file system of the files.
        file_format: One of :data:`FORMATS`.
        names: The names of the columns, if the first line of a file has none.
        used_by: The readers of each column, for messages.
    """

    filesystem: pa.fs.FileSystem
    file_format: str
    names: Sequence[str] | None
    used_by: Mapping[str, Sequence[str]]

    @property
    def _delimiter(self) -> str:
        return "\t" if self.file_format == "tsv" else ","

    def columns(self, path: str) -> list[str]:
        """Return the names of the columns of a file: those in its first line, unless they were given.

        Raises:
            DataError: The file has no line, or is not text.
        """
        if self.names is not None:
            return [*self.names]
        with self.filesystem.open_input_stream(path) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
            try:
                names = next((values for values in csv.reader(text, delimiter=self._delimiter) if values), None)
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: not a text file in UTF-8: {error}") from error
            except csv.Error as error:
                raise DataError(f"{path}: cannot read the names of the columns in the first line: {error}") from error
        if names is None:
            raise DataError(f"{path}: the file is empty; expected the names of the columns in its first line")
        return names

    def arrow_format(self, columns: Sequence[str]) -> pyarrow.dataset.CsvFileFormat:
        """Return Arrow's format for reading the files as a data set of strings."""
        return pyarrow.dataset.CsvFileFormat(
            parse_options=pyarrow.csv.ParseOptions(delimiter=self._delimiter),
            read_options=pyarrow.csv.ReadOptions(
                column_names=[*columns], skip_rows=int(self.names is None), use_threads=False
            ),
            convert_options=_conversion(dict.fromkeys(columns, pa.string())),
        )

    def read(self, path: str, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file in order, with these columns.

        A scan of the data set would read up to 1 GiB ahead of a slow consumer.
        """
        names = None if self.names is None else [*self.names]
        options = pyarrow.csv.ReadOptions(column_names=names, use_threads=False)
        parse = pyarrow.csv.ParseOptions(delimiter=self._delimiter)
        with self.filesystem.open_input_stream(path) as stream:
            yield from pyarrow.csv.open_csv(stream, options, parse, _conversion(types))

    def place(self, path: str, row: int) -> str:
        """Return the location of a row, such as ``row 8 (line 9)``; ``row`` is the row number in the file, from 0."""
        with self.filesystem.open_input_stream(path) as stream:
            line = line_of(stream, self._delimiter, row + int(self.names is None))
        return f"row {row + 1}" + ("" if line is None else f" (line {line})")

    def mistake(self, path: str, message: str) -> DataError | None:
        """Return the error for a value or a record of a file, with its location; None for other messages of Arrow."""
        if "Empty CSV file" in message:
            return DataError(f"{path}: the file has no rows{', only a header' if self.names is None else ''}")
        if (found := _GONE.search(message)) is not None:
            return DataError(f"{path}: the file was changed while it was read: now it has no column {found[1]!r}")
        header = int(self.names is None)
        if (found := _LENGTH.search(message)) is not None:
            record, wanted, got, text = found.groups()
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            place = self.place(path, int(record) - 1 - header)
            return DataError(
                f"{path}: {place}: expected {wanted} columns, found {got}: {shown}",
                hint="a value that contains a separator or a line break needs double quotes around it",
            )
        if (found := _CONVERSION.search(message)) is None:
            return None
        column, record, kind, value = found.groups()
        name = self.columns(path)[int(column)]
        place = self.place(path, int(record) - 1 - header)
        shown = f"column {name!r}{readers(name, self.used_by)}"
        return DataError(
            f"{path}: {place}, {shown}: found {value!r}, but the type of the column is {kind}",
            hint="correct the value; an empty field is a missing value, and a column of strings needs no type",
        )


def _conversion(types: Mapping[str, pa.DataType]) -> Any:
    return pyarrow.csv.ConvertOptions(
        column_types=dict(types), include_columns=[*types], null_values=[""], strings_can_be_null=True
    )


def readers(column: str, used_by: Mapping[str, Sequence[str]]) -> str:
    """Return the readers of a column, for a message; empty if they are unknown."""
    users = used_by.get(column)
    return f", read by {' and '.join(users)}" if users else ""


def line_of(stream: Any, delimiter: str, record: int) -> int | None:
    """Return the first line of a record of a text file, from 1; None if it cannot be found.

    Empty lines are ignored, and a quoted value may span several lines.

    Args:
        stream: The file, opened for reading bytes.
        delimiter: The separator of values.
        record: The index of the record, from 0; a header counts as a record.
    """
    reader = csv.reader(io.TextIOWrapper(stream, "utf-8", "replace", newline=""), delimiter=delimiter)
    before = 0
    try:
        for values in reader:
            if values:
                if record == 0:
                    return before + 1
                record -= 1
            before = reader.line_num
    except csv.Error:  # a field exceeds the size limit of the csv module
        pass
    return None
