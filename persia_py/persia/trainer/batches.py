"""Batches of a part of the data: rows that are read and transformed, with weights and groups."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from persia.config import Config
from persia.config.blocks import Use
from persia.data import IterableDataset
from persia.data.records import RecordReader
from persia.data.records.split import hash_values, mix
from persia.embedding.data import PersiaBatch
from persia.features import Samples, Transform, to_batch
from persia.runtime.errors import DataError, FeatureTypeError
from persia.trainer.in_order import in_order
from persia.trainer.parts import Part

PREFETCH = 4
"""The default of ``data.prefetch`` outside a job."""
PREFETCH_IN_JOB = 10
"""The default of ``data.prefetch`` in a job, for each data-compose."""

Counts = dict[str, dict[str, int]]
"""The number of unusual values of each feature, by kind."""


@dataclass
class Unusual:
    """Counts of unusual values in the rows so far. ``docs/transforms.md`` lists the kinds of unusual values.

    Attributes:
        rows: The number of rows.
        counts: The number of unusual values of each feature, by kind.
    """

    rows: int = 0
    counts: Counts = field(default_factory=dict)

    def add(self, rows: int, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add the counts of further rows."""
        self.rows += rows
        for feature, kinds in counts.items():
            mine = Counter(self.counts.get(feature, {}))
            mine.update(kinds)
            self.counts[feature] = dict(mine)

    def add_unreadable(self, columns: Mapping[str, int], uses: Sequence[Use]) -> None:
        """Count values of text files that were not of their column's type, which :meth:`add` has counted as null.

        Args:
            columns: The number of these values in each column.
            uses: The readers of the columns.
        """
        for use in uses:
            block, _, feature = use.by.partition(".")
            count = columns.get(use.column, 0)
            if block != "features" or not count:
                continue
            mine = {**self.counts.get(feature, {})}
            mine["null"] = mine.get("null", 0) - count
            mine["wrong_type"] = mine.get("wrong_type", 0) + count
            self.counts[feature] = {kind: number for kind, number in mine.items() if number > 0}


