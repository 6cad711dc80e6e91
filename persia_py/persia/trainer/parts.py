"""The parts train, valid and test of a configuration's data, and other rows to which a model is applied."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from persia.config import Config
from persia.config.blocks import DataBlock, Origin, Paths
from persia.data.records import PARTS, Files, HashSplit, RecordReader, Split, TimeSplit, open_files, presets
from persia.data.records.files import FORMATS, Unit
from persia.data.records.places import with_places
from persia.data.records.split import parts_in
from persia.runtime.errors import DataError
from persia.runtime.files import is_url
from persia_core.features import Fitter

TYPES: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "int64": pa.int64(),
        "float64": pa.float64(),
        "string": pa.string(),
        "bool": pa.bool_(),
        "timestamp": pa.timestamp("us"),
        "date": pa.date32(),
    }
)
"""The Arrow types for the names in ``data.columns``."""


_DECLARED = re.compile(r"^  (.+?) \(line \d+\)", re.MULTILINE)
"""Matches a feature or label in a message of a transform, with its line."""


@dataclass(frozen=True)
class Part:
    """A part of the rows of some files.

    Attributes:
        files: The files.
        split: The rule that divides their rows; None means that all are in this part.
        name: ``train``, ``valid`` or ``test``.
        origin: The places of the features, for messages.
    """

    files: Files
    split: Split | None
    name: str
    origin: Origin

    def reader(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        epochs: int = 1,
        seed: int = 0,
        window_rows: int = 1 << 18,
        shard: tuple[int, int] = (0, 1),
    ) -> RecordReader:
        """Return a reader of the rows; see :class:`RecordReader` for the arguments."""
        return RecordReader(
            self.files,
            batch_size,
            split=self.split,
            part=self.name,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            window_rows=window_rows,
            shard=shard,
        )

    def count(self) -> int:
        """Return the number of rows. If possible, the number is read from the metadata of the files."""
        if self.split is None and self.files.rows is not None:
            return self.files.rows
        wanted = PARTS.index(self.name)
        rows = 0
        for unit in self.files.units:
            first = unit.first_row
            for batch in self.files.read(unit):
                if self.split is None:
                    rows += batch.num_rows
                else:
                    rows += int(np.count_nonzero(parts_in(self.split, unit, batch, first) == wanted))
                first += batch.num_rows
        return rows

    def check_not_empty(self) -> None:
        """Check that the part has a row.

        Raises:
            DataError: The part has no rows.
        """
        if next(iter(self.reader(1)), None) is None:
            shown = ", ".join(self.files.paths[:3]) + (" …" if len(self.files.paths) > 3 else "")
            raise DataError(
                f"the {self.name} set has no rows of {shown}",
                hint="specify other files" if self.split is None else "change data.split, or specify other files",
            )

    def with_place(self, error: DataError, check: Callable[[pa.RecordBatch, int], object]) -> DataError:
        """Return an error that names file and row, for an error in a batch of shuffled rows.

        The files are read again in order, up to the first row that is refused.

        Args:
            error: The error.
            check: Raises the error for some rows; the second argument is the row number of the first row in its file,
                from 0.
        """
        for unit in self.files.units:
            row = unit.first_row
            for batch in self.files.read(unit):
                try:
                    check(batch, row)
                except DataError as found:
                    return self.placed(found, unit)
                row += batch.num_rows
        return self.placed(error)

    def placed(self, error: DataError, unit: Unit | None = None) -> DataError:
        """Return an error of a transform, with the places of features in ``persia.yml``.

        Args:
            error: The error, which counts rows from 0.
            unit: The unit of the rows. If it is passed, the error also has the file and the locations of rows.
        """
        message = _DECLARED.sub(self._place_of, str(error))
        if unit is not None:
            message = f"{unit.path}: {with_places(message, unit.place)}"
        return DataError(message, hint=error.hint or None)

    def _place_of(self, found: re.Match[str]) -> str:
        """Return ``  NAME (FILE:LINE)`` for a feature or label."""
        places = self.origin.places
        place = places.get(f"features.{found[1]}") or places.get(f"labels.{found[1]}")
        return found[0] if place is None else f"  {found[1]} ({place})"


class Parts:
    """The rows of a configuration's ``data`` block.

    A part with separate files gets no rows of ``data.train``. The fraction of the split for this part is added to
    train.

    Args:
        config: The configuration.

    Raises:
        UsageError: A file does not exist.
        DataError: A file lacks a column, or is damaged.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        data, split = config.data, config.data.split
        self._split = _split_of(data)
        self._columns = labelled_columns(config)
        files = open_like(config, data.train, [*self._columns, *([] if self._split is None else self._split.columns)])
        self.train = Part(files, self._split, "train", config.origin)
        divided = split.by != "file"
        self.valid = self._part("valid", data.valid, divided and _takes_rows(self._split, "valid"))
        self.test = self._part("test", data.test, divided and _takes_rows(self._split, "test"))

    def _part(self, name: str, own: Paths | None, divided: bool) -> Part | None:
        if own is not None:
            return Part(open_like(self._config, own, self._columns), None, name, self._config.origin)
        return Part(self.train.files, self._split, name, self._config.origin) if divided else None

    def check_columns(self) -> list[str]:
        """Check that every file has all columns, in types that the features and labels can use. No row is read.

        Returns:
            The files.

        Raises:
            DataError: A file lacks a column, or columns have a wrong type; the message lists all such columns.
        """
        paths: dict[str, None] = {}
        for part in (self.train, self.valid, self.test):
            if part is None:
                continue
            paths.update(dict.fromkeys(unit.path for unit in part.files.units))
            try:
                Fitter(self._config.compiled).update(part.files.schema.empty_table())
            except DataError as error:
                message = f"{part.files.paths[0]}: {part.placed(error)}"
                raise DataError(message, hint=error.hint or None) from error
        return [*paths]

    def check_not_empty(self) -> None:
        """Check that each part has a row.

        Raises:
            DataError: A part has no rows.
        """
        for part in (self.train, self.valid, self.test):
            if part is not None:
                part.check_not_empty()

    def count_train(self) -> int:
        """Return the number of training rows, reading as few columns as possible."""
        needed = [] if self._split is None else self._split.columns
        columns = needed or self._columns[:1]
        files = open_like(self._config, self._config.data.train, columns)
        return Part(files, self._split, "train", self._config.origin).count()


