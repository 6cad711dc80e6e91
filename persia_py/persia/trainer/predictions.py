"""Rows with their scores, and counts of unusual values."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from typing_extensions import Self

from persia.trainer.batches import Unusual

Scored = tuple[pa.RecordBatch, dict[str, Any]]
"""Rows as they were read, and the scores for each label, ``[rows]``."""


class Predictions(Iterator[Scored]):
    """An iterator of rows with their scores, in the order of the rows.

    Attributes:
        unusual: The number of rows scored so far, and counts of unusual values.
        without_row: The share of ids that did not occur in training. Such ids have no row, and their vectors are zeros.
    """

    def __init__(self) -> None:
        self.unusual = Unusual()
        self.without_row = 0.0
        self._batches: Iterator[Scored] = iter(())

    def of(self, batches: Iterator[Scored]) -> Self:
        """Iterate over ``batches``, whose iteration sets the attributes."""
        self._batches = batches
        return self

    def __next__(self) -> Scored:
        return next(self._batches)
