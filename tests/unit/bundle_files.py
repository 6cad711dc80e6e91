"""A run with every type of feature and two labels, rows to score, and bundles of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from trainer_files import write_config

import persia
from persia.serving import Bundle
from persia.trainer import Trainer

FEATURES: dict[str, Any] = {
    "user": {"type": "id", "dim": 4, "ttl": 6},
    "site": {"type": "id", "lower": True, "dim": 4, "if_null": "skip"},
    "tags": {"type": "bag", "weights": "shares", "dim": 4},
    "topics": {"type": "bag", "separator": "|", "pooling": "mean", "dim": 4, "dtype": "f16"},
    "history": {"type": "sequence", "last": 3, "table": "item", "dim": 4},
    "item": {"type": "id", "dim": 4, "table": "item"},
    "age": {"type": "bucket", "quantiles": 6, "dim": 4},
    "hour": {"type": "date", "column": "at", "part": "hour", "dim": 4},
    "place": {"type": "cross", "features": ["site", "hour"], "dim": 4},
    "price": {"type": "dense", "log1p": True, "standardise": True, "missing": "mean"},
    "share": {"type": "dense", "clip": [0, 1]},
}
LABELS = {"clicked": {}, "spent": {"loss": "mse", "weight": 0.5}}
MODEL = {"name": "dcnv2", "cross_layers": 2, "deep_mlp": [16]}


def table_of(rows: int, seed: int, *, unseen: bool = False) -> pa.Table:
    """Return rows. With ``unseen``, a third have ids that no training row has, and a tenth lacks each value."""
    random = np.random.default_rng(seed)
    new = (random.random(rows) < 1 / 3) & unseen
    user = np.where(new, 10**12, 0) + random.integers(0, 200, rows)
    site = [
        f"{'New' if fresh else 'Site'}{number}" for fresh, number in zip(new, random.integers(0, 30, rows), strict=True)
    ]
    tags = [random.integers(0, 40, random.integers(0, 5)).tolist() for _ in range(rows)]
    shares = [random.random(len(each)).astype(np.float32).tolist() for each in tags]
    topics = ["|".join(f"t{number}" for number in random.integers(0, 25, random.integers(0, 4))) for _ in range(rows)]
    item = random.integers(0, 300, rows)
    history = [random.integers(0, 300, random.integers(0, 6)).tolist() for _ in range(rows)]
    age, price = random.integers(10, 90, rows), random.exponential(20.0, rows)
    effect = (user % 7 - 3) * 0.4 + (item % 5 - 2) * 0.5 + np.array([len(each) for each in tags]) * 0.1
    columns: dict[str, Any] = {
        "user": pa.array(user),
        "site": pa.array(site),
        "tags": pa.array(tags, pa.list_(pa.int64())),
        "shares": pa.array(shares, pa.list_(pa.float32())),
        "topics": pa.array(topics),
        "history": pa.array(history, pa.list_(pa.int64())),
        "item": pa.array(item),
        "age": pa.array(age),
        "at": pa.array(1_700_000_000_000_000 + random.integers(0, 10**12, rows), pa.timestamp("us")),
        "price": pa.array(price),
        "share": pa.array(random.random(rows).astype(np.float32)),
        "clicked": pa.array((random.random(rows) < 1 / (1 + np.exp(-effect))).astype(np.int64)),
        "spent": pa.array((effect + random.normal(0, 0.3, rows)).astype(np.float32)),
    }
    if unseen:
        for name in ("user", "site", "topics", "item", "age", "at", "price", "share", "history"):
            missing = pa.array(random.random(rows) < 0.1)
            columns[name] = pa.compute.if_else(missing, pa.nulls(rows, columns[name].type), columns[name])
    return pa.table(columns)


def write_run(folder: Path, *, rows: int = 2000, **blocks: Any) -> Path:
    """Train a run in ``runs/one``, and return its folder."""
    pq.write_table(table_of(rows, 1), folder / "train.parquet")
    given = {
        "data": {"train": "train.parquet", "batch_size": 100},
        "features": FEATURES,
        "labels": LABELS,
        "model": MODEL,
        "train": {"reproducible": True, "metrics": ["log_loss"]},
        **blocks,
    }
    with Trainer(persia.load_config(write_config(folder, **given))) as trainer:
        for _ in trainer.fit():
            pass
    return folder / "runs" / "one"


def bundle_of(run: Path, folder: Path, **arguments: Any) -> Path:
    """Export a run."""
    with Trainer(persia.load_config(run / "persia.yml", folder=run.parents[1])) as trainer:
        trainer.resume(run).export(folder, **arguments)
    return folder


def logits(bundle: Bundle, rows: Any, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the outputs of a bundle in batches of ``size`` rows."""
    return bundle.outputs_of(bundle.transform(rows), at_a_time=size).values


def copied(folder: Path, to: Path) -> Path:
    """Copy a bundle."""
    to.mkdir(parents=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to
