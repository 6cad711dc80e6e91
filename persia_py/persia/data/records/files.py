"""The input files, and the units in which they are read."""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs

from persia.data.records import text as text_files
from persia.data.records.places import naming
from persia.data.records.readable import read_texts
from persia.data.records.text import TextFiles, readers
from persia.embedding.listed import listed
from persia.runtime.errors import DataError, UsageError

FORMATS = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".csv.gz", ".csv.zst", ".csv.bz2"),
    "tsv": (".tsv", ".tsv.gz", ".tsv.zst", ".tsv.bz2"),
    "ipc": (".arrow", ".feather", ".ipc"),
}
"""The file name extensions of each format."""

_SCAN_ROWS = 1 << 16
_COLUMNS = 50
"""The maximum number of columns that a message lists."""
_NEAR = 3
"""The maximum number of similar names that are suggested for a missing column."""


class NoFileError(UsageError):
    """A file does not exist."""


@dataclass(frozen=True)
class Unit:
    """The smallest unit of reading: a row group of a Parquet file, or a whole file of another format.

    Attributes:
        fragment: The part of the Arrow data set.
        path: The file.
        first_row: The row number of its first row in the file, from 0.
        rows: The number of rows; None if it is unknown before reading.
        place_of: Returns the location of a row as messages show it, like :meth:`Files.place`.
    """

    fragment: pyarrow.dataset.Fragment
    path: str
    first_row: int
    rows: int | None
    place_of: Callable[[str, int], str]

    def place(self, row: int) -> str:
        """Return the location of a row as messages show it; ``row`` is the row number in the file, from 0."""
        return self.place_of(self.path, row)

    @property
    def file(self) -> str:
        """The name of the file, with the ``key=value`` folders above it, by which a split identifies the file."""
        *folders, name = self.path.split("/")
        return "/".join([*(folder for folder in folders if "=" in folder), name])


