"""How fast rows of a configuration are read and transformed, by the size of a batch."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from persia.config import Config
from persia.features import to_batch
from persia.trainer.parts import Parts

SIZES = (256, 1024, 4096, 16_384, 65_536)
"""The sizes of a sweep, beside that of the configuration."""
NEAR = 0.9
"""A size with this share of the speed of the fastest one is as good."""


@dataclass(frozen=True)
class Speed:
    """How fast batches of a size were made.

    Attributes:
        batch_size: The size.
        rows: Rows that were read and transformed.
        seconds: How long that took.
        batches: The number of batches.
    """

    batch_size: int
    rows: int
    seconds: float
    batches: int

    @property
    def rows_per_s(self) -> float:
        """Rows in a second."""
        return self.rows / self.seconds

    @property
    def ms_a_batch(self) -> float:
        """Milliseconds for a batch."""
        return 1e3 * self.seconds / self.batches


def sweep(config: Config, sizes: Sequence[int], seconds: float) -> Iterator[Speed]:
    """Yield the speed of each size, with the shuffling of the configuration, in a single thread.

    Args:
        config: The configuration.
        sizes: The sizes of a batch.
        seconds: How long each is measured, at least one batch; less where the rows of train end before.

    Raises:
        DataError: A value of the data cannot be used.
    """
    part = Parts(config).train
    part.check_not_empty()
    transform = config.compiled.fit(next(iter(part.reader(max(sizes)))))
    for size in sizes:
        reader = part.reader(size, shuffle=config.data.shuffle, seed=config.train.seed)
        batches = iter(reader)
        rows = count = 0
        started = time.perf_counter()
        while (spent := time.perf_counter() - started) < seconds or not count:
            if (table := next(batches, None)) is None:
                spent = time.perf_counter() - started
                break
            to_batch(transform(table))
            rows, count = rows + table.num_rows, count + 1
        yield Speed(size, rows, max(spent, 1e-9), count)


def advice(found: Sequence[Speed], size: int) -> str:
    """Return one line: whether another size than that of the configuration is faster."""
    mine = next(each for each in found if each.batch_size == size)
    fastest = max(found, key=lambda each: each.rows_per_s)
    share = mine.rows_per_s / fastest.rows_per_s
    if share >= NEAR:
        return f"data.batch_size {size} reads {share:.0%} as fast as the fastest, {fastest.batch_size}: keep it"
    least = min(each.batch_size for each in found if each.rows_per_s >= NEAR * fastest.rows_per_s)
    return f"data.batch_size {size} reads {share:.0%} as fast as {fastest.batch_size}: give {least}, and tune lr again"
