"""Figures: the record of one case, and the conditions under which it is not a result. This module needs only Python.

A record has a ``ratio`` (higher is better), or the reason why it is not a result: ``invalid`` if the measurement cannot
be true, ``failed`` if nothing was measured.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence

Record = dict[str, object]

UNMEASURED = 3
"""Exit code of a run: a case is invalid, or a part failed."""

NUMBERS = ("value", "peer", "ratio", "target", "spread")
"""The keys that every record has."""


def ratio(over: float, under: float) -> float:
    """Return ``over / under``, or NaN if ``under`` is 0."""
    return over / under if under else math.nan


def spread(values: Sequence[float]) -> float:
    """Return half of the interquartile range divided by the median, NaN if the median is 0."""
    low, middle, high = statistics.quantiles(values, n=4)
    return ratio((high - low) / 2, middle)


def number(record: Record, key: str) -> float:
    """Return a number of a record, NaN if it is missing."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def problem(record: Record) -> tuple[str, str] | None:
    """Return the way in which a record is not a result, and the reason; None if it is a result."""
    for kind in ("failed", "invalid"):
        if kind in record:
            return kind, str(record[kind])
    return None


def checked(record: Record) -> Record:
    """Return the record, marked as invalid if a value in it cannot be correct."""
    if problem(record) is not None:
        return record
    wrong = [key for key in NUMBERS if not math.isfinite(number(record, key))]
    wrong += [key for key in ("ratio", "target") if number(record, key) <= 0]
    wrong += [key for key in ("value", "peer", "spread") if number(record, key) < 0]
    if not wrong:
        return record
    return {**plain(record), "invalid": ", ".join(f"{key} is {record.get(key)}" for key in wrong)}


def plain(record: Record) -> Record:
    """Return the record for JSON, with None instead of numbers that are not finite."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


def write(record: Record) -> None:
    """Print a record as one line of JSON."""
    sys.stdout.write(json.dumps(plain(record), allow_nan=False) + "\n")
    sys.stdout.flush()