class Files:
    """Files of one format with the same columns.

    Attributes:
        paths: The files, in the order of the arguments; those of one folder or glob are sorted by path.
        format: One of :data:`FORMATS`.
        schema: The columns that are read, in the order of the first file; hive partitions are columns too.
        unreadable: With ``lenient``: for each column, the number of values so far that were not of its type.
    """

    def __init__(
        self,
        dataset: pyarrow.dataset.FileSystemDataset,
        paths: Sequence[str],
        file_format: str,
        columns: Sequence[str] | None,
        *,
        text: TextFiles | None,
        types: Mapping[str, pa.DataType],
        used_by: Mapping[str, Sequence[str]],
        lenient: bool,
    ) -> None:
        self._dataset = dataset
        self._text = text
        self._used_by = used_by
        self._lenient = lenient
        self.unreadable: Counter[str] = Counter()
        self.paths = [*paths]
        self.format = file_format
        names = dataset.schema.names if columns is None else [*dict.fromkeys(columns)]
        fields = [dataset.schema.field(name) for name in names]
        self.schema = pa.schema([field.with_type(types.get(field.name, field.type)) for field in fields])

    @cached_property
    def units(self) -> list[Unit]:
        """The units of all files, in the order of files and rows.

        Raises:
            DataError: A file is damaged, or lacks a column.
        """
        fragments = {fragment.path: fragment for fragment in self._dataset.get_fragments()}
        return [unit for path in self.paths for unit in self._units(fragments[path], path)]

    def _units(self, fragment: Any, path: str) -> Iterator[Unit]:
        with naming(path):
            self._check_columns(fragment, path)
            if self.format != "parquet":
                rows = fragment.count_rows() if self.format == "ipc" else None
                yield Unit(fragment, path, 0, rows, self.place)
                return
            first = 0
            for group in fragment.split_by_row_group():
                rows = sum(each.num_rows for each in group.row_groups)
                yield Unit(group, path, first, rows, self.place)
                first += rows

    def _check_columns(self, fragment: Any, path: str) -> None:
        """Check that no file lacks a column of another file, for which Arrow would read null."""
        partitions = pyarrow.dataset.get_partition_keys(fragment.partition_expression)
        names = fragment.physical_schema.names if self._text is None else self._text.columns(path)
        have = {*names, *partitions}
        if lacking := [name for name in self.schema.names if name not in have]:
            raise _no_columns(path, lacking, sorted(have), self._used_by)

    def place(self, path: str, row: int) -> str:
        """Return the location of a row as messages show it: ``row 8``, for a text file ``row 8 (line 9)``.

        Args:
            path: The file.
            row: The row number in the file, from 0.
        """
        return f"row {row + 1}" if self._text is None else self._text.place(path, row)

    @property
    def rows(self) -> int | None:
        """The number of rows; None if it is unknown before reading."""
        counts = [unit.rows for unit in self.units]
        return None if None in counts else sum(count or 0 for count in counts)

    @cached_property
    def sizes(self) -> list[tuple[str, int]]:
        """The name and the size in bytes of each file, in the order of :attr:`paths`."""
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
            DataError: The file is damaged, a value is not of its column's type, or the only file is a text file
                without rows.
        """
        with naming(unit.path, None if self._text is None else self._text.mistake):
            is_empty = True
            for batch in self._scan(unit):
                if batch.num_rows:
                    is_empty = False
                    yield batch
        if is_empty and self._text is not None and len(self.paths) == 1:
            only = ", only a header" if self._text.names is None else ""
            raise DataError(f"{unit.path}: the file has no rows{only}")

    def _scan(self, unit: Unit) -> Iterator[pa.RecordBatch]:
        if self._text is not None:
            return self._read_texts(unit, self._text)
        scanned: Iterator[pa.RecordBatch] = unit.fragment.to_batches(
            self._dataset.schema,
            columns=self.schema.names,
            batch_size=_SCAN_ROWS,
            batch_readahead=2,
            fragment_readahead=1,
        )
        return scanned

    def _read_texts(self, unit: Unit, text: TextFiles) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a text file, with its partitions."""
        partitions = pyarrow.dataset.get_partition_keys(unit.fragment.partition_expression)
        fields = [field for field in self.schema if field.name not in partitions]
        types = {field.name: pa.string() if self._lenient else field.type for field in fields}
        for batch in text.read(unit.path, types):
            columns = [
                pa.repeat(pa.scalar(partitions[field.name], field.type), batch.num_rows)
                if field.name in partitions
                else self._read(batch.column(field.name), field)
                for field in self.schema
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _read(self, values: pa.Array, field: pa.Field) -> pa.Array:
        """Return the values of a column.

        With ``lenient`` the values are texts; those not of the column's type become null.
        """
        if not self._lenient:
            return values
        read, wrong = read_texts(values, field.type)
        self.unreadable[field.name] += wrong
        return read


def open_files(
    paths: str | Sequence[str],
    *,
    file_format: str | None = None,
    columns: Sequence[str] | None = None,
    types: Mapping[str, pa.DataType] | None = None,
    header: Sequence[str] | None = None,
    used_by: Mapping[str, Sequence[str]] | None = None,
    lenient: bool = False,
) -> Files:
    """Find files and check their columns.

    Args:
        paths: Files, folders, globs or ``s3://`` addresses, which are read in this order. A folder means its files
            of the format, including those in its sub-folders; ``key=value`` in the name of a folder is a column. The
            files of one folder or glob are sorted by their paths as text: ``day10`` comes before ``day2``.
        file_format: ``parquet``, ``csv``, ``tsv`` or ``ipc``; None determines it by the name of the first file. If a
            format is given, files may have any extension, such as ``.txt``.
        columns: The columns that are read; None means all.
        types: The types of columns of text files. Columns without one are strings: types are never guessed.
        header: The names of the columns of text files whose first line has none.
        used_by: The readers of each column, such as ``features.price (persia.yml:18)``, for error messages.
        lenient: Whether a value of a text file that is not of its column's type becomes null and is counted, instead of
            raising an error.

    Raises:
        UsageError: No file is found, one is given twice, or the format is unknown.
        DataError: A file is damaged, lacks a column, or has two columns of one name.
    """
    given = [paths] if isinstance(paths, str) else list(paths)
    filesystem, found = _find(given, file_format)
    if file_format is None and _format_of(found[0]) not in FORMATS:
        endings = ", ".join(ending for each in FORMATS.values() for ending in each)
        raise UsageError(
            f"{found[0]}: the file extension is unknown; expected one of {endings}",
            hint=f"rename the file; or, for the data of a persia.yml, set data.format to {' or '.join(FORMATS)}",
        )
    why = "" if file_format else f" (the format is that of the first file, {found[0]})"
    file_format = file_format or _format_of(found[0])
    if file_format not in FORMATS:
        raise UsageError(f"format {file_format!r} for {found[0]}: expected one of {', '.join(FORMATS)}")
    if wrong := [path for path in found if _format_of(path) not in (file_format, Path(path).suffix)]:
        ending = " or ".join(FORMATS[file_format])
        raise UsageError(f"format {file_format!r} for {wrong[0]}: expected a name that ends in {ending}{why}")
    users = used_by or {}
    text = TextFiles(filesystem, file_format, header, users) if file_format in text_files.FORMATS else None
    with naming(found[0], None if text is None else text.mistake):
        source: Any = file_format
        if text is not None:
            names = text.columns(found[0])
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(
                    f"{found[0]}: several columns have the name {', and several the name '.join(repeated)}",
                    hint="rename all but one of the columns of each name",
                )
            source = text.arrow_format(names)
        dataset = pyarrow.dataset.dataset(found, format=source, filesystem=filesystem, partitioning="hive")
    if columns is not None and (unknown := [name for name in columns if name not in dataset.schema.names]):
        raise _no_columns(found[0], unknown, dataset.schema.names, users)
    declared = {} if text is None else types or {}
    return Files(dataset, found, file_format, columns, text=text, types=declared, used_by=users, lenient=lenient)


def _no_columns(
    path: str, wanted: Sequence[str], names: Sequence[str], used_by: Mapping[str, Sequence[str]]
) -> DataError:
    """Return the error for a file that lacks columns: the readers of each, and the most similar column names."""
    said, is_listed = [], False
    for name in wanted:
        near = nearest(name, names)
        meant = f" (did you mean {near}?)" if near else ""
        said.append(f"no column {name!r}{meant}{readers(name, used_by)}")
        is_listed |= not near
    columns = f"; its columns are {listed(names, _COLUMNS)}" if is_listed else ""
    return DataError(f"{path}: {'; '.join(said)}{columns}")


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the most similar names, as ``'a' or 'b'``, ignoring case. Empty if none is similar."""
    lower: dict[str, str] = {}
    for each in names:
        lower.setdefault(each.lower(), each)
    return " or ".join(repr(lower[each]) for each in get_close_matches(name.lower(), lower, _NEAR))


def _find(given: Sequence[str], file_format: str | None) -> tuple[pa.fs.FileSystem, list[str]]:
    """Return the file system, and the files in it."""
    endings = tuple(ending for each, found in FORMATS.items() if file_format in (None, each) for ending in found)
    filesystem: pa.fs.FileSystem = pa.fs.LocalFileSystem()
    files: dict[str, str] = {}  # for each file, the argument that named it
    for path in given:
        if "://" in path:
            with naming(path):
                filesystem, start = pa.fs.FileSystem.from_uri(path)
            found = {*_below(filesystem, start, endings)}
        else:
            matches = glob.glob(str(Path(path).expanduser()), recursive=True)  # noqa: PTH207  # the pattern may be absolute
            if not matches:
                relative = "" if Path(path).expanduser().is_absolute() else f"; paths are relative to {Path.cwd()}"
                raise NoFileError(f"{path}: no such file{relative}")
            # abspath is needed because `a.csv` and `x/../a.csv` are the same file.
            below = (_below(filesystem, os.path.abspath(match), endings) for match in matches)  # noqa: PTH100
            found = {file for each in below for file in each}  # `**` matches both a folder and its content
        for file in sorted(found):
            if file in files:
                raise UsageError(
                    f"{file}: the file is given twice, by {files[file]} and by {path}", hint="list each file once"
                )
            files[file] = path
    if not files:
        raise UsageError(f"{listed(given)}: no file that ends in {', '.join(endings)}")
    return filesystem, [*files]


def _below(filesystem: pa.fs.FileSystem, path: str, endings: tuple[str, ...]) -> list[str]:
    """Return the file, or the files of a folder."""
    with naming(path):
        info = filesystem.get_file_info(path)
        if info.type == pa.fs.FileType.File:
            return [path]
        found = filesystem.get_file_info(pa.fs.FileSelector(path, recursive=True))
    return [each.path for each in found if each.is_file and each.path.endswith(endings)]


def _format_of(path: str) -> str:
    return next((name for name, endings in FORMATS.items() if path.endswith(endings)), Path(path).suffix)
