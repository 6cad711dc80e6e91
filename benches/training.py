"""B5: samples per second of a complete DLRM training loop, one JSON line per case.

Four systems train the same model on the same batches, with Adagrad for rows and Adam for the model. ``persia`` has the
rows in this process. ``stack`` has them on one server of this host, behind one middleware. ``plain`` uses
``torch.nn.EmbeddingBag(sparse=True)``, with ids that are numbered beforehand. In ``dense``, every embedding is a
constant, which is the upper bound of any embedding system. Each system is measured with one torch thread and with as
many as there are cores. The better result counts.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import figures
import numpy as np
import numpy.typing as npt
import torch
from loopback_step import job

from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.models import DLRM

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "dlrm"))
import census

LEARNING_RATE = 0.01
BATCHES = 32
STEPS_A_READING = 8


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        name: The name in the figures.
        dim: The dim of every embedding.
        mlp: The hidden layers of the top MLP.
        dense: ``[batches, batch, columns]``.
        ids: ``[batches, slots, batch]``, numbered from 0 in each slot.
        labels: ``[batches, batch, 1]``.
    """

    name: str
    dim: int
    mlp: tuple[int, ...]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.ids[0])

    def model(self) -> DLRM:
        """Return the model, always with the same weights."""
        torch.manual_seed(0)
        columns = self.dense.shape[2]
        return DLRM(columns, self.slots, self.dim, bottom_mlp=[64, self.dim], top_mlp=[*self.mlp, 1])


def census_case() -> Case:
    """Return the case of the example: 45 slots with few ids each, batch 1,024."""
    samples, _ = census.training_data(census.DATA)
    rows = np.random.default_rng(0).permutation(len(samples))[: BATCHES * census.BATCH_SIZE]
    numbered = [np.unique(column, return_inverse=True)[1] for column in samples.ids[:, rows]]
    shape = (BATCHES, census.BATCH_SIZE)
    return Case(
        "Census-Income, 45 slots, dim 16",
        16,
        (256, 64),
        samples.dense[rows].reshape(*shape, -1),
        np.stack(numbered).reshape(len(numbered), *shape).swapaxes(0, 1).astype(np.int64),
        samples.labels[rows].reshape(*shape, 1),
    )


def criteo_case(dim: int) -> Case:
    """Return a case of Criteo's shape: 13 dense inputs, 26 slots, 10⁶ ids in all (Zipf, exponent 1.05), batch 4,096."""
    rng, batch, slots, ids = np.random.default_rng(0), 4_096, 26, 1_000_000 // 26
    weights = np.arange(1, ids + 1) ** -1.05
    cumulative = np.cumsum(weights) / weights.sum()
    drawn = np.searchsorted(cumulative, rng.random((BATCHES, slots, batch))).clip(0, ids - 1)
    return Case(
        f"synthetic Criteo, 26 slots, dim {dim}, 10⁶ ids",
        dim,
        (256, 64),
        rng.standard_normal((BATCHES, batch, 13), dtype=np.float32),
        rng.permutation(ids)[drawn],
        rng.integers(0, 2, (BATCHES, batch, 1)).astype(np.float32),
    )


class Cycle(IterableDataset):
    """The batches of the case, repeated without end."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches. Ids of different slots differ, as in the example."""
        case = self.case
        for number in itertools.count():
            at = number % BATCHES
            yield PersiaBatch(
                [
                    IDTypeFeatureWithSingleID(f"s{slot}", (ids + (slot << 40)).astype(np.uint64))
                    for slot, ids in enumerate(case.ids[at])
                ],
                non_id_type_features=[NonIDTypeFeature(case.dense[at], name="dense")],
                labels=[Label(case.labels[at], name="label")],
            )


def persia_steps(case: Case) -> Iterator[None]:
    """Train, one step at a time."""
    model, loss_fn = case.model(), torch.nn.BCEWithLogitsLoss()
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with TrainCtx(Adagrad(LEARNING_RATE), dense_optimizer, mixed_precision=False, model=model) as ctx:
        for batch in DataLoader(Cycle(case), embedding_staleness=4):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            yield


