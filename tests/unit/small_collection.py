"""A small collection of two tables, a loop over it, and its rows."""

from typing import Any

import numpy as np
import torch
from conftest import TinyModel
from test_training import loss_fn

from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Optimizer
from persia.nn import EmbeddingCollection, TableConfig

IDS = 200
TABLES = [TableConfig("a", 4, ["a"]), TableConfig("b", 4, ["b"])]
Arrays = tuple[dict[str, Any], torch.Tensor, torch.Tensor]


def arrays(number: int) -> Arrays:
    """Return the features, dense inputs and labels of ``Batches(...).batch(number)``."""
    rng = np.random.default_rng([0, number])
    single = rng.integers(0, IDS, 32, dtype=np.uint64)
    lists = [rng.integers(0, IDS, rng.integers(0, 4), dtype=np.uint64) for _ in range(32)]
    dense = rng.standard_normal((32, 3), dtype=np.float32)
    label = ((single % 3 == 0) | (dense[:, 0] > 1)).astype(np.float32)[:, None]
    offsets = np.cumsum([0, *[len(each) for each in lists]])
    features = {"a": torch.from_numpy(single.astype(np.int64)), "b": (np.concatenate(lists), torch.from_numpy(offsets))}
    return features, torch.from_numpy(dense), torch.from_numpy(label)


def collection(optimizer: Optimizer | None = None, **kwargs: Any) -> EmbeddingCollection:
    return EmbeddingCollection(TABLES, optimizer or SGD(0.1), EmbeddingConfig((-0.1, 0.1)), **kwargs)


def step(model: TinyModel, tables: Any, dense_optimizer: torch.optim.Optimizer, number: int) -> float:
    """Run one step of a user loop."""
    features, dense, label = arrays(number)
    loss = loss_fn(model([dense], list(tables(features).values())), label)
    loss.backward()
    dense_optimizer.step()
    dense_optimizer.zero_grad()
    return float(loss.detach())


def rows(tables: EmbeddingCollection, count: int = IDS) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        found: dict[str, torch.Tensor] = tables({name: torch.arange(count) for name in ("a", "b")})
    return {name: tensor.clone() for name, tensor in found.items()}


def bits(tables: EmbeddingCollection, model: TinyModel) -> bytes:
    tensors = [*rows(tables).values(), *(parameter.detach() for parameter in model.parameters())]
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def fresh(seed: int = 1) -> tuple[TinyModel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = TinyModel()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Whole(torch.nn.Module):
    """A model with its tables inside."""

    def __init__(self, model: TinyModel, tables: EmbeddingCollection) -> None:
        super().__init__()
        self.model, self.tables = model, tables

    def forward(self, features: dict[str, Any], dense: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model([dense], list(self.tables(features).values()))
        return result
