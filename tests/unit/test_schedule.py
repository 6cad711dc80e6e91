"""Learning-rate schedules: their formulas, and the pushes of new and resumed runs."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Batches, Configure
from test_training import everything, make, train

from persia.data import DataLoader
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.embedding.schedule import LRSchedule
from persia.errors import ConfigError

SLOTS = "a: {dim: 4}\nb: {dim: 4}"


def test_courses_equal_their_formulas() -> None:
    linear = LRSchedule("linear", warmup_steps=4, total_steps=12, end=0.2)
    assert [linear(t) for t in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert linear(8) == pytest.approx(0.6)
    assert linear(12) == linear(1000) == pytest.approx(0.2)
    assert [LRSchedule(warmup_steps=2)(t) for t in (1, 2, 3)] == [0.5, 1, 1]
    assert LRSchedule()(7) == 1


@pytest.mark.parametrize("end", [0.0, 0.1])
def test_cosine_equals_torch(end: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=end)
    ours = LRSchedule("cosine", total_steps=20, end=end)
    for step in range(1, 21):
        optimizer.step()
        reference.step()
        assert math.isclose(ours(step), reference.get_last_lr()[0], abs_tol=1e-12)


def test_a_step_uses_its_own_rate(configure: Configure) -> None:
    """With SGD, half the rate in steps 2 and 3 is equivalent to half the gradients in these steps."""
    configure(SLOTS)
    results = []
    for optimizer, scale in ((SGD(0.1).scheduled(lambda t: 1.0 if t == 1 else 0.5), 1.0), (SGD(0.1), 0.5)):
        with make(optimizer=optimizer) as ctx:
            loader = DataLoader(Batches(3), reproducible=True)
            for batch in loader:
                ctx.prepare_features(batch)
                factor = torch.tensor(1.0 if batch.step == 1 else scale)
                gradients = [torch.full(tuple(each.shape), 0.25) * factor for each in batch.embeddings()]
                batch.push(gradients, optimizer.lr_factor(batch.step))
            results.append(everything(ctx))
    assert results[0] == results[1]


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), Adagrad(0.1), Adam()])
def test_a_resumed_run_goes_on_where_its_schedule_stood(
    configure: Configure, tmp_path: Path, optimizer: Optimizer
) -> None:
    configure(SLOTS)
    optimizer.scheduled(LRSchedule("cosine", warmup_steps=5, total_steps=30))
    with make(optimizer=optimizer) as ctx:
        loader = DataLoader(Batches(20), reproducible=True)
        train(ctx, loader, 8)
        ctx.dump_checkpoint(tmp_path / "ckpt")
        train(ctx, loader)
        expected = everything(ctx)
        assert ctx.step == 20
    with make(seed=9, optimizer=optimizer) as ctx:
        ctx.load_checkpoint(tmp_path / "ckpt")
        train(ctx, DataLoader(Batches(20), reproducible=True))
        assert everything(ctx) == expected


def test_update_lr_and_a_schedule_multiply() -> None:
    optimizer = SGD(0.1).scheduled(lambda step: 0.5)
    optimizer.update_lr(0.2)
    assert optimizer.lr_factor(1) == pytest.approx(1.0)


def test_ranks_can_compare_schedules() -> None:
    def mine(step: int) -> float:
        return 1.0

    course = LRSchedule("cosine", total_steps=9)
    told = [SGD(0.1).fingerprint, SGD(0.1).scheduled(mine).fingerprint, SGD(0.1).scheduled(course).fingerprint]
    assert told == ["none", "mine", repr(course)]


def test_wrong_schedules_are_refused() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: LRSchedule("step"), "course='step'"),  # type: ignore[arg-type]
        (lambda: LRSchedule("linear"), "total_steps=None"),
        (lambda: LRSchedule("cosine", warmup_steps=9, total_steps=9), "an integer above warmup_steps"),
        (lambda: LRSchedule(total_steps=9), "total_steps=9: must be None with course='constant'"),
        (lambda: LRSchedule("linear", warmup_steps=-1, total_steps=9, end=2), "warmup_steps=-1.*end=2"),
        (lambda: LRSchedule(end=0.1), "end=0.1: must be 0 with course='constant'"),
        (lambda: LRSchedule(warmup_steps=math.nan), "warmup_steps=nan: must be an integer"),  # type: ignore[arg-type]
        (lambda: LRSchedule(warmup_steps=1.5), "warmup_steps=1.5: must be an integer"),  # type: ignore[arg-type]
        (lambda: LRSchedule("linear", total_steps=math.inf), "total_steps=inf"),  # type: ignore[arg-type]
        (lambda: LRSchedule("cosine", total_steps=2e4), "total_steps=20000.0: must be an integer"),  # type: ignore[arg-type]
        (lambda: LRSchedule("cosine", total_steps=9, end=math.nan), "end=nan"),
        (lambda: SGD(0.1).scheduled("cosine"), r"scheduled\('cosine'\): expected a function"),  # type: ignore[arg-type]
        (lambda: SGD(0.1).scheduled(lambda step: math.nan).lr_factor(3), "nan at step 3"),
        (lambda: SGD(0.1).scheduled(lambda step: -1.0).lr_factor(3), "-1.0 at step 3"),
    ]
    for make_it, text in cases:
        with pytest.raises(ConfigError, match=text):
            make_it()
