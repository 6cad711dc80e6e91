"""Synthetic clicks drawn from a known model (the teacher), for benchmarks and experiments."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from persia.data.records.split import mix
from persia.runtime.errors import StorageError, UsageError

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.uint64]

_CHUNK = 1 << 17
_FACTORS = 4
_BINS = 1 << 18
_DOMAIN = 0x7465616368657273
"""The seed of a second hash for random numbers. With this hash, labels do not correlate with a split that hashes rows
or ids."""


@dataclass(frozen=True)
class Teacher:
    """A model of clicks whose parameters are known exactly.

    With ids ``x_c`` of the columns ``id0, id1, …`` and dense inputs ``d_j``::

        logit = b + sum_c w(c, x_c) + <f(0, x_0), f(1, x_1)> + 0.3 sum_j d_j + 0.5 (d_0^2 - 1)

    ``w`` and the four numbers of ``f`` are normal with standard deviations of 0.5 and 0.6, and functions of seed,
    column and id. Dense inputs are standard normal. The k-th most frequent id of a column has a share proportional to
    the integral of ``x ** -exponent`` from k to k + 1. The label is 1 with the probability ``sigmoid(logit)``; ``b`` is
    chosen so that the mean is ``positive``.

    Attributes:
        ids: The number of distinct ids of each id column. Columns with an even index hold integers, others strings.
        dense: The number of dense columns.
        exponent: The exponent of the power law; 0 is uniform.
        positive: The share of labels that are 1.
        seed: The seed of all random numbers.
    """

    ids: tuple[int, ...] = (1_000, 10_000, 100_000)
    dense: int = 4
    exponent: float = 1.05
    positive: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise a :class:`UsageError` that lists all invalid values."""
        wrong = [f"ids {count}: must be from 1 to 2^40" for count in self.ids if not 1 <= count <= 1 << 40]
        if not self.ids:
            wrong.append("ids: expected at least one id column")
        if self.dense < 0:
            wrong.append(f"dense {self.dense}: must be 0 or more")
        if not 0 <= self.exponent <= 4:
            wrong.append(f"exponent {self.exponent}: must be from 0 to 4")
        if not 0 < self.positive < 1:
            wrong.append(f"positive {self.positive}: must be above 0 and below 1")
        if wrong:
            raise UsageError("synth: " + "; ".join(wrong))

    def batches(self, rows: int, skip: int = 0) -> Iterator[tuple[pa.RecordBatch, Floats]]:
        """Yield rows, with the probability that each label is 1.

        The rows are the first rows of an infinite table, so a longer output begins with the same rows.

        Args:
            rows: The number of rows.
            skip: The number of rows of the table to skip.
        """
        bias = self._bias()
        for number in range(skip // _CHUNK, -(-(skip + rows) // _CHUNK)):
            first, last = max(skip, number * _CHUNK), min(skip + rows, (number + 1) * _CHUNK)
            batch, logits = self._chunk(number, last - number * _CHUNK)
            batch, logits = batch.slice(first - number * _CHUNK), logits[first - number * _CHUNK :]
            probabilities = 1 / (1 + np.exp(-(logits + bias)))
            draws = _uniform(np.arange(first, last, dtype=np.uint64), self.seed + 1)
            labels = pa.array((draws < probabilities).astype(np.int8))
            yield batch.append_column("label", labels), probabilities

    def _bias(self) -> float:
        """Return the ``b`` that gives labels their mean, computed on the first rows."""
        _, logits = self._chunk(0, _CHUNK)
        low, high = -30.0, 30.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if (1 / (1 + np.exp(-(logits + middle)))).mean() < self.positive else (low, middle)
            )
        return (low + high) / 2

    def _chunk(self, number: int, rows: int) -> tuple[pa.RecordBatch, Floats]:
        random = np.random.Generator(np.random.PCG64([self.seed, number]))
        columns: dict[str, Any] = {}
        logits = np.zeros(_CHUNK)
        factors = []
        for column, count in enumerate(self.ids):
            ids = self._draw_ids(random.random(_CHUNK), count, column)
            logits += 0.5 * _normal(ids, self.seed, column, 0)
            if column < 2:
                factors.append(np.stack([_normal(ids, self.seed, column, 1 + place) for place in range(_FACTORS)]))
            values = ids.astype(np.int64)[:rows]
            columns[f"id{column}"] = pa.array(values) if column % 2 == 0 else pa.array(values).cast(pa.string())
        if len(factors) == 2:
            logits += 0.36 * (factors[0] * factors[1]).sum(axis=0)
        for column in range(self.dense):
            dense = random.standard_normal(_CHUNK)
            logits += 0.3 * dense + (0.5 * (dense * dense - 1) if column == 0 else 0)
            columns[f"dense{column}"] = pa.array(dense[:rows].astype(np.float32))
        return pa.record_batch(columns), logits[:rows]

    def _draw_ids(self, uniform: Floats, count: int, column: int) -> Ids:
        """Return ids drawn from the power law. Ids of similar frequency are far apart."""
        slope = 1 - self.exponent
        if abs(slope) < 1e-9:
            ranks = np.exp(uniform * np.log(count + 1)) - 1
        else:
            ranks = ((uniform * ((count + 1.0) ** slope - 1)) + 1) ** (1 / slope) - 1
        whole: Ids = np.minimum(ranks, count - 1).astype(np.uint64)
        ids: Ids = mix(whole + np.uint64(column << 48), self.seed) >> np.uint64(16)
        return ids


