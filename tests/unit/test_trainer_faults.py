"""What goes wrong in a run: outputs that are NaN, a full disk, a mistake in the call, a value of the data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from trainer_files import config_of, fit, write_clicks

from persia.checkpoint.snapshot import Save
from persia.config import Config
from persia.ctx import eval_ctx
from persia.errors import DataError, StorageError, UsageError
from persia.trainer import EvaluationReport, StepReport, Trainer, fit_once, metrics, pages, progress
from persia.trainer.batches import groups_of
from persia.trainer.parts import Parts
from persia.trainer.run_folder import RunFolder


def small(folder: Path, **blocks: Any) -> Config:
    """As config_of, with 500 rows."""
    if not (folder / "clicks.parquet").exists():
        write_clicks(folder / "clicks.parquet", 500)
    return config_of(folder, **{**blocks, "data": {"batch_size": 100, **blocks.get("data", {})}})


class Nan(torch.nn.Module):
    """A model whose outputs are finite in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return a logit for each row, of which the first is NaN in an evaluation."""
        del dense
        output: torch.Tensor = self.layer(embeddings[0])
        if not self.training:
            output = output.clone()
            output[0] = float("nan")
        return output


# --- outputs that are not finite


# --- metrics


# --- files


def failing_best(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Save.write

    def write(save: Save) -> None:
        if "best" in save.what:
            save.abort()
            raise StorageError("/best: No space left on device")
        whole(save)

    monkeypatch.setattr(Save, "write", write)


# --- calls and values


# --- several ranks


class _Proxy:
    """An object with another value of some attributes."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        self.__dict__.update(changes, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
