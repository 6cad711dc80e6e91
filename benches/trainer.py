"""B5 through ``persia train``: samples per second of a Trainer that reads a file, and of a loop over batches in memory.

All systems train the same DLRM (26 slots of dim 16, 13 dense inputs, batch 4,096) on the same rows:

* ``trainer`` reads a Parquet file, transforms and shuffles it, and reports.
* ``loop`` is a script: TrainCtx and a DataLoader over batches that were transformed before.
* ``bare`` is the loop without the safeguards that are always on: the check that loss and gradients are finite, the norm
  of the gradient, and the flight recorder.
* ``observed`` is the loop with monitoring: its metrics are served, another process reads them as often as Prometheus
  does, and its log is kept as JSON, with a line for each reading.

Traces are off in all systems, as by default. Each reading is made in a separate process, alternately for all systems.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import figures
import pyarrow as pa
import pyarrow.parquet
import torch

import persia
from persia.config import Config
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Adagrad
from persia.features import to_batch
from persia.loop import backward
from persia.models import DLRM
from persia.runtime import flight, log_files
from persia.runtime.logging import REPORTS, get_logger
from persia.trainer.models import slots_of
from persia.utils import find_free_port

STEPS_A_READING = 8
WARM_UP = 8
BOTTOM, TOP = [64, 16], [256, 64, 1]
SYSTEMS = ("trainer", "loop", "bare", "observed")
CASES = {
    "trainer": ("Criteo-like Parquet file: persia train against a loop over batches in memory", "trainer", "loop", 0.9),
    "safeguards": ("a loop over batches in memory: with the safeguards against without", "loop", "bare", 0.98),
    "observed": ("a loop over batches in memory: with metrics and logs against without", "observed", "loop", 0.99),
}
"""Each case by its name: the title, the system, the one that it is compared with, and the ratio to be reached."""

SCRAPE_S = 5.0
"""Seconds between two scrapes, as ``services/monitor/prometheus.yml`` has it."""
SCRAPES = """
import sys, time, urllib.request
while True:
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=5) as answer, open(sys.argv[2], "ab") as file:
            file.write(b"1" if b"persia_trainer_steps_total" in answer.read() else b"")
        time.sleep(float(sys.argv[3]))
    except OSError:  # the port is not open yet
        time.sleep(0.1)
"""
"""Another process that reads the metrics. It writes a byte to a file for each scrape."""
_reports = get_logger(REPORTS)


def config(folder: Path) -> Path:
    """Write the persia.yml of the case."""
    features = "\n".join(
        [
            *(f"  {name}: {{type: id, dim: 16}}" for name in data.STRINGS),
            *(f"  {name}: {{type: dense, log1p: true, standardise: true}}" for name in data.NUMBERS),
        ]
    )
    path = folder / "persia.yml"
    path.write_text(
        f"data: {{train: clicks.parquet, split: {{fractions: [1, 0, 0]}}, batch_size: {data.BATCH}, epochs: 1000}}\n"
        f"features:\n{features}\n"
        "labels:\n  label:\n"
        f"model: {{name: dlrm, bottom_mlp: {BOTTOM}, top_mlp: {TOP}}}\n"
        "train:\n  staleness: 4\n  embedding_optimizer: {name: adagrad, lr: 0.01}\n"
        "  dense_optimizer: {name: adam, lr: 0.001}\n"
        f"run: {{log_every: {STEPS_A_READING}}}\n",
        encoding="utf-8",
    )
    return path


class Cycle(IterableDataset):
    """Batches in memory, repeated without end."""

    def __init__(self, batches: list[PersiaBatch]) -> None:
        super().__init__()
        self.batches = batches

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches."""
        yield from itertools.cycle(self.batches)


def loop_steps(table: pa.Table, config: Config) -> Iterator[None]:
    """Train as a script does, yielding at each reading."""
    transform = config.compiled.fit(table)
    starts = range(0, len(table) - data.BATCH + 1, data.BATCH)
    batches = [to_batch(transform(table.slice(start, data.BATCH))) for start in starts]
    model, loss_fn = DLRM(data.DENSE, data.SPARSE, 16, bottom_mlp=BOTTOM, top_mlp=TOP), torch.nn.BCEWithLogitsLoss()
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = EmbeddingConfig((-0.05, 0.05))
    with TrainCtx(
        Adagrad(0.01),
        dense_optimizer,
        mixed_precision=False,
        model=model,
        embedding_config=rows,
        configuration=slots_of(config),
    ) as ctx:
        for step, batch in enumerate(DataLoader(Cycle(batches), embedding_staleness=4), start=1):
            output, labels = ctx.forward(batch)
            loss = loss_fn(output, labels[0])
            ctx.backward(loss)
            if step % STEPS_A_READING == 0:
                _reports.info("step", extra={"step": step, "loss": round(loss.item(), 6), "rank": 0})
                yield


