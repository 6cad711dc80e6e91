"""The files that are read, and their units."""

import glob
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.fs

from persia.runtime.errors import DataError, UsageError

FORMATS = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".csv.gz", ".csv.zst", ".csv.bz2"),
    "tsv": (".tsv", ".tsv.gz", ".tsv.zst", ".tsv.bz2"),
    "ipc": (".arrow", ".feather", ".ipc"),
}
"""The endings of file names, by format."""

_SCAN_ROWS = 1 << 16


@dataclass(frozen=True)
class Unit:
    """The smallest unit of reading: a row group of a Parquet file, or a whole file of another format.

    Attributes:
        fragment: The part of the data set.
        path: Its file.
        first_row: The number of its first row in the file.
        rows: The number of rows; None if it is not known before reading.
    """

    fragment: pyarrow.dataset.Fragment
    path: str
    first_row: int
    rows: int | None

    @property
    def file(self) -> str:
        """The name of the file, with the folders ``key=value`` above it, by which a split identifies it."""
        *folders, name = self.path.split("/")
        return "/".join([*(folder for folder in folders if "=" in folder), name])


class Files:
    """Files of one format with the same columns.

    Attributes:
        paths: The files, in the order given; those of one folder or glob are sorted by name.
        format: One of :data:`FORMATS`.
        schema: The columns that are read, in the order of the first file; hive partitions are columns too.
    """

    def __init__(
        self,
        dataset: pyarrow.dataset.FileSystemDataset,
        paths: Sequence[str],
        file_format: str,
        columns: Sequence[str] | None,
        *,
        has_header: bool,
    ) -> None:
        self._dataset = dataset
        self._has_header = has_header and file_format in ("csv", "tsv")
        self.paths = [*paths]
        self.format = file_format
        names = dataset.schema.names if columns is None else [*dict.fromkeys(columns)]
        self.schema = pa.schema([dataset.schema.field(name) for name in names])

    @cached_property
    def units(self) -> list[Unit]:
        """The units of all files, in the order of files and rows.

        Raises:
            DataError: A file is damaged, or lacks a column.
        """
        fragments = {fragment.path: fragment for fragment in self._dataset.get_fragments()}
        return [unit for path in self.paths for unit in self._units(fragments[path], path)]

    def _units(self, fragment: Any, path: str) -> Iterator[Unit]:
        with _named(path):
            self._check_columns(fragment, path)
            if self.format != "parquet":
                rows = fragment.count_rows() if self.format == "ipc" else None
                yield Unit(fragment, path, 0, rows)
                return
            first = 0
            for group in fragment.split_by_row_group():
                rows = sum(each.num_rows for each in group.row_groups)
                yield Unit(group, path, first, rows)
                first += rows

    def _check_columns(self, fragment: Any, path: str) -> None:
        """Refuse a file without a column that another one has: Arrow reads null in its place."""
        partitions = pyarrow.dataset.get_partition_keys(fragment.partition_expression)
        if self._has_header:
            names = _header(self._dataset.filesystem, path, self.format)
        else:
            names = fragment.physical_schema.names
        have = {*names, *partitions}
        if lacking := [name for name in self.schema.names if name not in have]:
            raise DataError(f"{path}: no column {', '.join(map(repr, lacking))}; it has {', '.join(sorted(have))}")

    @property
    def rows(self) -> int | None:
        """The number of rows; None if it is not known before reading."""
        counts = [unit.rows for unit in self.units]
        return None if None in counts else sum(count or 0 for count in counts)

    @cached_property
    def sizes(self) -> list[tuple[str, int]]:
        """The name and the bytes of each file, in the order of :attr:`paths`."""
        found = self._dataset.filesystem.get_file_info(self.paths)
        return [(Path(info.path).name, int(info.size)) for info in found]

    @cached_property
    def digest(self) -> str:
        """A digest of the names and sizes of the files, which a resumed run compares."""
        text = "\n".join(f"{name} {size}" for name, size in self.sizes)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self, unit: Unit) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a unit, in order.

        Raises:
            DataError: The file is damaged, or a value is not of its column's type.
        """
        with _named(unit.path):
            yield from (batch for batch in self._scan(unit) if batch.num_rows)

    def _scan(self, unit: Unit) -> Iterator[pa.RecordBatch]:
        if self.format in ("csv", "tsv"):
            return self._stream(unit)
        scanned: Iterator[pa.RecordBatch] = unit.fragment.to_batches(
            self._dataset.schema,
            columns=self.schema.names,
            batch_size=_SCAN_ROWS,
            batch_readahead=2,
            fragment_readahead=1,
        )
        return scanned

    def _stream(self, unit: Unit) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a text file. A scan of the data set would read up to 1 GiB ahead of a slow consumer."""
        text = self._dataset.format
        options = text.default_fragment_scan_options
        partitions = pyarrow.dataset.get_partition_keys(unit.fragment.partition_expression)
        read = pyarrow.csv.ReadOptions(use_threads=False) if self._has_header else options.read_options
        convert = options.convert_options
        convert.include_columns = [name for name in self.schema.names if name not in partitions]
        with self._dataset.filesystem.open_input_stream(unit.path) as stream:
            for batch in pyarrow.csv.open_csv(stream, read, text.parse_options, convert):
                columns = [
                    pa.repeat(pa.scalar(partitions[field.name], field.type), batch.num_rows)
                    if field.name in partitions
                    else batch.column(field.name)
                    for field in self.schema
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


def open_files(
    paths: str | Sequence[str],
    *,
    file_format: str | None = None,
    columns: Sequence[str] | None = None,
    types: Mapping[str, pa.DataType] | None = None,
    header: Sequence[str] | None = None,
) -> Files:
    """Find files and check their columns.

    Args:
        paths: Files, folders, globs or ``s3://`` addresses, which are read in this order. A folder stands for its files
            of the format, including those in its sub-folders; ``key=value`` in the name of a folder is a column. The
            files of one folder or glob are sorted by their paths as text: ``day10`` comes before ``day2``.
        file_format: ``parquet``, ``csv``, ``tsv`` or ``ipc``; None determines it by the name of the first file. If it
            is given, files may have any ending, such as ``.txt``.
        columns: What is read; None means all columns.
        types: The types of columns of text files. Columns without one are strings: types are never guessed.
        header: The names of the columns of text files whose first line has none.

    Raises:
        UsageError: No file is found, one is given twice, or the format is unknown.
        DataError: A file is damaged, lacks a column, or has two columns of one name.
    """
    given = [paths] if isinstance(paths, str) else list(paths)
    filesystem, found = _find(given, file_format)
    file_format = file_format or _format_of(found[0])
    if file_format not in FORMATS:
        raise UsageError(f"format {file_format!r} for {found[0]}: want one of {', '.join(FORMATS)}")
    if wrong := [path for path in found if _format_of(path) not in (file_format, Path(path).suffix)]:
        ending = " or ".join(FORMATS[file_format])
        raise UsageError(f"format {file_format!r} for {wrong[0]}: want the ending {ending}")
    with _named(found[0]):
        source: Any = file_format
        if file_format in ("csv", "tsv"):
            names = list(header) if header is not None else _header(filesystem, found[0], file_format)
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"{found[0]}: several columns have the name {', '.join(repeated)}: rename all but one")
            source = _text_format(file_format, names, types or {}, has_header=header is None)
        dataset = pyarrow.dataset.dataset(found, format=source, filesystem=filesystem, partitioning="hive")
    if columns is not None and (unknown := [name for name in columns if name not in dataset.schema.names]):
        raise DataError(f"{found[0]}: {'; '.join(_no_column(name, dataset.schema.names) for name in unknown)}")
    return Files(dataset, found, file_format, columns, has_header=header is None)