def open_given(
    config: Config,
    paths: Paths,
    columns: Sequence[str] | None,
    types: Mapping[str, pa.DataType],
    *,
    used_by: Mapping[str, Sequence[str]] | None = None,
    lenient: bool = False,
) -> Files:
    """Open files that a user specifies in addition to those of the configuration. The files may have another format.

    Args:
        config: The configuration, with the types of columns of text files.
        paths: Files, folders, globs or ``s3://`` addresses; relative paths are relative to the working directory.
        columns: The columns that are read; None means all.
        types: The types of further columns of text files, which are the types in the training data.
        used_by: Additional readers of columns, for messages.
        lenient: Whether a value of a text file that is not of its column's type becomes null and is counted.
    """
    whole = from_working_directory(paths)
    is_known = any(path.endswith(ending) for path in whole for endings in FORMATS.values() for ending in endings)
    if is_known and config.data.format is not None:
        config = config.with_data(format=None)
    return open_like(config, whole, columns, types, used_by=used_by, lenient=lenient)


def open_like(
    config: Config,
    paths: Paths,
    columns: Sequence[str] | None,
    types: Mapping[str, pa.DataType] | None = None,
    *,
    used_by: Mapping[str, Sequence[str]] | None = None,
    lenient: bool = False,
) -> Files:
    """Open files as the ``data`` block of a configuration describes them.

    Args:
        config: The configuration; relative paths are relative to its folder.
        paths: Files, folders, globs or ``s3://`` addresses.
        columns: The columns that are read; None means all.
        types: The types of further columns of text files.
        used_by: Additional readers of columns, for messages.
        lenient: Whether a value of a text file that is not of its column's type becomes null and is counted.
    """
    data = config.data
    given = [paths] if isinstance(paths, str) else [*paths]
    whole = [path if is_url(path) else str(config.folder / Path(path).expanduser()) for path in given]
    declared = {**(types or {}), **{name: TYPES[kind] for name, kind in data.columns.items()}}
    given_format: dict[str, Any] = {"file_format": data.format, "types": declared, "header": data.header}
    if data.preset is not None:
        preset = presets.options(data.preset)
        given_format = {**preset, "types": {**preset["types"], **declared}}
    users = {**config.origin.used_by(), **(used_by or {})}
    return open_files(whole, columns=columns, used_by=users, lenient=lenient, **given_format)


def from_working_directory(paths: Paths) -> list[str]:
    """Return paths that a user specifies, which are relative to the working directory, as absolute paths."""
    given = [paths] if isinstance(paths, str) else paths
    return [path if is_url(path) else str(Path(path).expanduser().absolute()) for path in given]


def with_train(config: Config, paths: Paths | None) -> Config:
    """Return a configuration with these files, relative to the working directory, as ``data.train``; None keeps it."""
    return config if paths is None else config.with_data(train=from_working_directory(paths))


def labelled_columns(config: Config) -> list[str]:
    """Return the columns of labeled rows: those of features and labels, the weight and the group."""
    return [*config.compiled.columns(), *_more_columns(config)]


def _more_columns(config: Config) -> list[str]:
    train = config.train
    return [name for name in (train.weight, group_of(config)) if name is not None]


def metric_names(config: Config) -> list[str]:
    """Return the metrics of an evaluation, including that of early stopping."""
    names: list[str] = [*config.train.metrics]
    stop = config.train.early_stop
    if stop is not None and stop.metric != "loss" and stop.metric not in names:
        names.append(stop.metric)
    return names


def group_of(config: Config) -> str | None:
    """Return the column of the groups of rows, if an evaluation needs it."""
    return config.train.gauc_group if "gauc" in metric_names(config) else None


def to_have_valid(data: DataBlock) -> str:
    """Return the change of the configuration after which there is a validation set, for a message."""
    of_split = {"hash": ", or a share in data.split.fractions", "time": ", or data.split.valid", "file": ""}
    return f"set data.valid{of_split[data.split.by]}"


def _split_of(data: DataBlock) -> Split | None:
    split = data.split
    if split.by == "file" or (data.valid is not None and data.test is not None):
        return None
    if split.by == "hash":
        train, valid, test = split.fractions
        if data.valid is not None:
            train, valid = train + valid, 0.0
        if data.test is not None:
            train, test = train + test, 0.0
        return HashSplit((train, valid, test), split.group, split.seed)
    assert split.column is not None  # noqa: S101 - persia.config has checked it
    return TimeSplit(split.column, split.valid, split.test)


def _takes_rows(split: Split | None, part: str) -> bool:
    if isinstance(split, HashSplit):
        return split.fractions[PARTS.index(part)] > 0
    return isinstance(split, TimeSplit) and getattr(split, part) is not None
