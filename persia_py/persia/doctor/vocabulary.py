"""The vocabulary of a job: the ids that have rows, for each table, and how they were inserted and removed."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

_HEADS = ("table", "rows", "memory", "admitted", "evicted", "expired", "hit rate", "waiting", "seen once")
_MEANING = (
    "admitted, evicted, expired and hit rate are counted since the generation began; each training loop begins a "
    "generation. waiting: pushed ids that have no row yet (admission by count). seen once: waiting ids with one push. "
    "-: no id waits, as in a table without admission by count"
)
_PIPED_COLUMNS = 240
"""The width of the table if the output is not a terminal."""


@dataclass(frozen=True)
class TableReport:
    """The vocabulary of one table. None means that a value is unknown.

    Attributes:
        name: The name of the table.
        rows: The number of rows.
        memory_bytes: The memory of the rows on the servers, in bytes: weights, optimizer state, ids and index.
        inserted: The number of rows that were inserted because their ids were admitted.
        evicted: The number of rows that were evicted.
        expired: The number of rows that were removed because their time to live had passed.
        looked_up: The number of ids that were looked up for training, counted once per batch; in an infer job, the
            number of all ids that were looked up.
        hits: The number of these ids that had a row.
        waiting: The number of ids that need more pushes to get a row.
        seen_once: The number of waiting ids with one push.
    """

    name: str
    rows: int
    memory_bytes: int | None = None
    inserted: int | None = None
    evicted: int | None = None
    expired: int | None = None
    looked_up: int | None = None
    hits: int | None = None
    waiting: int | None = None
    seen_once: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """The share of looked-up ids that had a row, from 0 to 1; None if no id was looked up."""
        return self.hits / self.looked_up if self.looked_up and self.hits is not None else None


def of_parts(parts: Iterable[Mapping[str, Any]]) -> list[TableReport]:
    """Return the reports of tables whose parts are on several servers.

    Args:
        parts: The statistics, each of one table on one server, in the form of a server's report or a manifest.
    """
    sums: dict[str, dict[str, int]] = {}
    for part in parts:
        lookups = part["lookups"]
        numbers = {key: part[key] for key in ("rows", "memory_bytes", "inserted", "evicted", "expired")}
        numbers |= {key: part[key] for key in ("waiting", "seen_once")}
        numbers |= {"looked_up": sum(lookups.values()), "hits": lookups["hits"]}
        total = sums.setdefault(part["name"], dict.fromkeys(numbers, 0))
        for key, number in numbers.items():
            total[key] += int(number)
    return [TableReport(name=name, **total) for name, total in sums.items()]


def of_manifest(head: Mapping[str, Any]) -> list[TableReport]:
    """Return the reports of the tables of a checkpoint, from the ``head`` of its manifest.

    A checkpoint of an older version, or of imported rows, records only the number of rows.
    """
    if head.get("tables"):
        return of_parts(head["tables"])
    names = [table["name"] for table in head["run"]["schema"]["tables"]]
    return [TableReport(name, int(head["rows"].get(name, 0))) for name in names]


def show(reports: Iterable[TableReport]) -> None:
    """Print a table with one line for each report, and the meaning of its columns."""
    wide = None if sys.stdout.isatty() else _PIPED_COLUMNS
    console = Console(highlight=False, markup=False, soft_wrap=True, width=wide)
    console.print(_table(reports))
    console.print(_MEANING)


def _table(reports: Iterable[TableReport]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for head in _HEADS:
        shown.add_column(head, justify="left" if head == "table" else "right", no_wrap=True)
    for one in reports:
        rate = "-" if one.hit_rate is None else f"{one.hit_rate:.1%}"
        counts = [_number(each) for each in (one.inserted, one.evicted, one.expired)]
        waits = [_number(each) if one.waiting else "-" for each in (one.waiting, one.seen_once)]
        shown.add_row(one.name, f"{one.rows:,}", _size(one.memory_bytes), *counts, rate, *waits)
    return shown


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f} MB"
