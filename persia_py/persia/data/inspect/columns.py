"""Statistics of a column: its type, how often it is null, the number of its values, and the most frequent ones."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia.data.inspect.sketches import Distinct, Numbers, hashes_of, is_list, is_text
from persia.data.records.readable import is_readable

RowPlace = Callable[[int], str]
"""Returns the location of a row as messages show it; rows are counted from 0."""

Kind = Literal["text", "integer", "number", "boolean", "time", "list", "other"]

PATTERNS = {
    "int64": r"^[+-]?(0|[1-9][0-9]{0,17})$",
    "float64": r"^[+-]?(((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|inf|nan|NaN)$",
    "bool": r"^(true|false|True|False|TRUE|FALSE)$",
    "date": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
    "timestamp": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?$",
}
"""The pattern that all texts of a column must match before a type is declared. ``007`` is not a number."""
_TIMES = ("date", "timestamp")  # types whose pattern also matches invalid texts, such as 2024-02-31
DECLARED: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
}
SEPARATORS = "|;,/ "
"""The separators that are tried for values in a string, in order of preference."""
MOSTLY = 0.9
"""If at least this share of a column's texts are numbers, the first text that is not a number is reported."""
LISTED = 5
"""The maximum number of frequent values that are shown."""
EPOCHS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""The units of integer times, as the number of units per second."""
_FROM, _TO = 631_152_000, 2_208_988_800  # 1990-01-01 and 2040-01-01, in seconds


@dataclass
class Column:
    """A column of a table.

    Attributes:
        name: The name of the column.
        kind: The type of its values.
        stored: The Arrow type of the file, or for a text file the type that is declared; ``string`` if none is.
        declared: For a column of a text file, the type for ``data.columns``; None means that it stays a string.
        rows: The number of rows that were read.
        nulls: The number of rows that are null or empty fields.
        not_finite: The number of rows that are NaN or infinite.
        empty: The number of rows that are the empty string or the empty list.
        distinct: The number of distinct values; for lists, of distinct items.
        exact: Whether ``distinct`` is exact; otherwise it is an estimate.
        numbers: The range and the number of zeros, if the column has numbers.
        quantiles: The quantiles of the sample at 0, 1, 25, 50, 75, 99 and 100 %.
        skew: The third standardized moment of the sample.
        top: The most frequent values of the sample with their shares.
        span: The first and the last time, in seconds since 1970.
        unit: The unit of integer times.
        lengths: The mean and the largest number of items of a list.
        separator: The separator of the values in a string.
        numeric: The share of the texts that are numbers.
        stray: A text among numbers, and its location.
        no_time: A text that looks like a date or timestamp but is not valid, its location, and the type it resembles.
        step: The difference between consecutive rows, if it is always the same and not 0.
        values: The values of the sample.
    """

    name: str
    kind: Kind
    stored: str
    rows: int
    declared: str | None = None
    nulls: int = 0
    not_finite: int = 0
    empty: int = 0
    distinct: int = 0
    exact: bool = True
    numbers: Numbers | None = None
    quantiles: tuple[float, ...] = ()
    skew: float = 0.0
    top: list[tuple[str, float]] = field(default_factory=list)
    span: tuple[float, float] | None = None
    unit: str | None = None
    lengths: tuple[float, int] | None = None
    separator: str | None = None
    numeric: float = 0.0
    stray: tuple[str, str] | None = None
    no_time: tuple[str, str, str] | None = None
    step: int | None = None
    values: Any = None

    @property
    def missing(self) -> float:
        """The share of rows without a value."""
        return (self.nulls + self.not_finite) / max(self.rows, 1)

    @property
    def unique(self) -> float:
        """The number of distinct values divided by the number of values."""
        return self.distinct / max(self.rows - self.nulls - self.not_finite, 1)

    @property
    def is_float(self) -> bool:
        """Whether the values are stored as floats, which cannot be ids."""
        return self.kind == "number"

    @property
    def many(self) -> bool:
        """Whether a row may have any number of values."""
        return self.kind == "list" or self.separator is not None


class ColumnScan:
    """Builds a :class:`Column` from the batches of a table."""

    def __init__(self, name: str, kind: pa.DataType, *, text_file: bool) -> None:
        self.name, self._type, self._text_file = name, kind, text_file
        self._distinct = Distinct()
        self._numbers = Numbers()
        self._rows = self._nulls = self._empty = self._items = self._longest = 0
        self._matching = dict.fromkeys(PATTERNS, True)
        self._stray: tuple[str, int, RowPlace] | None = None
        self._undeclared: set[str] = set()
        self._no_times: dict[str, tuple[str, int, RowPlace]] = {}
        self._last: int | None = None
        self._step: int | None = None
        self._regular = pa.types.is_integer(kind) or text_file

    def add(self, values: pa.Array, place: RowPlace) -> npt.NDArray[np.uint64]:
        """Add consecutive rows, and return a hash for each row, including nulls.

        Args:
            values: The values of the column in these rows.
            place: Returns the location of one of these rows, counted from 0.
        """
        self._rows += len(values)
        self._nulls += values.null_count
        found = values.drop_null()
        hashes = hashes_of(values)
        if is_list(found.type):
            lengths = np.asarray(pc.list_value_length(found), np.int64)
            self._items += int(lengths.sum())
            self._longest = max(self._longest, int(lengths.max(initial=0)))
            self._empty += int((lengths == 0).sum())
            self._distinct.add(hashes_of(pc.list_flatten(found)))
        else:
            self._distinct.add(hashes)
        if is_text(found.type):
            self._add_texts(values, found, place)
        elif pa.types.is_floating(found.type) or pa.types.is_integer(found.type) or pa.types.is_decimal(found.type):
            self._numbers.add(np.asarray(found.cast(pa.float64(), safe=False)))
        self._follow(found)
        every = np.full(len(values), 0x6E756C6C, np.uint64)
        every[np.asarray(values.is_valid())] = hashes
        return every

    def _add_texts(self, values: pa.Array, found: pa.Array, place: RowPlace) -> None:
        self._empty += pc.sum(pc.equal(pc.binary_length(found), 0)).as_py() or 0
        for name, pattern in PATTERNS.items():
            if not self._matching[name]:
                continue
            matches = np.asarray(pc.match_substring_regex(found, pattern))
            self._matching[name] = bool(matches.all())
            if name == "float64" and not self._matching[name]:
                first = int(np.flatnonzero(~matches)[0])
                row = int(np.flatnonzero(np.asarray(values.is_valid()))[first])
                self._stray = (found[first].as_py(), row, place)
            if name in _TIMES and self._matching[name] and name not in self._no_times:
                self._check_times(name, values, found, place)
        if self._text_file and self._matching["float64"]:
            self._numbers.add(np.asarray(found.cast(pa.float64())))

    def _check_times(self, name: str, values: pa.Array, found: pa.Array, place: RowPlace) -> None:
        """Do not declare a type that cannot hold all texts; record the first text that is not a valid time."""
        if is_readable(found, DECLARED[name]):
            return
        self._undeclared.add(name)
        if not is_readable(found, pa.timestamp("ns")):
            text = next(text for text in found.unique() if not is_readable(pa.array([text]), pa.timestamp("ns")))
            self._no_times[name] = (text.as_py(), values.index(text).as_py(), place)

    def _follow(self, found: pa.Array) -> None:
        """Check whether each value is the previous one plus a constant."""
        if self._regular and self._text_file and is_text(found.type):
            self._regular = self._matching["int64"]
            found = found.cast(pa.int64()) if self._regular else found
        if not self._regular or not len(found):
            return
        whole = np.asarray(found.cast(pa.int64(), safe=False))
        if self._last is not None:
            whole = np.concatenate([[self._last], whole])
        steps = np.diff(whole)
        if len(steps):
            self._step = int(steps[0]) if self._step is None else self._step
            self._regular = self._step != 0 and bool((steps == self._step).all())
        self._last = int(whole[-1])

    def finish(self, sample: pa.Array) -> Column:
        """Return the column.

        Args:
            sample: The values of the column in the sampled rows.
        """
        declared = self._declared()
        if declared is not None:
            sample = sample.cast(DECLARED[declared])
        kind = _kind(sample.type)
        column = Column(
            self.name,
            kind,
            declared or str(self._type),
            self._rows,
            declared,
            self._nulls,
            self._numbers.not_finite if kind in ("number", "integer") else 0,
            self._empty,
            self._distinct.count,
            self._distinct.exact,
            values=sample,
            no_time=self._no_time(),
            step=self._step if self._regular else None,
        )
        if not self._distinct.exact:
            column.distinct = min(column.distinct, self._items if kind == "list" else self._rows - self._nulls)
        if kind == "list":
            column.lengths = (self._items / max(self._rows - self._nulls, 1), self._longest)
        if kind in ("integer", "number") and self._numbers.count:
            column.numbers = self._numbers
            column.quantiles, column.skew = _moments(sample)
        column.span, column.unit = _span(column)
        if kind == "text":
            if column.span is None and column.no_time is None:  # `2024-05-01 10:00` is not a list
                column.separator = _separator(sample)
            column.numeric = pc.mean(pc.match_substring_regex(sample, PATTERNS["float64"])).as_py() or 0.0
            if MOSTLY <= column.numeric < 1 and self._stray is not None:
                text, row, place = self._stray
                column.stray = (text, place(row))
        column.top = _top(sample)
        return column

    def _no_time(self) -> tuple[str, str, str] | None:
        for kind, (text, row, place) in self._no_times.items():
            if self._matching[kind]:
                return text, place(row), kind
        return None

    def _declared(self) -> str | None:
        """Return the type that can be declared for a column of a text file."""
        if not self._text_file or self._rows == self._nulls:
            return None
        return next(
            (name for name, matching in self._matching.items() if matching and name not in self._undeclared), None
        )


def _kind(kind: pa.DataType) -> Kind:
    types = pa.types
    if is_list(kind):
        return "list" if _kind(kind.value_type) in ("text", "integer", "boolean") else "other"
    if is_text(kind):
        return "text"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind):
        return "integer"
    if types.is_floating(kind) or types.is_decimal128(kind):
        return "number"
    return "time" if types.is_timestamp(kind) or types.is_date(kind) else "other"


def numbers_of(values: pa.Array) -> npt.NDArray[np.float64]:
    """Return the numbers of a column; NaN for rows without a number."""
    filled: npt.NDArray[np.float64] = np.asarray(values.cast(pa.float64(), safe=False).fill_null(np.nan))
    return np.where(np.isfinite(filled), filled, np.nan)


def _moments(sample: pa.Array) -> tuple[tuple[float, ...], float]:
    values = numbers_of(sample)
    values = values[~np.isnan(values)]
    if not len(values):
        return (), 0.0
    quantiles = np.quantile(values, (0, 0.01, 0.25, 0.5, 0.75, 0.99, 1), method="inverted_cdf")
    deviation = values.std()
    skew = float((((values - values.mean()) / deviation) ** 3).mean()) if deviation > 0 else 0.0
    return tuple(map(float, quantiles)), skew


_TIME_NAME = re.compile(r"(^|_)(time|timestamp|ts|date|datetime|day|created|clicked|event|at|unix)(_|$)", re.IGNORECASE)


def _span(column: Column) -> tuple[tuple[float, float] | None, str | None]:
    """Return the first and last time of a column of times, and the unit of integers."""
    if column.kind == "time":
        times = pc.min_max(column.values.cast(pa.timestamp("us"), safe=False))
        if not times["min"].is_valid:
            return None, None
        return (times["min"].value / 1e6, times["max"].value / 1e6), None
    whole = column.numbers is not None and not column.numbers.fractions and column.kind == "integer"
    if whole and column.numbers and _TIME_NAME.search(snake(column.name)):
        for unit, parts in EPOCHS.items():
            low, high = column.numbers.low / parts, column.numbers.high / parts
            if low >= _FROM and high <= _TO:
                return (low, high), unit
    if column.kind == "text" and column.no_time is None:
        texts = column.values.drop_null()
        for name in _TIMES:
            if len(texts) and pc.all(pc.match_substring_regex(texts, PATTERNS[name])).as_py():
                times = pc.min_max(times_in(texts))
                return (times["min"].value / 1e6, times["max"].value / 1e6), None
    return None, None


def times_in(texts: pa.Array) -> pa.Array:
    """Return texts as timestamps in microseconds; further digits are truncated."""
    kind = pa.timestamp("us")
    return texts.cast(kind) if is_readable(texts, kind) else texts.cast(pa.timestamp("ns")).cast(kind, safe=False)


def snake(name: str) -> str:
    """Return a name in lower case with underscores: ``eventTime`` and ``event time`` become ``event_time``."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_")


