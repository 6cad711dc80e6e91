"""Quality of optimizers and initial ranges: the AUC of a small model on one dataset, one line per setting.

The file is Parquet or CSV with a label of 0 and 1. The columns of ``--ids`` are features with one id per sample, those
of ``--bags`` are lists of ids. 70 % of the samples are the training set, 15 % the validation set and 15 % the test set.
A hash of the row number or of ``--group`` chooses the set. ``--samples`` limits the training set. Use the test set
(``--test``) only once.

A setting is ``SYSTEM,OPTIMIZER,LR,ACCUMULATOR,INIT``:

* SYSTEM: ``persia`` is EmbeddingCollection, ``torch`` is sparse nn.EmbeddingBag with torch's optimizers
* OPTIMIZER: ``adagrad``, ``rowwise`` (Adagrad with one accumulator per row) or ``adam``
* INIT: new weights are uniform in ±INIT. ``dim`` means 1/√dim, ``default`` means the system's default.

``--grid`` adds a grid of settings.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad, Adam
from persia.nn import EmbeddingCollection, TableConfig

Ints = npt.NDArray[np.int64]
Lookup = Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]

RATES, STARTS, INITS = (0.01, 0.03, 0.1), (0.1, 1e-2, 1e-4, 1e-6, 1e-8), (0.01, 0.05, 0.25)
GRID = [f"persia,adagrad,{lr},{start},{init}" for init in INITS for lr in RATES for start in STARTS]
GRID += [f"persia,adam,{lr / 10:g},0,{init}" for init in INITS for lr in RATES]


@dataclass
class Data:
    """Samples: their labels, dense inputs in standard units, and ids.

    All features use one table. No two features have an id in common. This is equivalent to a table for each feature,
    and faster. With F features, bag ``n * F + f``, the ids between two offsets, is feature f of sample n.
    """

    labels: torch.Tensor
    dense: torch.Tensor
    parts: dict[str, Ints]
    features: int
    ids: Ints
    offsets: Ints

    def bags(self, samples: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and offsets of a batch, sample after sample."""
        bags = (samples[:, None] * self.features + np.arange(self.features)).ravel()
        lengths = self.offsets[bags + 1] - self.offsets[bags]
        ends = lengths.cumsum()
        places = np.arange(ends[-1]) + np.repeat(self.offsets[bags] - ends + lengths, lengths)
        return torch.from_numpy(self.ids[places]), torch.from_numpy(np.concatenate([[0], ends]))


def _mix(keys: Ints) -> npt.NDArray[np.float64]:
    """Return a hash of each key in [0, 1), by the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.float64) / 2.0**64


def _numbers(column: pa.ChunkedArray) -> Ints:
    return np.asarray(column.combine_chunks().dictionary_encode("encode").indices, dtype=np.int64)


def read(options: argparse.Namespace) -> Data:
    """Read a table and split it."""
    table = pq.read_table(options.file) if options.file.suffix == ".parquet" else pa.csv.read_csv(options.file)
    rows = table.num_rows
    place = _mix(_numbers(table[options.group]) if options.group else np.arange(rows))
    order = np.argsort(place, kind="stable")
    parts = {
        "train": order[: min(options.samples, np.count_nonzero(place < 0.7))],
        "valid": np.flatnonzero((place >= 0.7) & (place < 0.85)),
        "test": np.flatnonzero(place >= 0.85),
    }
    columns = [pc.fill_null(table[name].cast(pa.float32()), 0.0).to_numpy() for name in options.dense]
    dense = np.sign(inputs := np.stack([np.zeros(rows), *columns], 1)) * np.log1p(np.abs(inputs))
    train = dense[parts["train"]]
    dense = (dense - train.mean(0)) / np.maximum(train.std(0), 1e-6)
    lengths = [np.ones(rows, np.int64) for _ in options.ids]
    lengths += [pc.fill_null(pc.list_value_length(table[name]), 0).to_numpy() for name in options.bags]
    offsets = np.concatenate([[0], np.stack(lengths, 1).ravel().cumsum()])
    ids, first = np.empty(offsets[-1], np.int64), 0
    columns = [table[name] for name in options.ids] + [pc.list_flatten(table[name]) for name in options.bags]
    for number, (column, length) in enumerate(zip(columns, lengths, strict=True)):
        starts = offsets[number : -1 : len(columns)]
        within = np.arange(length.sum()) - np.repeat(length.cumsum() - length, length)
        ids[np.repeat(starts, length) + within] = first + (numbers := _numbers(column))
        first += numbers.max() + 1
    labels, dense = table[options.label].to_numpy().astype(np.float32), dense.astype(np.float32)
    return Data(torch.from_numpy(labels), torch.from_numpy(dense), parts, len(columns), ids, offsets)


class Model(torch.nn.Module):
    """An MLP over dense inputs and pooled embeddings; with ``dlrm`` also over the dot products of all pairs."""

    def __init__(self, features: int, dense: int, dim: int, pairs: bool) -> None:
        super().__init__()
        self.pairs = torch.triu_indices(features, features, 1) if pairs else None
        inputs = dense + features * dim + (features * (features - 1) // 2 if pairs else 0)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(inputs, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return logits ``[batch]`` of vectors ``[batch, features, dim]``."""
        parts = [dense, vectors.flatten(1)]
        if self.pairs is not None:
            parts.append((vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]])
        return self.mlp(torch.cat(parts, 1)).squeeze(1)  # type: ignore[no-any-return]