def _no_column(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, 1)
    return f"no column {name!r}" + (f" (did you mean {near[0]!r}?)" if near else f"; it has {', '.join(names)}")


def _find(given: Sequence[str], file_format: str | None) -> tuple[pa.fs.FileSystem, list[str]]:
    """Return the file system, and the files in it."""
    endings = tuple(ending for each, found in FORMATS.items() if file_format in (None, each) for ending in found)
    filesystem: pa.fs.FileSystem = pa.fs.LocalFileSystem()
    files: dict[str, str] = {}  # each with the path that gave it
    for path in given:
        if "://" in path:
            filesystem, start = pa.fs.FileSystem.from_uri(path)
            found = {*_below(filesystem, start, endings)}
        else:
            matches = glob.glob(str(Path(path).expanduser()), recursive=True)  # noqa: PTH207  # it may be absolute
            if not matches:
                relative = "" if Path(path).expanduser().is_absolute() else f"; paths are relative to {Path.cwd()}"
                raise UsageError(f"{path}: no such file{relative}")
            # abspath: `a.csv` and `x/../a.csv` are one file.
            below = (_below(filesystem, os.path.abspath(match), endings) for match in matches)  # noqa: PTH100
            found = {file for each in below for file in each}  # `**` matches a folder and its content
        for file in sorted(found):
            if file in files:
                error = UsageError(f"{file}: the file is given twice, by {files[file]} and by {path}")
                error.hint = "give each file once"
                raise error
            files[file] = path
    if not files:
        raise UsageError(f"{', '.join(given)}: no file that ends in {', '.join(endings)}")
    return filesystem, [*files]


