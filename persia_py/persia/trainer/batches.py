"""Batches of a part: rows that are read and transformed, with weights and groups of rows."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from persia.config.blocks import Use
from persia.data import IterableDataset
from persia.data.records import RecordReader
from persia.data.records.split import hash_values, mix
from persia.embedding.data import PersiaBatch
from persia.features import Samples, Transform, to_batch
from persia.runtime.errors import DataError, FeatureTypeError
from persia.trainer.parts import Part

Counts = dict[str, dict[str, int]]
"""The number of unusual values of each feature, by kind."""


@dataclass
class Unusual:
    """Counts of unusual values in the rows so far: see the table of ``docs/transforms.md``.

    Attributes:
        rows: The rows.
        counts: The values of each feature, by kind.
    """

    rows: int = 0
    counts: Counts = field(default_factory=dict)

    def add(self, rows: int, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add the counts of more rows."""
        self.rows += rows
        for feature, kinds in counts.items():
            mine = Counter(self.counts.get(feature, {}))
            mine.update(kinds)
            self.counts[feature] = dict(mine)

    def add_unreadable(self, columns: Mapping[str, int], uses: Sequence[Use]) -> None:
        """Count values of text files that were not of their column's type. So far they are counted as null.

        Args:
            columns: The number of these values in each column.
            uses: What reads the columns.
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
    """The batches of a reader, for training. It resumes as the reader does.

    Args:
        part: The part that is read.
        reader: Reads it.
        transform: Makes ids, floats and labels of rows.
        weight: The column of a weight of each row, if any.
    """

    def __init__(self, part: Part, reader: RecordReader, transform: Transform, weight: str | None) -> None:
        super().__init__(buffer_size=4)
        self._part = part
        self._reader = reader
        self._transform = transform
        self._weight = weight
        self._unusual: deque[tuple[int, Counts]] = deque()  # of the batches that are read and not trained on

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches after the position of the reader.

        Raises:
            DataError: A row is invalid; the message names file and row.
        """
        self._unusual.clear()
        for rows in self._reader:
            try:
                samples, meta = self._make(rows)
            except DataError as error:
                raise self._part.with_place(error, self._make) from error
            self._unusual.append((len(samples), samples.report.counts))
            yield to_batch(samples, meta=meta)

    def _make(self, rows: pa.RecordBatch, first_row: int = 0) -> tuple[Samples, bytes | None]:
        samples = self._transform(rows, first_row=first_row)
        return samples, None if self._weight is None else weights_of(rows, self._weight, first_row).tobytes()

    def trained(self, unusual: Unusual) -> None:
        """Add the counts of the oldest batch that was not trained on."""
        if self._unusual:
            unusual.add(*self._unusual.popleft())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the reader."""
        return self._reader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at such a position."""
        self._reader.load_state_dict(state_dict)


@dataclass(frozen=True)
class Rows:
    """Rows that a model is applied to.

    Attributes:
        table: The rows as they were read.
        samples: The rows transformed.
        weights: The weight of each row; None where all are 1.
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
    """Yield the rows of a part in order, transformed.

    Args:
        part: The part that is read.
        transform: Makes ids, floats and labels of rows.
        batch_size: The number of rows of a batch.
        labels: Whether the rows have labels.
        strict: Refuse a value of a wrong type, rather than count it.
        weight: The column of a weight of each row.
        group: The column of the group of each row.

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
    """Return the weight of each row; ``first_row`` is the number of the first one in errors, from 0.

    Raises:
        FeatureTypeError: The column is not of numbers.
        DataError: A weight is null, negative or not finite.
    """
    values = table.column(column)
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise FeatureTypeError(f"train.weight: column {column!r} is {kind}, want numbers")
    weights: npt.NDArray[np.float32] = np.asarray(values.cast(pa.float64()).fill_null(-1)).astype(np.float32)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        found = values[int(wrong[0])].as_py()
        raise DataError(
            f"train.weight: column {column!r}, row {first_row + int(wrong[0])}: found {found}, allowed: finite numbers "
            "of at least 0"
        )
    return weights


def groups_of(table: pa.RecordBatch, column: str) -> npt.NDArray[np.uint64]:
    """Return a hash of the value of each row. Null is a separate group, with the hash 0, which no small number has."""
    values = table.column(column)
    groups = np.zeros(len(values), np.uint64)
    known = np.asarray(values.is_valid())
    groups[known] = mix(hash_values(values.drop_null()), 0)
    return groups


def weights_in(meta: bytes | None, rows: int) -> torch.Tensor:
    """Return the weights that :class:`TrainingBatches` has put into a batch, ``[rows, 1]``.

    Raises:
        DataError: The batch has none, or another number of them.
    """
    if meta is None or len(meta) != 4 * rows:
        raise DataError(f"train.weight is set, but a batch of {rows} rows does not have one weight per row")
    return torch.frombuffer(bytearray(meta), dtype=torch.float32).view(-1, 1)
