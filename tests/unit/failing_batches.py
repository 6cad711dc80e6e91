"""Batches at which training always fails, and runs over them, for the tests of failing batches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Batches
from test_checkpoints import STEPS, step
from test_training import everything, make

from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import DataError
from persia_core.forward import TrainingBatch

BAD = 12
"""The number of the batch that fails, from 0; its step is one more."""
META = b"from file 7"


def refused_at(step: int, text: str) -> DataError:
    """Return the engine's error for a look-up or push of ``step``."""
    error = DataError(text)
    error.step = step
    return error


class Marked(Batches):
    """Batches of few ids, all of which occur before the failing batch, whose ``meta`` marks it."""

    def __init__(self, count: int = STEPS, bad: int = BAD, refused: bool = False) -> None:
        super().__init__(count, ids=20)
        self.bad, self.refused = bad, refused

    def batch(self, number: int, *, requires_grad: bool = True) -> PersiaBatch:
        if number != self.bad:
            return super().batch(number, requires_grad=requires_grad)
        ids = np.arange(1000, 1008, dtype=np.uint64)
        slots = ["a", "b", *(["c"] if self.refused else [])]
        features = [IDTypeFeatureWithSingleID(slot, ids) for slot in slots]
        return PersiaBatch(features, labels=[Label(np.zeros((8, 1), np.float32))], meta=META)


class Plain(Batches):
    """The same data set without a state dict, so a resumed run counts its batches."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


def fails(ctx: TrainCtx, batch: TrainingBatch) -> None:
    """Train on a batch, or fail if it is the marked one."""
    if batch.meta is not None:
        raise ZeroDivisionError("at this batch")
    step(ctx, batch)


def run(
    folder: Path,
    data: Callable[[], Batches],
    body: Callable[[TrainCtx, TrainingBatch], None] = fails,
    policy: str = "stop",
    every: int = 10,
) -> tuple[TrainCtx, Checkpoints, bytes]:
    """Train to the end. An error that ends training earlier is raised."""
    checkpoints = Checkpoints(folder, every=every, failing_batches=policy)
    with make(checkpoints=checkpoints) as ctx:
        for batch in DataLoader(data(), reproducible=True):
            body(ctx, batch)
        return ctx, checkpoints, everything(ctx)


def fail(times: int, *arguments: Any, **options: Any) -> None:
    """Start a run this many times. Each of the runs must fail."""
    for _ in range(times):
        with pytest.raises((ZeroDivisionError, DataError)):
            run(*arguments, **options)


def record(folder: Path, step: int = BAD + 1) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "poison" / f"step-{step}.rank-0.json").read_bytes())
    return content


def without(batch: int) -> bytes:
    """Return the result of a run whose loop skips this batch."""
    with make() as ctx:
        for each in DataLoader(Batches(STEPS, ids=20), reproducible=True):
            if each.step != batch + 1:
                step(ctx, each)
        return everything(ctx)


class Repaired(Marked):
    """The same batch without its defect, at the same position."""

    def batch(self, number: int, *, requires_grad: bool = True) -> PersiaBatch:
        if number != self.bad:
            return super().batch(number, requires_grad=requires_grad)
        ids = np.arange(10, 18, dtype=np.uint64)
        features = [IDTypeFeatureWithSingleID(slot, ids) for slot in ("a", "b")]
        return PersiaBatch(features, labels=[Label(np.zeros((8, 1), np.float32))], meta=b"repaired")