def _separator(sample: pa.Array) -> str | None:
    """Return the separator of values in strings, if there are fewer distinct values than distinct strings.

    At least one in ten strings has the separator. The parts have few words on average: at most 1.2, or 3 with a ``|``
    or ``;``. There are at most half as many distinct parts as distinct strings.
    """
    texts = sample.drop_null().unique()
    texts = texts.take(pa.array(np.arange(0, len(texts), max(len(texts) // 20_000, 1))))
    if len(texts) < 10:
        return None
    for separator in SEPARATORS:
        having = pc.sum(pc.match_substring(texts, separator)).as_py() or 0
        if having < 0.1 * len(texts):
            continue
        parts = pc.split_pattern(texts, separator)
        items = pc.list_flatten(parts)
        words = pc.mean(pc.add(pc.count_substring(pc.utf8_trim_whitespace(items), " "), 1)).as_py()
        different = len(items.unique())
        if different * 2 <= len(texts) and words <= (3 if separator in "|;" else 1.2):
            return separator
    return None


def _top(sample: pa.Array) -> list[tuple[str, float]]:
    found = pc.list_flatten(sample) if is_list(sample.type) else sample
    found = found.drop_null()
    if not len(found) or pa.types.is_nested(found.type):
        return []
    counted = found.value_counts()
    order = pc.sort_indices(counted.field("counts"), sort_keys=[("", "descending")])[:LISTED]
    top = counted.take(order)
    return [
        (shown(value.as_py()), count.as_py() / max(len(found), 1))
        for value, count in zip(top.field("values"), top.field("counts"), strict=True)
    ]


def shown(value: object) -> str:
    """Return a value as the table shows it."""
    return f"{value:g}" if isinstance(value, float) else str(value)
