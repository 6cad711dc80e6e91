"""B11: the start of ``persia serve`` with a large table, and its memory.

A model with one id column is trained on a file in which each id occurs once, and exported with f32, f16 and int8 rows.
The start is the time from the command to the first score, including the hashing of all files. Memory is the
proportional set size (PSS) after requests with ids from the whole table, minus the PSS with a small bundle. It is
compared with the size of the files.
"""

import argparse
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import figures
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from serving import served

import persia
from persia.trainer import Trainer

DIM = 16
START_S = 5.0
"""The target for the time from the command to the first score, in seconds."""
NEAR = 0.8
"""The target for the size of the files divided by the memory."""
DTYPES = ("f32", "f16", "int8")
SMALL = 100_000
"""The rows of the small bundle."""
REQUESTS, REQUEST_ROWS = 200, 500


def train(folder: Path, rows: int) -> None:
    """Train on ``rows`` different ids, and export the bundles."""
    folder.mkdir()
    random = np.random.default_rng(1)
    label = random.integers(0, 2, rows, dtype=np.int8)
    table = pa.table({"id": random.permutation(rows), "label": label})
    for name, part in {"train": table, "valid": table[:1_000], "test": table[:1_000]}.items():
        pq.write_table(part, folder / f"{name}.parquet")
    (folder / "persia.yml").write_text(
        f"data: {{train: train.parquet, valid: valid.parquet, test: test.parquet, batch_size: 32768}}\n"
        f"features:\n  id: {{type: id, dim: {DIM}}}\n"
        "labels:\n  label: {}\nmodel: {name: dlrm, bottom_mlp: [], top_mlp: [16, 1]}\n"
        f"run: {{dir: {folder}/runs, name: one}}\n"
    )
    with Trainer(persia.load_config(folder / "persia.yml")) as trainer:
        for _ in trainer.fit():
            pass
    for dtype in DTYPES:
        (folder / dtype).mkdir()
        with Trainer(persia.load_config(folder / "persia.yml")) as trainer:
            trainer.resume(folder / "runs" / "one").export(folder / dtype / "bundle", rows=dtype)


def score(port: int, ids: list[int]) -> None:
    """Request scores. They must be one for each id."""
    body = json.dumps([{"id": each} for each in ids]).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/score", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        found = json.load(answer)["scores"]
    if len(found) != len(ids):
        raise RuntimeError(f"{len(found)} scores for {len(ids)} ids")


def first_score(port: int) -> None:
    """Request one score until the system gives it."""
    while True:
        try:
            return score(port, [0])
        except OSError:
            time.sleep(0.01)


def memory_of(bundle: Path, rows: int) -> tuple[float, float]:
    """Return the memory of a process that has scored ids of the whole table, and the size of the bundle, in GiB."""
    random = np.random.default_rng(2)
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    with served("persia", bundle.parent, pinned=False) as (port, pid):
        first_score(port)
        for _ in range(REQUESTS):
            score(port, random.integers(0, rows, REQUEST_ROWS).tolist())
        return psutil.Process(pid).memory_full_info().pss / 2**30, size / 2**30


def measure(rows: int, repetitions: int, folder: Path) -> Iterator[figures.Record]:
    """Measure each dtype of rows. The memory of a small bundle, which is that of PyTorch, is subtracted."""
    train(folder / "small", SMALL)
    train(folder / "large", rows)
    for dtype in DTYPES:
        starts = list[float]()
        for _ in range(repetitions):
            began = time.monotonic()
            with served("persia", folder / "large" / dtype, pinned=False) as (port, _pid):
                first_score(port)
                starts.append(time.monotonic() - began)
        took = float(np.median(starts))
        spread = float(np.quantile(starts, 0.75) - np.quantile(starts, 0.25)) / 2 / took
        case = f"{rows} rows of dim {DIM}, {dtype}"
        numbers = {"value": round(took, 2), "peer": START_S, "ratio": round(figures.ratio(START_S, took), 3)}
        yield {"id": "B11", "case": f"start, {case}", "unit": "s", **numbers, "target": 1.0, "spread": round(spread, 3)}
        small, large = (
            memory_of(folder / name / dtype / "bundle", count) for name, count in (("small", SMALL), ("large", rows))
        )
        grown, size = (after - before for before, after in zip(small, large, strict=True))
        numbers = {"value": round(grown, 2), "peer": round(size, 2), "ratio": round(figures.ratio(size, grown), 3)}
        yield {"id": "B11", "case": f"memory, {case}", "unit": "GiB", **numbers, "target": NEAR, "spread": 0.0}


def main() -> None:
    """Measure, and print a record for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10^6 rows instead of 10^7")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for record in measure(1_000_000 if options.quick else 10_000_000, 3, Path(folder)):
            figures.write(record)


if __name__ == "__main__":
    main()
