"""Measures how fast the rows of a configuration are read and transformed, by batch size."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from persia.config import Config
from persia.features import to_batch
from persia.runtime.errors import DataError
from persia.trainer.fitting import fit_first
from persia.trainer.in_order import in_order
from persia.trainer.parts import Parts

SIZES = (256, 1024, 4096, 16_384, 65_536)
"""The batch sizes of a sweep, in addition to that of the configuration."""
NEAR = 0.9
"""The share of the highest speed from which a batch size counts as equally good."""


@dataclass(frozen=True)
class Speed:
    """The measured speed of a batch size.

    Attributes:
        batch_size: The batch size.
        rows: The number of rows that were read and transformed.
        seconds: The duration, in seconds.
        batches: The number of batches.
    """

    batch_size: int
    rows: int
    seconds: float
    batches: int

    @property
    def rows_per_s(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds

    @property
    def ms_a_batch(self) -> float:
        """Milliseconds per batch."""
        return 1e3 * self.seconds / self.batches


def sweep(config: Config, sizes: Sequence[int], seconds: float) -> Iterator[Speed]:
    """Yield the speed of each size, with the shuffling and the workers of the configuration.

    Args:
        config: The configuration.
        sizes: The batch sizes.
        seconds: The duration of each measurement, which has at least one batch. It is shorter if the training rows end
            earlier.

    Raises:
        DataError: A value of the data cannot be used.
    """
    part = Parts(config).train
    part.check_not_empty()
    transform = fit_first(config, part, max(sizes))
    for size in sizes:
        reader = part.reader(size, shuffle=config.data.shuffle, seed=config.train.seed)
        batches = in_order(reader, lambda table: to_batch(transform(table)), config.data.workers)
        rows = count = 0
        started = time.perf_counter()
        while (spent := time.perf_counter() - started) < seconds or not count:
            try:
                batch = next(batches, None)
            except DataError as error:
                raise part.with_place(error, lambda table, row: transform(table, first_row=row)) from error
            if batch is None:
                spent = time.perf_counter() - started
                break
            rows, count = rows + batch.batch_size, count + 1
        batches.close()  # ends the threads of the iteration
        yield Speed(size, rows, max(spent, 1e-9), count)


def advice(found: Sequence[Speed], size: int) -> str:
    """Return one line that tells whether a batch size other than the configuration's is faster."""
    mine = next(each for each in found if each.batch_size == size)
    fastest = max(found, key=lambda each: each.rows_per_s)
    share = mine.rows_per_s / fastest.rows_per_s
    if share >= NEAR:
        if mine is fastest:
            return f"data.batch_size {size} is the fastest: keep it"
        return f"data.batch_size {size} reads {share:.0%} as fast as {fastest.batch_size}, the fastest: keep it"
    least = min(each.batch_size for each in found if each.rows_per_s >= NEAR * fastest.rows_per_s)
    return f"data.batch_size {size} reads {share:.0%} as fast as {fastest.batch_size}: set {least}, and tune lr again"
