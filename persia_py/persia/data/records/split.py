"""Divides rows into the parts train, valid and test."""

from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia.data.records.files import Unit
from persia.data.records.places import with_places
from persia.runtime.errors import DataError, UsageError
from persia_core.features import Features, Transform

PARTS = ("train", "valid", "test")

Numbers = npt.NDArray[np.int8]
"""The part of each row: 0, 1 or 2."""


class Split(Protocol):
    """A rule that assigns one part to every row.

    The part depends only on the row, its file and its row number, so parts never overlap.
    """

    @property
    def columns(self) -> list[str]:
        """The columns that the rule reads."""

    def parts(self, batch: pa.RecordBatch, file: str, first_row: int) -> Numbers:
        """Return the part of each row.

        Args:
            batch: Consecutive rows of a file.
            file: The name of the file, with the folders ``key=value`` above it.
            first_row: The row number of the batch's first row in the file.

        Raises:
            DataError: A value does not determine a part; the message has its row, from 0. In errors of :func:`parts_in`
                it has the location instead.
        """

    def identity(self) -> dict[str, Any]:
        """Return the values that a resumed run compares, JSON-serializable."""


@dataclass(frozen=True)
class HashSplit:
    """Divides rows by a hash: of the values of a column, or of the file name and the row number.

    The part of a row does not depend on other files, on the order of files, or on folders other than ``key=value``.

    Attributes:
        fractions: The shares of train, valid and test; their sum is 1.
        group: A column whose equal values stay in one part, such as the user; None hashes file name and row number, as
            for rows in which the column is null.
        seed: The seed of the hash; a different seed gives a different division.
    """

    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    group: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise a :class:`UsageError` for invalid fractions."""
        if len(self.fractions) != 3 or any(not 0 <= part <= 1 for part in self.fractions):
            raise UsageError(
                f"fractions {self.fractions}: expected three numbers from 0 to 1, for train, valid and test"
            )
        if abs(sum(self.fractions) - 1) > 1e-6:
            raise UsageError(f"fractions {self.fractions}: their sum is {sum(self.fractions):g}, expected 1")

    @property
    def columns(self) -> list[str]:
        """The group's column."""
        return [] if self.group is None else [self.group]

    def parts(self, batch: pa.RecordBatch, file: str, first_row: int) -> Numbers:
        """Return the part of each row. Rows without a group are divided by file name and row number."""
        rows = np.arange(first_row, first_row + batch.num_rows, dtype=np.uint64)
        hashes = mix(rows + hash_values(pa.array([file])), self.seed)
        if self.group is not None:
            values = batch.column(self.group)
            known = np.asarray(values.is_valid())
            hashes[known] = mix(hash_values(values.drop_null()), self.seed)
        shares = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53
        train, valid, _ = self.fractions
        found: Numbers = (shares >= train).astype(np.int8) + (shares >= train + valid).astype(np.int8)
        return found

    def identity(self) -> dict[str, Any]:
        """Return the values that a resumed run compares."""
        return {"by": "hash", "row": "file name and number", **asdict(self), "fractions": [*self.fractions]}


@dataclass(frozen=True)
class TimeSplit:
    """Divides rows by time, so that a model is evaluated on later rows than those it was trained on.

    Attributes:
        column: A column of timestamps, dates or numbers.
        valid: The start of the validation set; None means no such set. It is a datetime or an ISO 8601 text if the
            column has timestamps or dates, and a number if the column has numbers.
        test: The start of the test set, in the same form.
    """

    column: str
    valid: float | str | datetime | None
    test: float | str | datetime | None = None

    @property
    def columns(self) -> list[str]:
        """The column that holds the time."""
        return [self.column]

    def parts(self, batch: pa.RecordBatch, file: str, first_row: int) -> Numbers:
        """Return the part of each row."""
        del file
        times = batch.column(self.column)
        valid, test = (self._time(name, times.type) for name in ("valid", "test"))
        if valid is not None and test is not None and pc.less(test, valid).as_py():
            raise UsageError(f"split by {self.column!r}: test ({self.test}) begins before valid ({self.valid})")
        if times.null_count:
            row = first_row + int(np.flatnonzero(~np.asarray(times.is_valid()))[0])
            raise DataError(
                f"split by {self.column!r}, row {row}: found null, expected a time",
                hint="remove the rows without a time, or split by another column",
            )
        found: Numbers = np.zeros(batch.num_rows, np.int8)
        for part, bound in ((1, valid), (2, test)):
            if bound is not None:
                found[np.asarray(pc.greater_equal(times, bound))] = part
        return found

    def _time(self, name: str, type_: pa.DataType) -> pa.Scalar | None:
        given = getattr(self, name)
        if given is None:
            return None
        if isinstance(given, int | float) and pa.types.is_temporal(type_):
            raise UsageError(
                f"split by {self.column!r}: {name}={given} is a number, but the column is of type {type_}",
                hint=f"write a date or a time, such as `{name}: {_date_of(given)}`",
            )
        try:
            if isinstance(given, str) and pa.types.is_temporal(type_):
                given = datetime.fromisoformat(given)
            return pa.scalar(given, type_)
        except (ValueError, pa.ArrowException) as error:
            raise UsageError(f"split by {self.column!r}: {name}={given!r} is not of type {type_}: {error}") from error

    def identity(self) -> dict[str, Any]:
        """Return the values that a resumed run compares."""
        bounds = {name: getattr(self, name) for name in ("valid", "test")}
        texts = {name: None if bound is None else str(bound) for name, bound in bounds.items()}
        return {"by": "time", "column": self.column, **texts}


def parts_in(split: Split, unit: Unit, batch: pa.RecordBatch, first_row: int) -> Numbers:
    """Return the part of each row of a unit of files; ``first_row`` is the row number of the first row in its file.

    Raises:
        DataError: A value does not determine a part; the message has file and row.
    """
    try:
        return split.parts(batch, unit.file, first_row)
    except DataError as error:
        raise DataError(f"{unit.path}: {with_places(str(error), unit.place)}", hint=error.hint) from error


def mix(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Return a hash of each integer: the finalizer of SplitMix64, after adding ``seed + 1`` times its constant."""
    mixed: npt.NDArray[np.uint64] = values + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_values(values: pa.Array) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash for each value, as ``persia.features`` computes it without a prefix.

    Values must not be null.

    An integer is unchanged; a string becomes its xxh3-64, any other value the xxh3-64 of its text.
    """
    if pa.types.is_integer(values.type):
        numbers: npt.NDArray[np.uint64] = np.array(values, np.int64).view(np.uint64)
        return numbers
    encoded = values.dictionary_encode() if not pa.types.is_dictionary(values.type) else values
    texts = pa.record_batch({"value": encoded.dictionary.cast(pa.string())})
    unique: npt.NDArray[np.uint64] = _texts()(texts, labels=False).ids("value")[0]
    places: npt.NDArray[np.int64] = np.asarray(encoded.indices, np.int64)
    return unique[places]


@cache
def _texts() -> Transform:
    """Return the transform of strings to ids."""
    described = "features: {value: {type: id, values: string, dim: 1}}\nlabels: {value: {}}"
    return Features.parse(described, "split").transform()


def _date_of(number: float) -> str:
    """Return the date that a number such as 20240501 probably means, or else an example date."""
    try:
        return datetime.strptime(str(number), "%Y%m%d").date().isoformat()
    except ValueError:
        return "2024-05-01"
