"""Held-out rows with the outputs of evaluation and of the bundle, and the allowed differences."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from persia.runtime.errors import UsageError
from persia.serving.manifest import damaged

Floats = npt.NDArray[np.float32]

BOUNDS: Mapping[str, float] = MappingProxyType({"f32": 1e-5, "f16": 5e-3, "int8": 5e-2})
"""The maximum ``|difference| / max(1, |output|)`` from evaluation, by the data type of rows. An output is a logit or,
for a regression, a number. With ``f32`` rows, outputs differ only by the order of torch's sums, which depends on the
batch size."""
SAME = BOUNDS["f32"]
"""The maximum difference between two computations with the same rows."""

EVALUATION, BUNDLE = "persia.evaluation.", "persia.bundle."
"""The prefixes of the names of columns with outputs; the name of the label follows."""


@dataclass(frozen=True)
class ParityRows:
    """Held-out rows with outputs.

    Attributes:
        rows: The inputs.
        outputs: The outputs of the bundle when it was written, ``[rows, labels]``.
    """

    rows: pa.Table
    outputs: Floats


def bound_of(form: str) -> float:
    """Return the bound for a data type of rows.

    Raises:
        UsageError: The data type does not exist.
    """
    if form not in BOUNDS:
        raise UsageError(f"rows={form!r}: expected {', '.join(BOUNDS)}")
    return BOUNDS[form]


def difference(outputs: Floats, wanted: Floats) -> float:
    """Return the largest ``|difference| / max(1, |wanted|)``; infinite if either value is not a finite number."""
    if not outputs.size:
        return 0.0
    one, other = outputs.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        far = np.abs(one - other) / np.maximum(1.0, np.abs(other))
    return float(np.where(np.isfinite(far), far, np.inf).max())


def write(rows: pa.Table, evaluation: Floats, bundle: Floats, labels: Sequence[str]) -> bytes:
    """Return a Parquet file with rows and both outputs, ``[rows, labels]``."""
    for beginning, outputs in ((EVALUATION, evaluation), (BUNDLE, bundle)):
        for place, label in enumerate(labels):
            rows = rows.append_column(f"{beginning}{label}", pa.array(outputs[:, place], pa.float32()))
    sink = io.BytesIO()
    pq.write_table(rows, sink)
    return sink.getvalue()


def read(content: bytes, name: str, labels: Sequence[str]) -> ParityRows:
    """Read what :func:`write` has written.

    Raises:
        CheckpointError: The content is not a parity file.
    """
    try:
        table: Any = pq.ParquetFile(io.BytesIO(content)).read()  # read_table would import pyarrow.dataset
        outputs = [np.asarray(table.column(f"{BUNDLE}{label}"), np.float32) for label in labels]
    except (pa.ArrowException, KeyError, OSError) as error:
        raise damaged(Path(name), f"is not a parity file: {error}") from error
    inputs = [column for column in table.schema.names if not column.startswith((EVALUATION, BUNDLE))]
    return ParityRows(table.select(inputs), np.stack(outputs, 1))
