"""Each optimizer equals its formula in numpy float32, in the same order of operations, to 2 ulp per step."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from conftest import Configure

from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig, optim
from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.errors import ConfigError, UsageError

pytestmark = pytest.mark.stack

F = npt.NDArray[np.float32]
Formula = Callable[[F, F, F, int], tuple[F, F]]
f32 = np.float32
STEPS = 4
BOUND = f32(0.31)


def sgd(lr: float, momentum: float, decay: float) -> Formula:
    def step(w: F, state: F, g: F, _t: int) -> tuple[F, F]:
        if not momentum:
            return w - f32(lr) * (g + f32(decay) * w), state
        v = f32(momentum) * state + g
        return w - f32(lr) * (v + f32(decay) * w), v

    return step


def adagrad(lr: float, decay: float, keep: float, eps: float, shared: bool) -> Formula:
    def step(w: F, s: F, g: F, _t: int) -> tuple[F, F]:
        g = g + f32(decay) * w
        square = g * g
        if shared:
            square = square.mean(1, keepdims=True, dtype=np.float64).astype(f32)
        return w - f32(lr) * g / np.sqrt(s + f32(eps)), s * f32(keep) + square

    return step


def adam(lr: float, beta1: float, beta2: float, decay: float, eps: float) -> Formula:
    def step(w: F, state: F, g: F, t: int) -> tuple[F, F]:
        m, v = np.split(state, 2, axis=1)
        g = g + f32(decay) * w
        m = f32(beta1) * m + (f32(1) - f32(beta1)) * g
        v = f32(beta2) * v + (f32(1) - f32(beta2)) * (g * g)
        rate = f32(float(f32(lr)) / (1 - float(f32(beta1)) ** t))
        scale = f32(1 / (1 - float(f32(beta2)) ** t))
        return w - rate * m / (np.sqrt(v * scale) + f32(eps)), np.concatenate([m, v], 1)

    return step


CASES = [
    (SGD(0.1), sgd(0.1, 0, 0)),
    (SGD(0.1, weight_decay=0.01), sgd(0.1, 0, 0.01)),
    (SGD(0.1, momentum=0.9, weight_decay=0.01), sgd(0.1, 0.9, 0.01)),
    (Adagrad(0.1), adagrad(0.1, 0, 1, 1e-10, False)),
    (Adagrad(0.1, weight_decay=0.01, g_square_momentum=0.9, eps=1e-3), adagrad(0.1, 0.01, 0.9, 1e-3, False)),
    (Adagrad(0.1, vectorwise_shared=True), adagrad(0.1, 0, 1, 1e-10, True)),
    (Adam(0.01), adam(0.01, 0.9, 0.999, 0, 1e-8)),
    (Adam(0.01, betas=(0.5, 0.75), weight_decay=0.01), adam(0.01, 0.5, 0.75, 0.01, 1e-8)),
]


class Source(IterableDataset):
    """Ids 0 … 9 of slot ``a`` in every batch, 7 and 8 in two samples."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        lists = [np.array([i], np.uint64) for i in range(10)] + [np.array([7, 8], np.uint64)]
        for _ in range(1 + STEPS):
            yield PersiaBatch([IDTypeFeature("a", lists)], labels=[Label(np.zeros(11, f32))])


def dump(ctx: TrainCtx, folder: Path) -> tuple[F, F]:
    """Return weights and optimizer state of ids 0 … 9, from a checkpoint's files."""
    ctx.dump_embedding(folder)
    rows = {}
    for file in folder.glob("shard-*.arrow"):
        with pa.ipc.open_file(file) as reader:
            for row in reader.read_all().to_pylist():
                rows[row["id"]] = (row["weights"], row["state"])
    weights, state = zip(*(rows[i] for i in range(10)), strict=True)
    return np.array(weights, f32), np.array(state, f32).reshape(10, -1)


