"""Statistics of columns that are updated row by row in bounded memory."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia.data.records.split import hash_values, mix

Hashes = npt.NDArray[np.uint64]

KEPT_HASHES = 1 << 16
"""The maximum number of distinct values that are counted exactly."""


class Distinct:
    """Estimates the number of distinct values in a column.

    The class keeps the ``k`` smallest hashes. With fewer distinct hashes, the count is exact. Otherwise it is the
    k-minimum-values estimate of Bar-Yossef et al. 2002: ``(k - 1) / u``, where ``u`` in (0, 1] is the k-th smallest
    hash divided by 2^64. Its standard error is about ``1 / sqrt(k)``, 0.4 % for :data:`KEPT_HASHES`.
    """

    def __init__(self, kept: int = KEPT_HASHES) -> None:
        self._kept = kept
        self._hashes: Hashes = np.empty(0, np.uint64)

    def add(self, hashes: Hashes) -> None:
        """Add the hashes of some rows."""
        if not self.exact:
            hashes = hashes[hashes < self._hashes[-1]]
        self._hashes = np.union1d(self._hashes, hashes)[: self._kept]

    @property
    def exact(self) -> bool:
        """Whether :attr:`count` is exact."""
        return len(self._hashes) < self._kept

    @property
    def count(self) -> int:
        """The number of distinct values, or an estimate of it."""
        if self.exact:
            return len(self._hashes)
        return round((self._kept - 1) / ((float(self._hashes[-1]) + 1) / 2.0**64))


class RowSample:
    """A uniform sample of rows: those whose row numbers have the smallest hashes. Equal tables give equal samples.

    Args:
        rows: The number of rows to keep.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._kept: list[pa.RecordBatch] = []
        self._keys: list[Hashes] = []
        self._bound = np.uint64(2**64 - 1)

    def add(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Add consecutive rows."""
        keys = mix(np.arange(first_row, first_row + batch.num_rows, dtype=np.uint64), 77)
        places = np.flatnonzero(keys <= self._bound)
        self._keys.append(keys[places])
        self._kept.append(batch.take(pa.array(places)))
        if sum(map(len, self._keys)) > 2 * self._rows:
            self._shrink()

    def _shrink(self) -> None:
        keys = np.concatenate(self._keys)
        if len(keys) > self._rows:
            self._bound = np.partition(keys, self._rows - 1)[self._rows - 1]
        places = np.flatnonzero(keys <= self._bound)
        table = pa.Table.from_batches(self._kept).take(pa.array(places)).combine_chunks()
        self._keys, self._kept = [keys[places]], table.to_batches()

    @property
    def table(self) -> pa.Table:
        """The rows, in the order of the data."""
        self._shrink()
        return pa.Table.from_batches(self._kept).combine_chunks()


@dataclass
class Repeats:
    """Estimates the share of rows that occur more than once, from a sample of their contents.

    For each distinct content, the sample has all of its rows or none: it keeps the contents with the smallest hashes.
    """

    kept: int = KEPT_HASHES
    _hashes: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    _counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))

    def add(self, hashes: Hashes, *, test: bool = False) -> None:
        """Add the hashes of rows of the training or the test files."""
        found, counts = np.unique(hashes, return_counts=True)
        both = np.zeros((len(found), 2), np.int64)
        both[:, int(test)] = counts
        hashes, places = np.unique(np.concatenate([self._hashes, found]), return_inverse=True)
        summed = np.zeros((len(hashes), 2), np.int64)
        np.add.at(summed, places, np.concatenate([self._counts, both]))
        self._hashes, self._counts = hashes[: self.kept], summed[: self.kept]

    @property
    def within(self) -> float:
        """The share of the training rows that occur at least twice in training."""
        train = self._counts[:, 0]
        return float(train[train > 1].sum() / max(train.sum(), 1))

    @property
    def across(self) -> float:
        """The share of the test rows that also occur in training."""
        train, test = self._counts.T
        return float(test[train > 0].sum() / max(test.sum(), 1))


@dataclass
class Numbers:
    """The count and the range of numbers, and the number of zeros; NaN and infinities are counted separately."""

    count: int = 0
    not_finite: int = 0
    zeros: int = 0
    fractions: bool = False
    low: float = np.inf
    high: float = -np.inf

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Add the numbers of some rows."""
        finite = values[np.isfinite(values)]
        self.count += len(finite)
        self.not_finite += len(values) - len(finite)
        if len(finite):
            self.zeros += int((finite == 0).sum())
            self.fractions |= bool((finite != np.floor(finite)).any())
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))


def hashes_of(values: pa.Array) -> Hashes:
    """Return a hash of each value that is not null. The hash of a list depends on its items and their order."""
    values = values.drop_null()
    kind = values.type
    if is_list(kind):
        lengths = np.asarray(pc.list_value_length(values), np.int64)
        items = pc.list_flatten(values)
        known = np.full(len(items), 1, np.uint64)
        known[np.asarray(items.is_valid())] = hashes_of(items)
        ends = lengths.cumsum()
        places = np.arange(len(items)) - np.repeat(ends - lengths, lengths)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mix(known + places.astype(np.uint64), 5))])
        return mix(sums[ends] - sums[ends - lengths] + lengths.astype(np.uint64), 6)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        bits = (np.asarray(values.cast(pa.float64())) + 0.0).view(np.uint64)
        return mix(bits, 0)
    if pa.types.is_temporal(kind):
        narrow = pa.types.is_date32(kind) or pa.types.is_time32(kind)
        return mix(np.asarray(values.cast(pa.int32() if narrow else pa.int64()), np.int64).view(np.uint64), 0)
    if pa.types.is_boolean(kind):
        return mix(np.asarray(values).astype(np.uint64), 0)
    if pa.types.is_integer(kind) or is_text(kind):
        return mix(hash_values(values), 0)
    return mix(hash_values(pa.array([str(value) for value in values.to_pylist()], pa.string())), 0)


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
