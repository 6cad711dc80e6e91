"""The workload W of every embedding benchmark, and the timing of a step. Peers import this module: it needs only numpy.

``W(dim, L)``: 26 features with ids below 100,000, batch 4,096, L ids per sample and feature, uniform or Zipf
(exponent 1.05, scrambled), float32. Rows are counted as batch x features x L, before deduplication.
"""

import statistics
import time
from collections.abc import Callable

import figures
import numpy as np
import numpy.typing as npt

FEATURES = 26
IDS = 100_000
BATCH = 4_096
BATCHES = 4
LEARNING_RATE = 0.01


def make_ids(per_sample: int, zipf: bool, seed: int = 1) -> list[npt.NDArray[np.int64]]:
    """Return ``BATCHES`` arrays of ids, ``[FEATURES, BATCH, per_sample]`` each."""
    rng = np.random.default_rng(seed)
    shape = (FEATURES, BATCH, per_sample)
    if not zipf:
        return [rng.integers(0, IDS, shape) for _ in range(BATCHES)]
    weights = np.arange(1, IDS + 1) ** -1.05
    cumulative = np.cumsum(weights) / weights.sum()
    scramble = rng.permutation(IDS)
    return [scramble[np.searchsorted(cumulative, rng.random(shape)).clip(0, IDS - 1)] for _ in range(BATCHES)]


def rows_of(per_sample: int) -> int:
    """Return the rows of one step."""
    return FEATURES * BATCH * per_sample


def measure(system: str, case: dict[str, object], rows: int, step: Callable[[int], object], seconds: float) -> None:
    """Run ``step(number)`` for about ``seconds`` and print its rate as one JSON line.

    The rate is million rows per CPU-second, user and system time of all threads of this process. Its spread is half of
    the interquartile range divided by the median.
    """
    for number in range(3):
        step(number)
    cpu: list[float] = []
    wall: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(cpu) < 7:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        step(len(cpu))
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
    rates = [figures.ratio(rows / 1e6, one) for one in cpu]
    figures.write(
        {
            "system": system,
            **case,
            "mrows_per_cpu_s": round(statistics.median(rates), 3),
            "mrows_per_s": round(figures.ratio(rows / 1e6, statistics.median(wall)), 3),
            "spread": round(figures.spread(rates), 3),
            "steps": len(cpu),
        }
    )
