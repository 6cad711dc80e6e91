"""The data of a run of :mod:`phase_train`. As a script, this module is the data-compose that sends the data.

A batch depends only on its number. Its ids change over time, so rows are admitted, evicted and expire in every run.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from persia.ctx import DataCtx
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch

TABLES = ("many", "one")
"""The tables, in the order of the schema."""
DIM = 2
SAMPLES = 8
_WINDOW = 48
"""The number of ids that a table has at a time."""
_DRIFT = 3
"""Ids that are replaced by new ones in each step."""
_SPREAD = 0x9E3779B97F4A7C15
"""The factor that spreads ids over all 64 bits."""


@dataclass(frozen=True)
class Data:
    """The data of a run, and the policy of its tables.

    Attributes:
        seed: The seed of the ids.
        steps: The number of steps of the run.
        ordered: Whether pushes arrive in the order of steps and ranks, in a reproducible run. Otherwise, each batch has
            an id at most once, and no row is removed, so the result does not depend on the order.
        budget: The capacity of a virtual shard in rows.
        min_counts: The number of pushes until an id has a row, by table.
        ttls: The number of steps until a row expires, by table; 0 means never.
        ranks: The number of ranks that train on the data; rank ``r`` has batch ``(step - 1) * ranks + r``.
        twice: A batch that is also sent in place of the one after it, which the verification must detect.
    """

    seed: int
    steps: int
    ordered: bool
    budget: int
    min_counts: dict[str, int]
    ttls: dict[str, int]
    ranks: int = 2
    twice: int | None = None

    @classmethod
    def of(cls, plan: dict[str, Any]) -> Self:
        """Return the data of a plan."""
        return cls(**plan["data"])

    def plan(self) -> dict[str, Any]:
        """Return the data as JSON values."""
        return asdict(self)

    def slots(self) -> str:
        """Return the configuration of the slots."""
        lines = []
        for name in TABLES:
            ttl = f", ttl: {self.ttls[name]}" if self.ttls[name] else ""
            lines.append(f"{name}: {{dim: {DIM}, admission: {{min_count: {self.min_counts[name]}}}{ttl}}}")
        return "\n".join(lines)

    def known(self) -> list[int]:
        """Return all ids of the run."""
        return [_spread(number) for number in range(_WINDOW + _DRIFT * self.steps)]

    def ids(self, number: int) -> tuple[list[int], list[list[int]]]:
        """Return the ids of batch ``number``: one of each sample in ``one``, up to three of each in ``many``."""
        rng = np.random.default_rng([self.seed, number])
        first = _DRIFT * (number // self.ranks)
        if self.ordered:
            one = rng.integers(0, _WINDOW, SAMPLES)
            many = [rng.integers(0, _WINDOW, rng.integers(0, 4)) for _ in range(SAMPLES)]
        else:
            one = rng.permutation(_WINDOW)[:SAMPLES]
            ends = np.cumsum(rng.integers(0, 4, SAMPLES))
            many = np.split(rng.permutation(_WINDOW)[: ends[-1]], ends[:-1])
        return [_spread(first + int(each)) for each in one], [
            [_spread(first + int(each)) for each in sample] for sample in many
        ]

    def batch(self, number: int) -> PersiaBatch:
        """Return batch ``number``."""
        one, many = self.ids(number - (self.twice is not None and number == self.twice + 1))
        zeros = np.zeros((SAMPLES, 1), np.float32)
        return PersiaBatch(
            [
                IDTypeFeatureWithSingleID("one", array(one)),
                IDTypeFeature("many", [array(sample) for sample in many]),
            ],
            [NonIDTypeFeature(zeros)],
            [Label(zeros)],
        )


def array(ids: list[int]) -> npt.NDArray[np.uint64]:
    """Return ids as an array."""
    return np.array(ids, dtype=np.uint64)


def _spread(number: int) -> int:
    return number * _SPREAD % (1 << 64)


if __name__ == "__main__":
    data = Data(**json.loads(sys.argv[1]))
    with DataCtx() as ctx:
        for number in range(data.steps * data.ranks):
            ctx.send_data(data.batch(number))