def trainer_steps(config: Config) -> Iterator[None]:
    """Train as ``persia train`` does, yielding at each report."""
    with persia.Trainer(config) as trainer:
        for _ in trainer.fit():
            yield


def remove_safeguards() -> None:
    """Disable the safeguards in this process."""
    backward.__dict__.update(_first_nonfinite_tensor=lambda *_, **__: None, _total_norm=lambda _: None)
    call: Any = flight.Call
    call.__enter__, call.__exit__ = lambda self: self, lambda *_: None


@contextlib.contextmanager
def observed(folder: Path) -> Iterator[None]:
    """Serve the metrics of contexts in the block, let another process read them, and keep the log as JSON.

    Raises:
        RuntimeError: No scrape contained the metrics of a context.
    """
    seen, address = folder / "scrapes", f"127.0.0.1:{find_free_port()}"
    os.environ["PERSIA_METRICS_LISTEN"] = address
    words = [sys.executable, "-c", SCRAPES, f"http://{address}/metrics", str(seen), str(SCRAPE_S)]
    with tempfile.TemporaryDirectory(dir=folder) as run, log_files.kept(Path(run)) as log:
        reader = subprocess.Popen(words)
        try:
            yield
        finally:
            reader.kill()
            reader.wait()
        if not log.read_text(encoding="utf-8") or not seen.exists() or not seen.read_bytes():
            raise RuntimeError(f"no scrape of http://{address}/metrics had metrics of a context, or {log} is empty")
    seen.unlink()


def reading(system: str, folder: Path, seconds: float) -> float:
    """Return samples per wall second of one system, under monitoring if the system is ``observed``."""
    with observed(folder) if system == "observed" else contextlib.nullcontext():
        return rate_of(system, folder, seconds)


def rate_of(system: str, folder: Path, seconds: float) -> float:
    """Return samples per wall second of one system, as the median over windows of steps."""
    torch.set_num_threads(1)
    loaded = persia.load_config(folder / "persia.yml")
    if system == "bare":
        remove_safeguards()
    if system != "trainer":
        steps = loop_steps(pa.parquet.read_table(folder / "clicks.parquet"), loaded)
    else:
        steps = trainer_steps(loaded)
    for _ in range(WARM_UP):
        next(steps)
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 7:
        start = time.perf_counter()
        next(steps)
        rates.append(STEPS_A_READING * data.BATCH / (time.perf_counter() - start))
    steps.close()  # type: ignore[attr-defined]  # the iterator is a generator
    return statistics.median(rates)


def measured(system: str, folder: Path, seconds: float) -> float:
    """Return the samples per wall second that a separate process measures."""
    command = [sys.executable, __file__, "--system", system, "--folder", str(folder), "--seconds", str(seconds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print a JSON line for each case, and its ratio in each turn of readings to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each reading")
    parser.add_argument("--turns", type=int, default=3, help="readings of each system")
    parser.add_argument("--only", choices=CASES, help="this case")
    parser.add_argument("--rows", type=int, default=1 << 18, help="of the file")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["LOG_LEVEL"] = "WARNING"
    if arguments.system is not None:
        print(json.dumps(reading(arguments.system, arguments.folder, arguments.seconds)))
        return
    cases = [case for name, case in CASES.items() if arguments.only in (None, name)]
    systems = [system for system in SYSTEMS if any(system in case for case in cases)]
    with tempfile.TemporaryDirectory(prefix="persia-") as name:
        folder = Path(name)
        data.write(data.criteo_like(arguments.rows, seed=7), folder / "clicks.parquet")
        config(folder)
        found: dict[str, list[float]] = {system: [] for system in systems}
        for _ in range(arguments.turns):
            for system in systems:
                found[system].append(measured(system, folder, arguments.seconds))
    for case, system, reference, target in cases:
        ratios = [figures.ratio(one, other) for one, other in zip(found[system], found[reference], strict=True)]
        listed = ", ".join(f"{each:.3f}" for each in ratios)
        sys.stderr.write(f"{case}: ratio of each turn {listed}; median {statistics.median(ratios):.3f}\n")
        value, peer = statistics.median(found[system]), statistics.median(found[reference])
        figures.write(
            {
                "id": "B5",
                "case": case,
                "value": round(value),
                "unit": "samples/s",
                "peer": round(peer),
                "ratio": round(figures.ratio(value, peer), 3),
                "target": target,
                "spread": round(figures.spread(found[system]), 3),
            }
        )


if __name__ == "__main__":
    main()