def _below(filesystem: pa.fs.FileSystem, path: str, endings: tuple[str, ...]) -> list[str]:
    """Return the file, or the files of a folder."""
    with _named(path):
        info = filesystem.get_file_info(path)
        if info.type == pa.fs.FileType.File:
            return [path]
        found = filesystem.get_file_info(pa.fs.FileSelector(path, recursive=True))
    return [each.path for each in found if each.is_file and each.path.endswith(endings)]


def _format_of(path: str) -> str:
    return next((name for name, endings in FORMATS.items() if path.endswith(endings)), Path(path).suffix)


def _header(filesystem: pa.fs.FileSystem, path: str, file_format: str) -> list[str]:
    """Return the names in the first line of a text file."""
    with filesystem.open_input_stream(path) as stream:
        reader = pyarrow.csv.open_csv(stream, parse_options=_parse_options(file_format))
        names: list[str] = reader.schema.names
        reader.close()
    return names


def _parse_options(file_format: str) -> pyarrow.csv.ParseOptions:
    return pyarrow.csv.ParseOptions(delimiter="\t" if file_format == "tsv" else ",")


def _text_format(
    file_format: str, names: list[str], types: Mapping[str, pa.DataType], *, has_header: bool
) -> pyarrow.dataset.CsvFileFormat:
    return pyarrow.dataset.CsvFileFormat(
        parse_options=_parse_options(file_format),
        read_options=pyarrow.csv.ReadOptions(column_names=names, skip_rows=int(has_header), use_threads=False),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={name: types.get(name, pa.string()) for name in names},
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


_CONVERSION = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (.+?): invalid value '(.*)'")
"""Arrow's message for a value of a text file; it counts columns from 0, and lines from 1."""


class _named:  # noqa: N801  # a context manager
    """Convert Arrow's errors to a :class:`DataError` that names the file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing is returned."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise UsageError(f"{self._path}: {error.strerror or error}") from error
        if isinstance(error, pa.ArrowException | OSError):
            found = _CONVERSION.search(str(error))
            if found is None:
                raise DataError(f"{self._path}: {error}") from error
            column, line, wanted, value = found.groups()
            wrong = DataError(
                f"{self._path}: line {line}, column {int(column) + 1}: found '{value}', its type is {wanted}"
            )
            wrong.hint = "correct the value, or declare the column as string in data.columns of persia.yml"
            raise wrong from error
