"""B10: rows per CPU-second of reading and transforming files, compared with pyarrow, torch's DataLoader and B5.

A Criteo-like table (a label, 13 numbers, 26 columns of hexadecimal strings) as Parquet, CSV, and Criteo's TSV. The
systems read the same file alternately:

* ``scan``: pyarrow.dataset alone, as the upper bound
* ``persia``: RecordReader, transform, batches of 4,096, ready for training
* ``batches``: torch's DataLoader over an IterableDataset that builds whole batches with pyarrow and numpy
* ``rows``: the same, but the DataLoader collates single rows, as with a map-style dataset

``memory`` reads a file of 20 times the window in which rows are shuffled. Each peak is that of a separate process.

``workers`` measures the effect of keys of `data` on the wall time: several workers and one worker, threads that persist
and threads that end with each epoch, and training with many prefetched batches and with one.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import figures
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset

from persia.config import load_config
from persia.config.blocks import Origin
from persia.data.records import Files, RecordReader, open_files
from persia.features import Features, Transform, to_batch
from persia.trainer.batches import TrainingBatches
from persia.trainer.parts import Part

DENSE, SPARSE, BATCH = 13, 26, 4_096
NUMBERS = [f"I{index + 1}" for index in range(DENSE)]
STRINGS = [f"C{index + 1}" for index in range(SPARSE)]
TYPES = {"label": pa.int8(), **dict.fromkeys(NUMBERS, pa.int64()), **dict.fromkeys(STRINGS, pa.string())}
FORMATS = ("parquet", "csv", "tsv")

Read = Callable[[], int]
"""Reads everything and returns the number of rows."""


def criteo_like(rows: int, seed: int) -> pa.Table:
    """Return a table with the columns of Criteo: power-law ids, 5 % nulls."""
    random = np.random.default_rng(seed)
    columns: dict[str, pa.Array] = {"label": pa.array(random.integers(0, 2, rows), pa.int8())}
    for name in NUMBERS:
        values = random.lognormal(3, 2, rows).astype(np.int64)
        columns[name] = pa.array(values, mask=random.random(rows) < 0.05)
    for name in STRINGS:
        ids = np.minimum(random.zipf(1.2, rows), 1_000_000).astype(np.uint32) * np.uint32(2_654_435_761)
        columns[name] = pa.array([f"{value:08x}" for value in ids], mask=random.random(rows) < 0.05)
    return pa.table(columns)


def declared() -> Features:
    """Return the features over the columns of the table."""
    return Features.parse(declared_text(), "bench")


def declared_text() -> str:
    """Return the features over the columns of the table, as YAML."""
    lines = ["features:", *(f"  {name}: {{type: id, dim: 16}}" for name in STRINGS)]
    lines += [f"  {name}: {{type: dense, log1p: true, standardise: true}}" for name in NUMBERS]
    return "\n".join([*lines, "labels:", "  label:"])


def write(table: pa.Table, path: Path, times: int = 1) -> Path:
    """Write a table, several times over, as a file in the format of its suffix. TSV has no header."""
    if path.suffix == ".parquet":
        with pq.ParquetWriter(path, table.schema) as writer:
            for _ in range(times):
                writer.write_table(table)
        return path
    tsv = path.suffix == ".tsv"
    options = pyarrow.csv.WriteOptions(include_header=not tsv, delimiter="\t" if tsv else ",", quoting_style="none")
    with pyarrow.csv.CSVWriter(path, table.schema, write_options=options) as writer:
        for _ in range(times):
            writer.write_table(table)
    return path


def opened(path: Path) -> Files:
    """Return the file as Persia opens it."""
    text = path.suffix != ".parquet"
    return open_files(str(path), types=TYPES if text else None, header=[*TYPES] if path.suffix == ".tsv" else None)


def batches(path: Path, rows: int = 1 << 16) -> Iterator[pa.RecordBatch]:
    """Yield what pyarrow reads, with the types that Persia uses."""
    source: Any = "parquet"
    if path.suffix != ".parquet":
        tsv = path.suffix == ".tsv"
        source = pyarrow.dataset.CsvFileFormat(
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t" if tsv else ","),
            read_options=pyarrow.csv.ReadOptions(column_names=[*TYPES] if tsv else None),
            convert_options=pyarrow.csv.ConvertOptions(column_types=TYPES, null_values=[""], strings_can_be_null=True),
        )
    yield from pyarrow.dataset.dataset(str(path), format=source).to_batches(batch_size=rows)


def scan(path: Path) -> int:
    """Read with pyarrow alone."""
    return sum(batch.num_rows for batch in batches(path))


def persia(path: Path, transform: Transform, *, shuffle: bool = False, window: int = 1 << 18) -> int:
    """Read, transform and build batches for training."""
    rows = 0
    for records in RecordReader(opened(path), BATCH, shuffle=shuffle, window_rows=window):
        rows += to_batch(transform(records)).batch_size
    return rows


class Tensors(IterableDataset[Any]):
    """A dataset without Persia: whole batches by pyarrow and numpy, or their rows one by one."""

    def __init__(self, path: Path, *, single: bool) -> None:
        self.path, self.single = path, single

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield ``(dense, ids, label)``."""
        for batch in batches(self.path, BATCH):
            dense = np.stack([pc.fill_null(batch[name], 0).to_numpy().astype(np.float32) for name in NUMBERS], axis=1)
            ids = np.stack([self.numbers(batch[name]) for name in STRINGS], axis=1)
            made = (
                torch.from_numpy(np.log1p(dense)),
                torch.from_numpy(ids),
                torch.from_numpy(batch["label"].to_numpy().astype(np.float32)),
            )
            yield from zip(*made, strict=True) if self.single else [made]

    @staticmethod
    def numbers(column: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the hexadecimal strings as numbers, each distinct one converted once; null is 0."""
        coded = pc.fill_null(column, "0").dictionary_encode()
        unique = np.array([int(text, 16) for text in coded.dictionary.to_pylist()], np.int64)
        found: np.ndarray[Any, np.dtype[np.int64]] = unique[coded.indices.to_numpy()]
        return found


def collated(path: Path, *, single: bool) -> int:
    """Read with torch's DataLoader, in this process."""
    loader: Any = DataLoader(Tensors(path, single=single), batch_size=BATCH if single else None)
    return sum(len(dense) for dense, _, _ in loader)


def rates(systems: dict[str, Read], seconds: float) -> dict[str, list[float]]:
    """Return the rows per CPU-second (all threads) of each system, measured alternately at least three times."""
    found: dict[str, list[float]] = {name: [] for name in systems}
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        for name, read in systems.items():
            start = time.process_time()
            rows = read()
            found[name].append(figures.ratio(rows, time.process_time() - start))
        if turn >= 2 and time.perf_counter() > end:
            return found
    raise AssertionError


def record(case: str, unit: str, value: float, peer: float, target: float, spread: float, ratio: float) -> None:
    """Print one figure."""
    rounded = {"value": round(value), "peer": round(peer), "ratio": round(ratio, 3)}
    figures.write({"id": "B10", "case": case, "unit": unit, **rounded, "target": target, "spread": round(spread, 3)})


def in_memory(table: pa.Table, transform: Transform, seconds: float) -> None:
    """Compare the transform with pyarrow, which casts numbers and encodes strings as a dictionary."""

    def cast() -> int:
        for name in NUMBERS:
            pc.fill_null(table[name], 0).cast(pa.float32())
        for name in STRINGS:
            table[name].dictionary_encode()
        return len(table)

    found = rates({"persia": lambda: len(transform(table)), "cast": cast}, seconds)
    value, peer = (statistics.median(found[name]) for name in ("persia", "cast"))
    spread = figures.spread(found["persia"])
    record("in memory: transform against cast", "rows/CPU-s", value, peer, 1, spread, figures.ratio(value, peer))


def files(table: pa.Table, transform: Transform, folder: Path, seconds: float) -> None:
    """Compare the systems on each format."""
    targets = {"scan": 0.5, "batches": 1.0, "rows": 1.0}
    for file_format in FORMATS:
        path = write(table, folder / f"clicks.{file_format}")
        systems: dict[str, Read] = {
            "persia": partial(persia, path, transform),
            "scan": partial(scan, path),
            "batches": partial(collated, path, single=False),
            "rows": partial(collated, path, single=True),
        }
        found = rates(systems, seconds)
        middle = {name: statistics.median(each) for name, each in found.items()}
        megabytes = middle["persia"] * path.stat().st_size / len(table) / 1e6
        for peer, target in targets.items():
            unit = f"rows/CPU-s ({megabytes:.0f} MB/CPU-s)"
            ratio = figures.ratio(middle["persia"], middle[peer])
            spread = figures.spread(found["persia"])
            record(f"{file_format}: persia against {peer}", unit, middle["persia"], middle[peer], target, spread, ratio)


def against_training(path: Path, transform: Transform, seconds: float) -> None:
    """Compare the wall time of reading with that of B5's training on batches in memory: 26 slots of dim 16."""
    import training  # imported here, because it needs the example's requirements

    case = training.criteo_case(16)
    with tempfile.TemporaryDirectory(prefix="persia-") as folder:
        training.config(Path(folder), case)
        torch.set_num_threads(1)
        steps = training.persia_steps(case)
        trained, _ = training.rate(steps, case.labels.shape[1], seconds)
        steps.close()  # type: ignore[attr-defined]  # the iterator is a generator
    readings: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(readings) < 3:
        start = time.perf_counter()
        rows = persia(path, transform)
        readings.append(rows / (time.perf_counter() - start))
    value = statistics.median(readings)
    spread = figures.spread(readings)
    record("parquet: persia against training (B5)", "rows/s", value, trained, 3, spread, figures.ratio(value, trained))


def ahead(table: pa.Table, transform: Transform, folder: Path, seconds: float) -> None:
    """Compare several workers with one, and threads that persist with threads that end with each epoch."""
    path = write(table, folder / "ahead.parquet")
    small = write(table.slice(0, 4 * BATCH), folder / "small.parquet")

    def read(file: Path, workers: int, *, persistent: bool = True, epochs: int = 1) -> int:
        part = Part(opened(file), None, "train", Origin())
        reader = part.reader(BATCH, epochs=epochs)
        rows = TrainingBatches(part, reader, transform, None, workers=workers, persistent=persistent)
        return sum(batch.batch_size for batch in rows)

    workers = max(2, os.cpu_count() or 2)
    for file_format in ("parquet", "tsv"):
        file = path if file_format == "parquet" else write(table, folder / "ahead.tsv")
        systems: dict[str, Read] = {f"workers: {count}": partial(read, file, count) for count in (1, workers)}
        compare(f"{file_format}: workers {workers} against 1", systems, seconds)
    epochs = {str(each): partial(read, small, 2, persistent=each, epochs=20) for each in (False, True)}
    compare("parquet: persistent true against false, epochs of 4 batches", epochs, seconds)
    path = write(table.slice(0, 1 << 16), path)
    compare("training: prefetch 64 against 1", trainings(path, folder), seconds)


def trainings(path: Path, folder: Path) -> dict[str, Read]:
    """Return trainings of one epoch with 1 and 64 prefetched batches. Every window of rows is read in one piece."""
    import persia.trainer  # imported here, because only this measurement needs it
    from persia.logger import get_default_logger

    get_default_logger().setLevel("WARNING")

    def train(prefetch: int) -> int:
        text = "\n".join(
            [
                f"data: {{train: {path}, batch_size: {BATCH}, window_rows: {8 * BATCH}, prefetch: {prefetch},",
                "  split: {fractions: [1, 0, 0]}}",
                declared_text(),
                "model: {name: dcnv2, cross_layers: 1, deep_mlp: [16]}",
                "checkpoint: {every: 1000000}",
                f"run: {{dir: {folder}/runs, name: {prefetch}-{time.monotonic_ns()}}}",
            ]
        )
        (folder / "persia.yml").write_text(text, encoding="utf-8")
        with persia.trainer.Trainer(load_config(folder / "persia.yml")) as trainer:
            for _ in trainer.fit():
                pass
        return pq.read_metadata(path).num_rows  # type: ignore[no-any-return]

    return {str(prefetch): partial(train, prefetch) for prefetch in (1, 64)}


def compare(case: str, systems: Mapping[str, Read], seconds: float) -> None:
    """Print the median rows per second of wall time of the last system, with those of the first as the reference.

    The systems run alternately.
    """
    found: dict[str, list[float]] = {name: [] for name in systems}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or any(len(each) < 3 for each in found.values()):
        for name, read in systems.items():
            start = time.perf_counter()
            rows = read()
            found[name].append(figures.ratio(rows, time.perf_counter() - start))
    peer, value = (statistics.median(each) for each in found.values())
    record(case, "rows/s", value, peer, 1, figures.spread([*found.values()][-1]), figures.ratio(value, peer))


def memory(table: pa.Table, folder: Path) -> None:
    """Compare the peak for a file of 20 windows with that for a file of 4 windows."""
    window = len(table)
    for file_format in FORMATS:
        peaks = []
        for times in (4, 20):
            path = write(table, folder / f"large.{file_format}", times)
            command = [sys.executable, __file__, "--memory-of", str(path), "--rows", str(window)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            peaks.append(float(done.stdout))
            path.unlink()
        case = f"{file_format}: peak memory, 20 windows of {table.nbytes / 1e6:.0f} MB against 4"
        record(case, "MB", peaks[1], peaks[0], 0.8, 0, figures.ratio(peaks[0], peaks[1]))


def peak(path: Path, window: int) -> float:
    """Read and shuffle a file. Return the increase of the peak memory of this process, in MB."""
    transform = declared().fit(criteo_like(1_000, seed=7))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now the current use
    before = resident("VmRSS")
    persia(path, transform, shuffle=True, window=window)
    return (resident("VmHWM") - before) / 1000


def resident(field: str) -> float:
    """Return a field of this process's status, in kB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) * 1.024


def main() -> None:
    """Print one JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1 << 18, help="of the file, and of a window")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each format")
    parser.add_argument("--only", choices=("files", "training", "memory", "workers"))
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["LOG_LEVEL"] = "WARNING"
    if arguments.memory_of is not None:
        print(json.dumps(peak(arguments.memory_of, arguments.rows)))
        return
    table = criteo_like(arguments.rows, seed=7)
    transform = declared().fit(table)
    with tempfile.TemporaryDirectory(prefix="persia-") as name:
        folder = Path(name)
        if arguments.only in (None, "files"):
            in_memory(table, transform, arguments.seconds / 4)
            files(table, transform, folder, arguments.seconds)
        if arguments.only in (None, "training"):
            against_training(write(table, folder / "clicks.parquet"), transform, arguments.seconds / 4)
        if arguments.only in (None, "workers"):
            ahead(table, transform, folder, arguments.seconds / 4)
        if arguments.only in (None, "memory"):
            memory(table, folder)


if __name__ == "__main__":
    main()