@dataclass(frozen=True)
class Made:
    """The result of :func:`write`.

    Attributes:
        rows: The number of rows.
        positive: The share of labels that are 1.
        best_auc: The expected AUC of the teacher's own probabilities; a model exceeds it only by chance.
        best_log_loss: The expected log loss of the teacher's own probabilities.
        auc: The AUC of the teacher's probabilities on the labels that were drawn. Compare a model that is evaluated on
            these rows with this value, because both depend on the same draws. NaN if all labels are equal.
        log_loss: The log loss of the teacher's probabilities on these labels.
    """

    rows: int
    positive: float
    best_auc: float
    best_log_loss: float
    auc: float
    log_loss: float

    def as_dict(self) -> dict[str, float]:
        """Return the fields by name."""
        return asdict(self)


def write(path: str | os.PathLike[str], rows: int, teacher: Teacher, *, skip: int = 0) -> Made:
    """Write rows to a file. The file appears when it is complete.

    Args:
        path: A file that ends in ``.parquet`` or ``.csv``.
        rows: The number of rows.
        teacher: The model that draws them.
        skip: The number of rows to skip, such as those of a file that was written earlier.

    Raises:
        UsageError: The file has another extension, ``rows`` is below 1, or ``skip`` is negative.
        StorageError: The file cannot be written; the incomplete file is removed.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".csv") or rows < 1:
        raise UsageError(
            f"synth {path}, {rows} rows: expected a file that ends in .parquet or .csv, and at least 1 row"
        )
    if skip < 0:
        raise UsageError(f"synth: skip {skip}: must be 0 or more")
    part = path.with_name(f".{path.name}.part")
    best, drawn = _Quality(), _Quality()
    try:
        writer: Any = None
        try:
            for batch, probabilities in teacher.batches(rows, skip):
                writer = writer or _writer(part, batch.schema)
                writer.write_batch(batch)
                best.add(probabilities, probabilities)
                drawn.add(probabilities, np.asarray(batch["label"]).astype(np.float64))
        finally:
            if writer is not None:
                writer.close()
        part.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return Made(rows, drawn.positive / rows, best.auc, best.log_loss / rows, drawn.auc, drawn.log_loss / rows)


def _writer(path: Path, schema: pa.Schema) -> Any:
    csv = path.name.endswith(".csv.part")
    return pa.csv.CSVWriter(path, schema) if csv else pa.parquet.ParquetWriter(path, schema)


class _Quality:
    """The AUC and log loss of predicted probabilities, in bounded memory.

    Attributes:
        positive: The sum of the labels.
        log_loss: The sum of the log loss.
    """

    def __init__(self) -> None:
        self.positive, self.log_loss = 0.0, 0.0
        self._bins = np.zeros((2, _BINS))

    def add(self, probabilities: Floats, labels: Floats) -> None:
        """Add rows, ``[rows]``. For expected values, pass the probability as the label."""
        self.positive += float(labels.sum())
        logs = labels * _log(probabilities) + (1 - labels) * _log(1 - probabilities)
        self.log_loss -= float(logs.sum())
        places = np.minimum((probabilities * _BINS).astype(np.int64), _BINS - 1)
        self._bins += np.stack([np.bincount(places, share, _BINS) for share in (labels, 1 - labels)])

    @property
    def auc(self) -> float:
        """The AUC; within a bin, half of the pairs count as ordered. NaN if all labels are equal."""
        positives, negatives = self._bins
        pairs = float(positives.sum() * negatives.sum())
        below = np.concatenate([[0.0], np.cumsum(negatives)[:-1]])
        return float((positives * (below + negatives / 2)).sum()) / pairs if pairs else float("nan")


def _log(values: Floats) -> Floats:
    logs: Floats = np.log(np.maximum(values, 1e-300))
    return logs


def _uniform(numbers: Ids, seed: int) -> Floats:
    shares: Floats = (mix(mix(numbers, seed), _DOMAIN) >> np.uint64(11)).astype(np.float64) + 0.5
    return shares / 2.0**53


def _normal(ids: Ids, seed: int, column: int, place: int) -> Floats:
    """Return a standard normal number for each id (Box and Muller's method)."""
    key = 1000 * seed + 16 * column + place
    first, second = _uniform(ids, 2 * key + 7919), _uniform(ids, 2 * key + 7920)
    numbers: Floats = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return numbers
