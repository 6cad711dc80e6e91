"""B12: DLRM at batch 512 on data of the shape of Criteo Kaggle, compared with FBGEMM on the CPU. Prints JSON lines.

The data is synthetic: 13 dense inputs, and 26 slots with the numbers of ids of Criteo Kaggle, 33.8 million in all. The
dim is 16, the MLPs are 512-256-64-16 and 512-256-1. Ids are drawn by Zipf's law with exponent 1.05. The model is the
same in all systems, and Adam trains it. The systems are:

* ``persia``: rows in this process
* ``fbgemm``: the table-batched embedding that torchrec uses on a CPU, with fused Adagrad, fixed arrays, and ids that
  are numbered beforehand. It runs in the environment of the peers, which has no ``persia``.
* ``plain``: ``torch.nn.EmbeddingBag(sparse=True)`` with ``torch.optim.Adagrad``
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import figures
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

BATCH = 512
BATCHES = 128
DENSE = 13
DIM = 16
BOTTOM = (DENSE, 512, 256, 64, DIM)
TOP = (512, 256, 1)
LEARNING_RATE = 0.01
STEPS_A_READING = 16
SIZES = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""The number of ids of each slot of Criteo Kaggle."""

Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32]]


def batches() -> list[Batch]:
    """Return dense inputs ``[batch, 13]``, ids ``[slots, batch]`` below ``SIZES``, and labels ``[batch, 1]``."""
    rng, samples = np.random.default_rng(0), BATCHES * BATCH
    ids = np.empty((len(SIZES), samples), np.int64)
    for slot, size in enumerate(SIZES):
        cumulative = np.cumsum(np.arange(1, size + 1) ** -1.05)
        drawn = np.searchsorted(cumulative, rng.random(samples) * cumulative[-1]).clip(0, size - 1)
        ids[slot] = rng.permutation(size)[drawn]
    dense = rng.standard_normal((samples, DENSE), dtype=np.float32)
    labels = rng.integers(0, 2, (samples, 1)).astype(np.float32)
    parts = [slice(at, at + BATCH) for at in range(0, samples, BATCH)]
    return [(dense[part], np.ascontiguousarray(ids[:, part]), labels[part]) for part in parts]


def mlp(sizes: tuple[int, ...]) -> nn.Sequential:
    """Return linear layers with a ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Network(nn.Module):
    """DLRM without its tables."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        vectors = len(SIZES) + 1
        rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        self.bottom = mlp(BOTTOM)
        self.top = mlp((DIM + len(rows), *TOP))

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits, ``[batch, 1]``.

        Args:
            dense: One tensor ``[batch, 13]``.
            embeddings: One tensor ``[batch, slots, dim]``, or one ``[batch, dim]`` for each slot.
        """
        bottom = torch.relu(self.bottom(dense[0]))
        slots = embeddings[0] if len(embeddings) == 1 else torch.stack(embeddings, dim=1)
        vectors = torch.cat([bottom.unsqueeze(1), slots], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits: torch.Tensor = self.top(torch.cat([bottom, products.index_select(1, self.get_buffer("pairs"))], dim=1))
        return logits


Look = Callable[[torch.Tensor], list[torch.Tensor]]


def torch_steps(look_up: Look, update: Callable[[], object], made: list[Batch]) -> Iterator[None]:
    """Train with tables of torch, one step at a time."""
    model, loss_fn = Network(), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tensors = [tuple(map(torch.from_numpy, batch)) for batch in made]
    for dense, ids, labels in itertools.cycle(tensors):
        loss = loss_fn(model([dense], look_up(ids)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update()
        yield


def fbgemm_steps(made: list[Batch]) -> Iterator[None]:
    """Train with FBGEMM's tables, whose update is part of the backward pass."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(size, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in SIZES],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    tables.init_embedding_weights_uniform(-0.05, 0.05)
    offsets = torch.arange(len(SIZES) * BATCH + 1)

    def look_up(ids: torch.Tensor) -> list[torch.Tensor]:
        return [tables(ids.reshape(-1), offsets).view(BATCH, len(SIZES), DIM)]

    return torch_steps(look_up, lambda: None, made)


def plain_steps(made: list[Batch]) -> Iterator[None]:
    """Train with one ``nn.EmbeddingBag`` for each slot."""
    bags = nn.ModuleList(nn.EmbeddingBag(size, DIM, mode="sum", sparse=True) for size in SIZES)
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=LEARNING_RATE)

    def look_up(ids: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad()
        return [bag(one[:, None]) for bag, one in zip(bags, ids, strict=True)]

    return torch_steps(look_up, optimizer.step, made)


def persia_steps(made: list[Batch]) -> Iterator[None]:
    """Train with rows of the embedded store."""
    from persia.ctx import TrainCtx
    from persia.data import DataLoader, IterableDataset
    from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
    from persia.embedding.optim import Adagrad

    class Cycle(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            for dense, ids, labels in itertools.cycle(made):
                features = [
                    IDTypeFeatureWithSingleID(f"s{slot}", (one + (slot << 40)).astype(np.uint64))
                    for slot, one in enumerate(ids)
                ]
                inputs = [NonIDTypeFeature(dense, name="dense")]
                yield PersiaBatch(features, non_id_type_features=inputs, labels=[Label(labels, name="label")])

    with tempfile.TemporaryDirectory(prefix="persia-") as folder:
        config = Path(folder) / "embedding_config.yml"
        slots = "".join(f"  s{slot}: {{dim: {DIM}}}\n" for slot in range(len(SIZES)))
        config.write_text(f"feature_index_prefix_bit: 0\nslots_config:\n{slots}", encoding="utf-8")
        os.environ["PERSIA_EMBEDDING_CONFIG"] = str(config)
        model, loss_fn = Network(), nn.BCEWithLogitsLoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        with TrainCtx(Adagrad(LEARNING_RATE), optimizer, mixed_precision=False, model=model) as ctx:
            for batch in DataLoader(Cycle(), embedding_staleness=4):
                output, labels = ctx.forward(batch)
                ctx.backward(loss_fn(output, labels[0]))
                yield


SYSTEMS: dict[str, Callable[[list[Batch]], Iterator[None]]] = {
    "persia": persia_steps,
    "fbgemm": fbgemm_steps,
    "plain": plain_steps,
}
"""By name on the command line."""


def measure(system: str, made: list[Batch], seconds: float) -> None:
    """Print medians of readings: samples per CPU-second of all threads of this process, and samples per second."""
    steps = SYSTEMS[system](made)
    for _ in range(2 * BATCHES):  # so that every row exists
        next(steps)
    cpu: list[float] = []
    wall: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(cpu) < 7:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(STEPS_A_READING):
            next(steps)
        samples = STEPS_A_READING * BATCH
        cpu.append(figures.ratio(samples, time.process_time() - cpu_start))
        wall.append(figures.ratio(samples, time.perf_counter() - wall_start))
    steps.close()  # type: ignore[attr-defined]  # the iterator is a generator
    figures.write(
        {
            "system": system,
            "samples_per_cpu_s": round(statistics.median(cpu)),
            "samples_per_s": round(statistics.median(wall)),
            "spread": round(figures.spread(cpu), 3),
        }
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each system")
    parser.add_argument("--threads", type=int, default=1, help="torch's")
    parser.add_argument("--systems", choices=SYSTEMS, nargs="+", default=["persia", "plain"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    made = batches()
    for system in arguments.systems:
        measure(system, made, arguments.seconds)


if __name__ == "__main__":
    main()
