"""Rows with their scores, and what was unusual about them."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from typing_extensions import Self

from persia.trainer.batches import Unusual

Scored = tuple[pa.RecordBatch, dict[str, Any]]
"""Rows as they were read, and for each label the scores, ``[rows]``."""


class Predictions(Iterator[Scored]):
    """An iterator of rows with their scores, in the order of the rows.

    Attributes:
        unusual: The rows so far, and what was unusual about them.
        without_row: The share of the ids so far that have no row: training never had them. Their vectors are zeros.
    """

    def __init__(self) -> None:
        self.unusual = Unusual()
        self.without_row = 0.0
        self._batches: Iterator[Scored] = iter(())

    def of(self, batches: Iterator[Scored]) -> Self:
        """Iterate over these; they set the attributes."""
        self._batches = batches
        return self

    def __next__(self) -> Scored:
        return next(self._batches)