INVALID: list[tuple[Callable[[], object], str]] = [
    (lambda: SGD(-0.1, momentum=1), "lr=-0.1: must be at least 0; momentum=1: must be at least 0 and below 1"),
    (lambda: Adagrad(g_square_momentum=1.5), "g_square_momentum=1.5: must be from 0 to 1"),
    (lambda: Adagrad(eps=0), "eps=0: must be from 1.18e-38 to 1e+30"),
    (lambda: Adam(eps=1e31, betas=(0.9, 1)), "eps=1e+31: must be from 1.18e-38 to 1e+30; betas[1]=1: must be"),
    (lambda: Adam(weight_decay=float("nan")), "weight_decay=nan: must be a finite number"),
]


@pytest.mark.parametrize(("made", "text"), INVALID)
def test_arguments_that_the_engine_does_not_accept_are_refused_when_the_optimizer_is_created(
    made: Callable[[], object], text: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"embedding optimizer: {text}")):
        made()


LIMITS = np.finfo(np.float32)
RANGES: list[tuple[Callable[[float], Optimizer], float, float]] = [
    (lambda value: SGD(value), 0, LIMITS.max),
    (lambda value: SGD(0.1, momentum=value), 0, 1 - float(LIMITS.epsneg)),
    (lambda value: SGD(0.1, weight_decay=value), 0, LIMITS.max),
    (lambda value: Adagrad(0.1, initial_accumulator_value=value), 0, LIMITS.max),
    (lambda value: Adagrad(0.1, g_square_momentum=value), 0, 1),
    (lambda value: Adagrad(0.1, eps=value), LIMITS.tiny, 1e30),
    (lambda value: Adam(betas=(value, 0.999)), 0, 1 - float(LIMITS.epsneg)),
    (lambda value: Adam(betas=(0.9, value)), 0, 1 - float(LIMITS.epsneg)),
    (lambda value: Adam(eps=value), LIMITS.tiny, 1e30),
]


@pytest.mark.parametrize(("made", "low", "high"), RANGES)
def test_an_optimizer_has_the_ranges_of_the_engine(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, made: Callable[[float], Optimizer], low: float, high: float
) -> None:
    configure("a: {dim: 1}")
    model = torch.nn.Linear(1, 1)
    inf = np.float32(np.inf)
    with np.errstate(over="ignore"):
        beyond = np.nextafter(np.float32(low), -inf), np.nextafter(np.float32(high), inf)
    for value, is_valid in ((low, True), (high, True), *((value, False) for value in beyond)):
        if is_valid:
            made(float(value))
        else:
            with pytest.raises(ConfigError):
                made(float(value))
        with monkeypatch.context() as patched:
            patched.setattr(optim, "_check", lambda **_: None)
            optimizer = made(float(value))
        begun = TrainCtx(optimizer, torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model)
        refused = pytest.raises(UsageError, match="cannot begin the run: .* it must be from")
        with contextlib.nullcontext() if is_valid else refused, begun:
            pass


@pytest.mark.parametrize("dim", [1, 3, 16, 21])
@pytest.mark.parametrize(("optimizer", "formula"), CASES)
def test_an_optimizer_equals_its_formula(
    configure: Configure, tmp_path: Path, optimizer: Optimizer, formula: Formula, dim: int
) -> None:
    configure(f"a: {{dim: {dim}}}")
    model = torch.nn.Linear(1, 1)
    config = EmbeddingConfig((-0.3, 0.3), weight_bound=float(BOUND))
    with TrainCtx(
        optimizer, torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model, embedding_config=config
    ) as ctx:
        for batch in DataLoader(Source(), reproducible=True):
            if batch.step == 1:  # inserts the rows
                batch.push([torch.zeros(11, dim)], 0.0)
                continue
            w, state = dump(ctx, tmp_path / "before")
            rng = np.random.default_rng([dim, batch.step])
            gradient = rng.standard_normal((11, dim), dtype=f32)
            summed = gradient[:10].copy()
            summed[7:9] += gradient[10]
            expected_w, expected_state = formula(w, state, summed, batch.step)
            batch.push([torch.from_numpy(gradient)], optimizer.lr_factor(batch.step))
            after_w, after_state = dump(ctx, tmp_path / "after")
            np.testing.assert_array_max_ulp(after_w, expected_w.clip(-BOUND, BOUND), maxulp=2)
            np.testing.assert_array_max_ulp(after_state, expected_state, maxulp=2)
        assert batch.step == 1 + STEPS
