"""B5 through ``persia train``: samples per second of a Trainer that reads a file, and of a loop over batches in memory.

Both train the same DLRM (26 slots of dim 16, 13 dense inputs, batch 4,096) on the same rows. The ``trainer`` reads a
Parquet file, transforms and shuffles it, and reports. The ``loop`` is that of a script: TrainCtx and a DataLoader over
batches that were transformed before. ``bare`` is the loop without the safeguards that are always on: the check that
loss and gradients are finite, the norm of the gradient, and the flight recorder. Each reading is made in a separate
process; the systems take turns.
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
from persia.runtime import flight
from persia.trainer.models import slots_of

STEPS_A_READING = 8
WARM_UP = 8
BOTTOM, TOP = [64, 16], [256, 64, 1]
TURNS = 3
SYSTEMS = ("trainer", "loop", "bare")


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
            ctx.backward(loss_fn(output, labels[0]))
            if step % STEPS_A_READING == 0:
                yield


def trainer_steps(config: Config) -> Iterator[None]:
    """Train as ``persia train`` does, yielding at each report."""
    with persia.Trainer(config) as trainer:
        for _ in trainer.fit():
            yield


def remove_safeguards() -> None:
    """Take the safeguards out of this process."""
    backward.__dict__.update(_first_nonfinite_tensor=lambda *_, **__: None, _total_norm=lambda _: None)
    call: Any = flight.Call
    call.__enter__, call.__exit__ = lambda self: self, lambda *_: None


def reading(system: str, folder: Path, seconds: float) -> float:
    """Return samples per wall second of one system: the median of its readings."""
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
    steps.close()  # type: ignore[attr-defined]  # it is a generator
    return statistics.median(rates)


def measured(system: str, folder: Path, seconds: float) -> float:
    """Return the reading of a separate process."""
    command = [sys.executable, __file__, "--system", system, "--folder", str(folder), "--seconds", str(seconds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print two JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each reading")
    parser.add_argument("--rows", type=int, default=1 << 18, help="of the file")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["LOG_LEVEL"] = "WARNING"
    if arguments.system is not None:
        print(json.dumps(reading(arguments.system, arguments.folder, arguments.seconds)))
        return
    with tempfile.TemporaryDirectory(prefix="persia-") as name:
        folder = Path(name)
        data.write(data.criteo_like(arguments.rows, seed=7), folder / "clicks.parquet")
        config(folder)
        found: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for _ in range(TURNS):
            for system in SYSTEMS:
                found[system].append(measured(system, folder, arguments.seconds))
    for case, system, reference, target in (
        ("Criteo-like Parquet file: persia train against a loop over batches in memory", "trainer", "loop", 0.9),
        ("a loop over batches in memory: with the safeguards against without", "loop", "bare", 0.98),
    ):
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
