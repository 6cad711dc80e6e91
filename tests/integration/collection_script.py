"""A loop of the user's own around EmbeddingCollection, on one rank or under DDP; the result is written to ``out``."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import TinyModel

from persia import env
from persia.embedding import EmbeddingCollection, EmbeddingConfig, TableConfig
from persia.embedding.optim import SGD

PLAN: dict[str, Any] = json.loads(sys.argv[1])
RANK, WORLD = env.get_rank(), env.get_world_size()
STEPS, BATCH, IDS = 20, 32, 200


def read(tables: EmbeddingCollection) -> dict[str, torch.Tensor]:
    """Return the rows of all ids, behind every push of this rank."""
    with torch.no_grad():
        found: dict[str, torch.Tensor] = tables({"a": torch.arange(IDS), "b": torch.arange(IDS)})
    return found


def main() -> None:
    """Train, and write rows and weights."""
    torch.manual_seed(1)
    model: torch.nn.Module = TinyModel()
    tables = EmbeddingCollection(
        [TableConfig("a", 4, ["a"]), TableConfig("b", 4, ["b"])], SGD(0.1), EmbeddingConfig((-0.1, 0.1))
    )
    whole = torch.nn.parallel.DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = slice(RANK * BATCH // WORLD, (RANK + 1) * BATCH // WORLD)
    for number in range(STEPS):
        rng = np.random.default_rng([7, number])
        a, b = rng.integers(0, IDS, (2, BATCH))
        dense = torch.from_numpy(rng.standard_normal((BATCH, 3), dtype=np.float32)[mine])
        label = torch.from_numpy((a % 3 == 0).astype(np.float32)[mine, None])
        vectors = tables({"a": a[mine].copy(), "b": b[mine].copy()})
        output = whole([dense], [*vectors.values()])
        torch.autograd.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, label))
        optimizer.step()
        optimizer.zero_grad()
    assert tables.step == STEPS
    rows = read(tables)
    if WORLD > 1:  # the other ranks' pushes are applied by now, too
        torch.distributed.barrier()
        rows = read(tables)
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in rows.items()}
    arrays |= {f"dense{index}": p.detach().numpy() for index, p in enumerate(model.parameters())}
    if RANK == 0:
        np.savez(PLAN["out"], **arrays)
    if WORLD > 1:
        torch.distributed.barrier()
    tables.close()


if __name__ == "__main__":
    main()
