"""Rows and MB per CPU-second of feature transforms: a Criteo-like table, beside pyarrow's own work on the same columns.

The table is in memory: 13 numbers, 26 columns of hexadecimal strings, a label. ``ratio`` is to the case `cast`:
pyarrow fills nulls, casts numbers, and encodes strings as a dictionary.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persia.features import Features, to_batch

DENSE, SPARSE = 13, 26


def criteo_like(rows: int, seed: int) -> pa.Table:
    """Return a table with the columns of Criteo: power-law ids, 5 % nulls."""
    random = np.random.default_rng(seed)
    columns: dict[str, pa.Array] = {"label": pa.array(random.integers(0, 2, rows), pa.int8())}
    for index in range(DENSE):
        values = random.lognormal(3, 2, rows).astype(np.int64)
        columns[f"I{index + 1}"] = pa.array(values, mask=random.random(rows) < 0.05)
    for index in range(SPARSE):
        ids = np.minimum(random.zipf(1.2, rows), 1_000_000).astype(np.uint32) * np.uint32(2_654_435_761)
        columns[f"C{index + 1}"] = pa.array([f"{value:08x}" for value in ids], mask=random.random(rows) < 0.05)
    return pa.table(columns)


def declared(dense: bool, sparse: bool) -> Features:
    """Return the features over columns of the table."""
    lines = ["features:", "  one: {type: id, column: C1, dim: 16}"]
    if sparse:
        lines += [f"  C{index + 1}: {{type: id, dim: 16}}" for index in range(SPARSE)]
    if dense:
        lines += [f"  I{index + 1}: {{type: dense, log1p: true, standardise: true}}" for index in range(DENSE)]
    return Features.parse("\n".join([*lines, "labels:", "  label:"]), "bench")


def measured(work: Callable[[], object], seconds: float) -> float:
    """Return the CPU seconds of one call: the least of those within about ``seconds``."""
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
        if time.perf_counter() > end:
            return best


def main() -> None:
    """Print one JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    table = criteo_like(arguments.rows, seed=7)
    features = declared(dense=True, sparse=True)
    transform = features.fit(table)
    ids, floats = declared(False, True).fit(table), declared(True, False).fit(table)
    samples = transform(table)
    strings = [f"C{index + 1}" for index in range(SPARSE)]
    coded = pa.table(
        {name: table[name].dictionary_encode() if name in strings else table[name] for name in table.column_names}
    )

    def cast() -> None:
        for name in table.column_names:
            column = table[name]
            _ = column.dictionary_encode() if name in strings else pc.fill_null(column, 0).cast(pa.float32())

    cases: dict[str, Callable[[], object]] = {
        "cast": cast,
        "fit": lambda: features.fit(table),
        "transform": lambda: transform(table),
        "transform, dictionary-encoded": lambda: transform(coded),
        "transform, ids only": lambda: ids(table),
        "transform, numbers only": lambda: floats(table),
        "take": lambda: samples.take(np.random.default_rng(0).permutation(len(samples))),
        "batch of 4,096": lambda: to_batch(samples.slice(0, 4_096)),
    }
    reference = 0.0
    for name, work in cases.items():
        seconds = measured(work, arguments.seconds)
        rows = 4_096 if "4,096" in name else arguments.rows
        reference = reference or rows / seconds
        figures = {
            "rows/CPU-s": round(rows / seconds),
            "MB/CPU-s": round(rows / len(samples) * table.nbytes / seconds / 1e6),
        }
        print(json.dumps({"case": name, **figures, "ratio": round(rows / seconds / reference, 2)}))


if __name__ == "__main__":
    main()