def torch_steps(case: Case, *, sparse: bool) -> Iterator[None]:
    """Train with torch alone, or only the dense part of the model."""
    model, loss_fn = case.model(), torch.nn.BCEWithLogitsLoss()
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(int(case.ids[:, slot].max()) + 1, case.dim, mode="sum", sparse=True)
        for slot in range(case.slots if sparse else 0)
    )
    row_optimizer = torch.optim.Adagrad(bags.parameters(), lr=LEARNING_RATE) if sparse else None
    constant = [torch.randn(case.labels.shape[1], case.dim) * 0.01 for _ in range(case.slots)]
    batches = [[torch.from_numpy(part[at]) for part in (case.dense, case.ids, case.labels)] for at in range(BATCHES)]
    for number in itertools.count():
        dense, ids, labels = batches[number % BATCHES]
        vectors = [bag(ids[slot][:, None]) for slot, bag in enumerate(bags)] if sparse else constant
        loss = loss_fn(model([dense], vectors), labels)
        dense_optimizer.zero_grad()
        bags.zero_grad()
        loss.backward()
        dense_optimizer.step()
        if row_optimizer is not None:
            row_optimizer.step()
        yield


def rate(steps: Iterator[None], samples: int, seconds: float) -> tuple[float, float]:
    """Return samples per wall second, as the median of readings, and half of their interquartile range over it."""
    for _ in range(2 * BATCHES):  # so that every row exists
        next(steps)
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 7:
        start = time.perf_counter()
        for _ in range(STEPS_A_READING):
            next(steps)
        rates.append(STEPS_A_READING * samples / (time.perf_counter() - start))
    return statistics.median(rates), figures.spread(rates)


def config(folder: Path, case: Case) -> None:
    """Write the slots to the file from which contexts read them."""
    path = folder / "embedding_config.yml"
    slots = "".join(f"  s{slot}: {{dim: {case.dim}}}\n" for slot in range(case.slots))
    path.write_text(f"feature_index_prefix_bit: 0\nslots_config:\n{slots}", encoding="utf-8")
    os.environ["PERSIA_EMBEDDING_CONFIG"] = str(path)


def run(case: Case, seconds: float, threads: int) -> None:
    """Measure one case in all systems, alternately, so all run under the same conditions."""
    samples = case.labels.shape[1]
    rates: dict[str, list[tuple[float, float]]] = {}
    systems: dict[str, Callable[[], Iterator[None]]] = {
        "dense": lambda: torch_steps(case, sparse=False),
        "plain": lambda: torch_steps(case, sparse=True),
        "persia": lambda: persia_steps(case),
        "stack": lambda: persia_steps(case),
    }
    # The engine's threads share the cores with torch's. The best number differs, so each system is measured with both.
    for torch_threads in (1, threads):
        for system, steps in systems.items():
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="persia-")))
                config(folder, case)
                if system == "stack":
                    stack.enter_context(job(folder, tcp=False))
                torch.set_num_threads(torch_threads)
                running = steps()
                stack.callback(running.close)  # type: ignore[attr-defined]  # the iterator is a generator
                rates.setdefault(system, []).append(rate(running, samples, seconds / 2))
    best = {system: max(pair) for system, pair in rates.items()}
    embedding_share = 1 - figures.ratio(best["plain"][0], best["dense"][0])
    targets = {
        ("persia", "dense"): 0.85,
        ("persia", "plain"): 2.0 if embedding_share > 0.6 else 1.1,
        ("stack", "persia"): 0.7,
    }
    for (system, peer), target in targets.items():
        record: figures.Record = {
            "id": "B5",
            "case": f"{case.name}: {system} against {peer}",
            "value": round(best[system][0]),
            "unit": "samples/s",
            "peer": round(best[peer][0]),
            "ratio": round(figures.ratio(best[system][0], best[peer][0]), 3),
            "target": target,
            "spread": round(best[system][1], 3),
        }
        figures.write(record)


CASES: dict[str, Callable[[], Case]] = {
    "census": census_case,
    "criteo-16": lambda: criteo_case(16),
    "criteo-64": lambda: criteo_case(64),
}
"""By name on the command line."""


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each system and case")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch's, for the peers")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES))
    arguments = parser.parse_args()
    os.environ["LOG_LEVEL"] = "WARNING"
    for name in arguments.cases:
        run(CASES[name](), arguments.seconds, arguments.threads)


if __name__ == "__main__":
    main()