def open_table(data: Data, setting: str, dim: int) -> tuple[Lookup, list[torch.optim.Optimizer], Callable[[], None]]:
    """Return the look-up of a setting, the optimizers that the loop steps, and the function to call at the end."""
    system, kind, lr, accumulator, init = setting.split(",")
    rate, bound = float(lr), 0.0 if init == "default" else dim**-0.5 if init == "dim" else float(init)
    if system == "persia":
        rows = Adam(rate) if kind == "adam" else Adagrad(rate, float(accumulator), vectorwise_shared=kind == "rowwise")
        config = None if init == "default" else EmbeddingConfig((-bound, bound))
        collection = EmbeddingCollection([TableConfig("all", dim, ["all"])], rows, config)
        return lambda bags: collection({"all": bags})["all"], [], collection.close
    table = torch.nn.EmbeddingBag(int(data.ids.max()) + 1, dim, mode="sum", sparse=True, include_last_offset=True)
    if init != "default":
        torch.nn.init.uniform_(table.weight, -bound, bound)
    kinds = {"adam": torch.optim.SparseAdam, "adagrad": torch.optim.Adagrad}  # torch's accumulators start at 0
    return lambda bags: table(*bags), [kinds[kind](table.parameters(), rate)], lambda: None


def auc(labels: npt.NDArray[np.float32], scores: npt.NDArray[np.float32]) -> float:
    """Return the area under the ROC curve. Equal scores count as one half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[inverse]
    positives = labels.sum()
    return float((ranks[labels == 1].sum() - positives * (positives + 1) / 2) / positives / (len(labels) - positives))


def aucs(data: Data, setting: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Train one model. Return the AUC after each epoch on the validation set or the test set."""
    torch.manual_seed(seed)
    model = Model(data.features, data.dense.shape[1], options.dim, options.model == "dlrm")
    lookup, optimizers, close = open_table(data, setting, options.dim)
    optimizers.append(torch.optim.Adam(model.parameters()))
    loss_fn = torch.nn.BCEWithLogitsLoss(reduction=options.reduction)
    order, scored, results = np.random.default_rng(seed), data.parts["test" if options.test else "valid"], []

    def logits(samples: Ints) -> torch.Tensor:
        vectors = lookup(data.bags(samples)).view(len(samples), data.features, options.dim)
        return model(data.dense[samples], vectors)  # type: ignore[no-any-return]

    for _ in range(options.epochs):
        samples_of_epoch = order.permutation(data.parts["train"])
        for samples in np.split(samples_of_epoch, range(options.batch, len(samples_of_epoch), options.batch)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_fn(logits(samples), data.labels[samples]).backward()
            for optimizer in optimizers:
                optimizer.step()
        with torch.no_grad():
            scores = torch.cat([logits(samples) for samples in np.array_split(scored, 10)])
        results.append(auc(data.labels[scored].numpy(), scores.numpy()))
    close()
    return results


def main() -> None:
    """For each setting, print the mean and the standard deviation over seeds of the AUC after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--label", default="label")
    for name in ("--ids", "--bags", "--dense"):
        parser.add_argument(name, default=[], type=lambda text: text.split(","))
    parser.add_argument("--group", help="column whose values are not divided between parts")
    parser.add_argument("--setting", action="append", default=[])
    for name in ("--grid", "--test"):
        parser.add_argument(name, action="store_true")
    for name, choices in (("--model", ["mlp", "dlrm"]), ("--reduction", ["mean", "sum"])):
        parser.add_argument(name, choices=choices, default=choices[0])
    for name, default in (("samples", 50_000), ("epochs", 3), ("batch", 256), ("dim", 16), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = read(options)
    print("#", options.file.name, *(f"{name}={len(part)}" for name, part in data.parts.items()), flush=True)
    for setting in [*options.setting, *(GRID if options.grid else [])]:
        start = time.monotonic()
        runs = [aucs(data, setting, seed, options) for seed in range(options.seeds)]
        shown = [f"{statistics.mean(epoch):.4f}±{statistics.pstdev(epoch):.4f}" for epoch in zip(*runs, strict=True)]
        print(f"{setting:34}", *shown, f"{(time.monotonic() - start) / options.seeds:.1f}s", flush=True)


if __name__ == "__main__":
    main()
