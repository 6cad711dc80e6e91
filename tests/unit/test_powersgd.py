"""The error feedback of PowerSGD follows the loss scale, and ranks agree on it."""

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Batches, Configure, TinyModel
from test_training import SLOTS, train
from torch import distributed as torch_distributed
from torch._C._distributed_c10d import HashStore

from persia.checkpoint import rng_state, run_state
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.distributed import Compression
from persia.distributed.averaging import Averaged, PowerSGD
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD


@pytest.fixture
def group() -> Iterator[None]:
    torch_distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch_distributed.destroy_process_group()


def trained(interval: int) -> torch.Tensor:
    """Train in fp16 with PowerSGD, double the loss scale a number of times, and return the weights."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"find_unused_parameters": True}
    model = Averaged(TinyModel(), None, Compression("powersgd", 1, 2), timedelta(minutes=1), **options)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = EmbeddingConfig((-0.1, 0.1))
    with TrainCtx(SGD(0.1), dense, interval, precision="fp16", model=model, embedding_config=rows) as ctx:
        train(ctx, DataLoader(Batches(16), reproducible=True))
        assert ctx.skipped_steps == 0 and ctx.grad_scaler is not None
        assert ctx.grad_scaler.get_scale() == (16 if interval > 16 else 2**12)
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.row("S4-24")
@pytest.mark.usefixtures("group")
def test_errors_are_converted_when_the_loss_scale_changes(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persia.loop.loss_scale._FIRST_SCALE", 16.0)
    configure(SLOTS)
    constant = trained(1000)
    configure(SLOTS)
    torch.testing.assert_close(trained(2), constant, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("group")
def test_the_scale_of_errors_is_in_checkpoints() -> None:
    first, second = (PowerSGD(Compression("powersgd")) for _ in range(2))
    first._state.error_dict[0] = torch.ones(3)
    first.rescale(8.0)
    saved = first.state_dict()
    first.rescale(2.0)
    assert torch.equal(saved["errors"][0], torch.full((3,), 8.0))  # a copy
    second.load_state_dict(saved)
    second.rescale(2.0)
    for each in (first, second):
        assert torch.equal(each._state.error_dict[0], torch.full((3,), 2.0))


@pytest.mark.parametrize("loads", [True, False])
def test_a_rank_drops_its_errors_only_if_rank_0_has_loaded_theirs(monkeypatch: pytest.MonkeyPatch, loads: bool) -> None:
    """Rank 0 keeps its own errors if it has loaded rows only."""
    loaded: list[Any] = []
    monkeypatch.setattr(run_state, "load_averaging", lambda _, state: loaded.append(state))
    monkeypatch.setattr(run_state, "load_dense", lambda *_: None)
    monkeypatch.setattr(rng_state, "restore_random_state", lambda *_: None)
    state = {
        "dense": None,
        "optimizer": {},
        "loss_scale": None,
        "embedding_lr": 0.1,
        "cursor": None,
        "passes": [0, 0],
        "more": None,
        "saved": 0,
        "random": {rng_state.rank_state(0): {run_state.AVERAGING: {"iter": 7}}} if loads else {},
        "inputs": None,
    }
    backend: Any = SimpleNamespace(
        broadcast=lambda _: state,
        row_settings=SimpleNamespace(optimizer=SimpleNamespace(update_lr=lambda _: None)),
        inputs=SimpleNamespace(of=lambda _: None),
    )
    dense = torch.optim.SGD([torch.zeros(1)], 0.1)
    run_state.RunState(backend, lambda: None, lambda: dense, SGD(0.1), None, None).share_loaded()
    assert loaded == ([{"iter": 7}] if loads else [])
