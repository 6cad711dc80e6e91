"""The data and the model of a ledger run, and the expected value of each row. As a script, it sends the data."""

import json
import sys
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt
import torch

from persia.ctx import DataCtx
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch

DIM = 4
SAMPLES = 16
SLOTS = {"one": 300, "many": 200}
"""The slots, and the number of ids of each."""


def ids(number: int) -> tuple[npt.NDArray[np.uint64], list[npt.NDArray[np.uint64]]]:
    """Return the ids of batch ``number``: one per sample, and up to four per sample, some of them twice."""
    rng = np.random.default_rng([3, number])
    one = rng.integers(0, SLOTS["one"], SAMPLES, dtype=np.uint64)
    many = [rng.integers(0, SLOTS["many"], rng.integers(0, 5), dtype=np.uint64) for _ in range(SAMPLES)]
    return one, many


POISON = b"poison"
"""The ``meta`` of a batch at which training always fails."""


def batches(count: int, twice: int | None = None, poison: int | None = None) -> Iterator[PersiaBatch]:
    """Yield the batches of a run.

    Batch ``twice`` also replaces the batch after it, which the ledger must detect. Training fails at batch ``poison``.
    """
    dense, label = np.zeros((SAMPLES, 1), np.float32), np.zeros((SAMPLES, 1), np.float32)
    for number in range(count):
        one, many = ids(number - (twice is not None and number == twice + 1))
        yield PersiaBatch(
            [IDTypeFeatureWithSingleID("one", one), IDTypeFeature("many", many)],
            [NonIDTypeFeature(dense)],
            [Label(label)],
            meta=POISON if number == poison else None,
        )


def expected(count: int, without: Collection[int] = ()) -> dict[str, npt.NDArray[np.int64]]:
    """Return how often each id of each slot occurs in the first ``count`` batches, except those in ``without``."""
    counts = {slot: np.zeros(size, np.int64) for slot, size in SLOTS.items()}
    for number in sorted(set(range(count)).difference(without)):
        one, many = ids(number)
        np.add.at(counts["one"], one.astype(np.int64), 1)
        np.add.at(counts["many"], np.concatenate(many).astype(np.int64), 1)
    return counts


class Sum(torch.nn.Module):
    """Adds all embeddings up. Its one weight counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.nn.Parameter(torch.zeros(1))

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return ``[1]``."""
        total = self.steps.sum()
        for tensor in embedding_tensors:
            total = total + tensor.sum()
        return total.reshape(1)


if __name__ == "__main__":
    with DataCtx() as ctx:
        for batch in batches(**json.loads(sys.argv[1])):
            ctx.send_data(batch)