class TrainingBatches(IterableDataset):
    """The batches of a reader, for training. The position can be saved and restored, as that of the reader.

    Args:
        part: The part that is read.
        reader: The reader of the part.
        transform: Converts rows to ids, floats and labels.
        weight: The column that holds the weight of each row; None if there is none.
        workers: The number of threads that convert rows.
        prefetch: The number of batches that are prepared ahead.
        persistent: Whether the threads are kept from one epoch to the next.
    """

    def __init__(
        self,
        part: Part,
        reader: RecordReader,
        transform: Transform,
        weight: str | None,
        *,
        workers: int = 1,
        prefetch: int = PREFETCH,
        persistent: bool = True,
    ) -> None:
        super().__init__(buffer_size=prefetch)
        self._workers, self._persistent = workers, persistent
        self._state: dict[str, Any] | None = None  # the position after the last batch that was yielded
        self._part = part
        self._reader = reader
        self._transform = transform
        self._weight = weight
        self._unusual: deque[tuple[int, Counts]] = deque()  # counts of the batches that were read but not trained on

    @classmethod
    def of_config(cls, config: Config, part: Part, transform: Transform) -> "TrainingBatches":
        """Return the batches of all epochs of a configuration."""
        data, train = config.data, config.train
        reader = part.reader(
            config.step_rows,
            shuffle=data.shuffle,
            epochs=data.epochs,
            seed=train.seed,
            window_rows=data.window_rows,
        )
        return cls(
            part,
            reader,
            transform,
            train.weight,
            workers=data.workers,
            prefetch=data.prefetch or PREFETCH,
            persistent=data.persistent,
        )

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches after the position of the reader.

        Raises:
            DataError: A row is invalid; the message names file and row.
        """
        self._unusual.clear()
        section = None if self._persistent else _Read.of_epoch
        made = in_order(self._read(), self._made, self._workers, section=section)
        try:
            for batch, unusual, state in made:
                self._unusual.append(unusual)
                self._state = state
                yield batch
        finally:
            made.close()  # ends the threads of the iteration
        self._state = None

    def _read(self) -> Iterator["_Read"]:
        for rows in self._reader:
            yield _Read(rows, self._reader.epoch, self._reader.state_dict())

    def _made(self, read: "_Read") -> tuple[PersiaBatch, tuple[int, Counts], dict[str, Any]]:
        try:
            samples, meta = self._make(read.rows)
        except DataError as error:
            raise self._part.with_place(error, self._make) from error
        return to_batch(samples, meta=meta), (len(samples), samples.report.counts), read.state

    def _make(self, rows: pa.RecordBatch, first_row: int = 0) -> tuple[Samples, bytes | None]:
        samples = self._transform(rows, first_row=first_row)
        return samples, None if self._weight is None else weights_of(rows, self._weight, first_row).tobytes()

    def trained(self, unusual: Unusual) -> None:
        """Add the counts of the oldest batch that has not been added yet, because it was trained on."""
        if self._unusual:
            unusual.add(*self._unusual.popleft())

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch; the reader may be ahead of it."""
        return self._reader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position that :meth:`state_dict` returned."""
        self._reader.load_state_dict(state_dict)
        self._state = None


@dataclass(frozen=True)
class _Read:
    """Rows that were read.

    Attributes:
        rows: The rows.
        epoch: The epoch of the rows.
        state: The position after the rows.
    """

    rows: pa.RecordBatch
    epoch: int
    state: dict[str, Any]

    def of_epoch(self) -> int:
        """Return the epoch of the rows."""
        return self.epoch


@dataclass(frozen=True)
class Rows:
    """Rows to which a model is applied.

    Attributes:
        table: The rows as they were read.
        samples: The rows transformed.
        weights: The weight of each row; None if all weights are 1.
        groups: A hash of the group of each row, for GAUC; None without groups.
    """

    table: pa.RecordBatch
    samples: Samples
    weights: npt.NDArray[np.float32] | None = None
    groups: npt.NDArray[np.uint64] | None = None


def read_rows(
    part: Part,
    transform: Transform,
    batch_size: int,
    *,
    labels: bool = True,
    strict: bool = True,
    weight: str | None = None,
    group: str | None = None,
) -> Iterator[Rows]:
    """Yield the rows of a part in order, after transforming them.

    Args:
        part: The part that is read.
        transform: The transform, which converts rows to ids, floats and labels.
        batch_size: The number of rows in a batch.
        labels: Whether the rows have labels.
        strict: Whether to refuse values of a wrong type, instead of counting them.
        weight: The column that holds the weight of each row.
        group: The column that holds the group of each row.

    Raises:
        DataError: A row is invalid; the message names file and row.
    """

    def make(table: pa.RecordBatch, first_row: int = 0) -> Rows:
        return Rows(
            table,
            transform(table, strict=strict, labels=labels, first_row=first_row),
            None if weight is None else weights_of(table, weight, first_row),
            None if group is None else groups_of(table, group),
        )

    for table in part.reader(batch_size):
        try:
            rows = make(table)
        except DataError as error:
            raise part.with_place(error, make) from error
        yield rows


def weights_of(table: pa.RecordBatch, column: str, first_row: int = 0) -> npt.NDArray[np.float32]:
    """Return the weight of each row; ``first_row`` is the row number of the first row, from 0, for errors.

    Raises:
        FeatureTypeError: The column is not numeric.
        DataError: A weight is null, negative or not finite.
    """
    values = table.column(column)
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise FeatureTypeError(f"train.weight: column {column!r} is {kind}, expected numbers")
    weights: npt.NDArray[np.float32] = np.asarray(values.cast(pa.float64()).fill_null(-1)).astype(np.float32)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        value = values[int(wrong[0])].as_py()
        found = "null" if value is None else value
        raise DataError(
            f"train.weight: column {column!r}, row {first_row + int(wrong[0])}: found {found}, allowed: finite float32 "
            "numbers of at least 0"
        )
    return weights


def groups_of(table: pa.RecordBatch, column: str) -> npt.NDArray[np.uint64]:
    """Return a hash of the value of each row. Null is a separate group with hash 0, which no small integer has."""
    values = table.column(column)
    groups = np.zeros(len(values), np.uint64)
    known = np.asarray(values.is_valid())
    groups[known] = mix(hash_values(values.drop_null()), 0)
    return groups


def weights_in(meta: bytes | None, rows: int) -> torch.Tensor:
    """Return the weights that :class:`TrainingBatches` has put into a batch, ``[rows, 1]``.

    Raises:
        DataError: The batch has no weights, or another number of weights.
    """
    if meta is None or len(meta) != 4 * rows:
        raise DataError(
            f"train.weight is set, but the meta of a batch of {rows} rows has {len(meta or b'')} bytes, expected "
            f"{4 * rows}: one float32 for each row",
            hint="pass the weights with each batch: PersiaBatch(..., meta=weights.astype(np.float32).tobytes())",
        )
    return torch.frombuffer(bytearray(meta), dtype=torch.float32).view(-1, 1)
