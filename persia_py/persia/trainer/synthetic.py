"""Random batches that resemble those of the data, to find out whether reading and transforming data limits a run."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from persia.config import Config
from persia.data import IterableDataset
from persia.embedding.data import PersiaBatch
from persia.features import Samples, Transform, to_batch
from persia.runtime.errors import DataError
from persia.trainer.batches import PREFETCH, weights_of
from persia.trainer.parts import Part

POOL = 8
"""The number of batches that are read at the start."""


class SyntheticBatches(IterableDataset):
    """Batches of rows that are drawn at random from the first batches of the data.

    The batches have the ids, floats and labels of real rows, with their repetitions, so look-ups and the model do the
    same work as with the data. Nothing is read or transformed after the first batches.

    Args:
        part: The part of the data.
        transform: The transform, which converts rows to ids, floats and labels.
        config: The configuration, with batch size, seed and epochs.
        steps: The number of batches.
    """

    def __init__(self, part: Part, transform: Transform, config: Config, steps: int) -> None:
        super().__init__(buffer_size=config.data.prefetch or PREFETCH)
        data, self._weight = config.data, config.train.weight
        samples, weights = [], []

        def add(table: pa.RecordBatch, first_row: int = 0) -> None:
            samples.append(transform(table, first_row=first_row))
            if self._weight is not None:
                weights.append(weights_of(table, self._weight, first_row))

        for table, _ in zip(part.reader(data.batch_size), range(POOL), strict=False):
            try:
                add(table)
            except DataError as error:
                raise part.with_place(error, add) from error
        self._pool = Samples.concat(samples)
        self._weights = np.concatenate(weights) if weights else None
        self._batch_size, self._steps, self._seed = config.step_rows, steps, config.train.seed

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches."""
        draw = np.random.default_rng(self._seed)
        for _ in range(self._steps):
            places = draw.integers(0, len(self._pool), self._batch_size)
            meta = None if self._weights is None else self._weights[places].tobytes()
            yield to_batch(self._pool.take(places), meta=meta)
