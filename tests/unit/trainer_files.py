"""Small files and configurations for the tests of the trainer."""

from pathlib import Path
from typing import Any

import yaml

import persia
from persia.config import Config
from persia.data import synth
from persia.trainer import EvaluationReport, StepReport, Trainer

FEATURES: dict[str, Any] = {
    "id0": {"type": "id", "dim": 4},
    "id1": {"type": "id", "dim": 4},
    "dense0": {"type": "dense", "standardise": True},
    "level": {"type": "bucket", "column": "dense1", "quantiles": 8, "dim": 4},
}
MODEL = {"name": "dcnv2", "cross_layers": 1, "deep_mlp": [8]}
TRAIN = {"reproducible": True, "metrics": ["auc", "log_loss", "ne", "calibration"]}


def write_clicks(path: Path, rows: int = 2000, ids: tuple[int, ...] = (50, 200)) -> Path:
    """Write synthetic clicks: ``id0`` (integers), ``id1`` (strings), ``dense0``, ``dense1``, ``label``."""
    synth.write(path, rows, synth.Teacher(ids, dense=2, positive=0.3))
    return path


def write_config(folder: Path, **blocks: Any) -> Path:
    """Write a persia.yml for ``clicks.parquet``. Given keys are merged into most blocks, and replace the others."""
    content: dict[str, Any] = {
        "data": {"train": "clicks.parquet", "batch_size": 128},
        "features": FEATURES,
        "labels": {"label": {}},
        "model": MODEL,
        "train": TRAIN,
        "checkpoint": {"every": 5},
        "run": {"dir": str(folder / "runs"), "name": "one", "log_every": 4},
    }
    for name, keys in blocks.items():
        merges = name not in ("features", "labels", "model", "precision", "parallel")
        content[name] = {**content.get(name, {}), **keys} if merges else keys
    path = folder / "persia.yml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def config_of(folder: Path, **blocks: Any) -> Config:
    """Write clicks and a persia.yml, and return the configuration."""
    if not (folder / "clicks.parquet").exists():
        write_clicks(folder / "clicks.parquet")
    config: Config = persia.load_config(write_config(folder, **blocks))
    return config


def fit(config: Config, **arguments: Any) -> tuple[Trainer, list[StepReport | EvaluationReport]]:
    """Train to the end, and return the closed trainer and its reports."""
    with Trainer(config, **arguments) as trainer:
        return trainer, [*trainer.fit()]


def summary(trainer: Trainer) -> dict[str, Any]:
    """Return the summary of a run."""
    assert trainer.folder is not None
    return trainer.folder.read_json("summary.json")
