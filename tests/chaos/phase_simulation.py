"""The rows, counts and recency of a run of :mod:`phase_train` after each step, by the documented rules.

The module applies the rules of ``rust_core/store/src/shard/mod.rs`` to plain dictionaries: admission by count, time to
live, eviction of the least recently used rows. A row begins at 0, and SGD with rate 1 subtracts 1 at each update.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from phase_data import TABLES, Data

SHARDS = 256
_EVICTED_PART = 16
_MASK = (1 << 64) - 1

Key = tuple[int, int]
"""Index of the table, and id."""


@dataclass
class Row:
    """A row."""

    last_used: int
    value: int


@dataclass
class Shard:
    """The rows and admission counts of a virtual shard."""

    rows: dict[Key, Row] = field(default_factory=dict)
    counts: dict[Key, int] = field(default_factory=dict)
    swept: int = 0


def shard_of(number: int) -> int:
    """Return the virtual shard of an id."""
    product = (number ^ 0x9E3779B97F4A7C15) * 0xD6E8FEB86659FD93
    return ((product & _MASK) ^ (product >> 64)) >> 56


class Simulation:
    """The tables of a run.

    Args:
        data: The batches, and the policy of the tables.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self.step = 0
        self.shards = [Shard() for _ in range(SHARDS)]
        self._pushed: dict[Key, list[int]] = {}  # the steps of all pushes of an id, ascending

    def advance(self) -> None:
        """Apply the pushes of all ranks for the next step."""
        self.step += 1
        for rank in range(self.data.ranks):
            self._push((self.step - 1) * self.data.ranks + rank)

    def _push(self, number: int) -> None:
        one, many = self.data.ids(number)
        request = [Counter(each for sample in many for each in sample), Counter(one)]  # by first occurrence
        due = self.step % SHARDS
        if any(shard_of(each) == due for ids in request for each in ids) and self.shards[due].swept < self.step:
            self.shards[due].swept = self.step
            self._sweep(self.shards[due])
        missing: list[tuple[Key, int]] = []
        for table, ids in enumerate(request):
            for each, times in ids.items():
                self._pushed.setdefault((table, each), []).append(self.step)
                row = self._shard(each).rows.get((table, each))
                if row is None or self._expired(table, row, self.step):
                    missing.append(((table, each), times))
                else:
                    row.last_used = self.step
                    row.value -= times
        for key, times in missing:
            self._admit(key, times)

    def _admit(self, key: Key, times: int) -> None:
        shard = self._shard(key[1])
        shard.rows.pop(key, None)  # expired
        min_count = self.data.min_counts[TABLES[key[0]]]
        if min_count > 1:
            shard.counts[key] = min(shard.counts.get(key, 0) + 1, min_count)
            if shard.counts[key] < min_count:
                return
        if len(shard.rows) >= self.data.budget:
            before = len(shard.rows)
            self._sweep(shard)
            leave = max(1, self.data.budget // _EVICTED_PART) - (before - len(shard.rows))
            order = sorted((row.last_used, *key) for key, row in shard.rows.items())
            for _, table, each in order[: max(0, leave)]:
                del shard.rows[table, each]
        shard.counts.pop(key, None)
        shard.rows[key] = Row(self.step, -times)

    def _shard(self, number: int) -> Shard:
        return self.shards[shard_of(number)]

    def _sweep(self, shard: Shard) -> None:
        for key in [key for key, row in shard.rows.items() if self._expired(key[0], row, self.step)]:
            del shard.rows[key]

    def _expired(self, table: int, row: Row, step: int) -> bool:
        ttl = self.data.ttls[TABLES[table]]
        return bool(ttl) and row.last_used + ttl < step

    # --- what is compared

    def rows(self) -> dict[Key, tuple[int, int]]:
        """Return ``(last use, value)`` of each row."""
        return {key: (row.last_used, row.value) for shard in self.shards for key, row in shard.rows.items()}

    def possible_uses(self, key: Key) -> set[int]:
        """Return the possible last uses of a row if pushes are not ordered.

        The first ``min_count - 1`` pushes that arrive are counted and not applied. These may be pushes of any steps.
        """
        steps = self._pushed[key]
        counted = self.data.min_counts[TABLES[key[0]]] - 1
        return {steps[-1]} if self.data.ordered or not counted else set(steps[len(steps) - counted - 1 :])

    def counts(self) -> dict[Key, int]:
        """Return the admission counts."""
        return {key: count for shard in self.shards for key, count in shard.counts.items()}

    def read(self, table: int, number: int) -> int:
        """Return the values that an evaluation after this step reads."""
        row = self._shard(number).rows.get((table, number))
        return 0 if row is None or self._expired(table, row, self.step) else row.value


def states(data: Data) -> Iterator[Simulation]:
    """Yield the tables before the first step, and after each."""
    tables = Simulation(data)
    yield copy.deepcopy(tables)
    for _ in range(data.steps):
        tables.advance()
        yield copy.deepcopy(tables)
