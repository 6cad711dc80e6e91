"""Training on the servers of the surrounding stack, or on servers that the test starts."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from stack import LiveStack, Stack
from torch.utils.dlpack import from_dlpack

from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.doctor import job_status
from persia.embedding.config import Configuration
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.runtime.job import job_name

STEPS, SAMPLES, IDS = 20, 64, 100


class Batches(IterableDataset):
    """Random batches over any slots. A state dict continues them."""

    def __init__(self, slots: list[str]) -> None:
        super().__init__(buffer_size=4)
        self.slots, self.next = slots, 0

    def __iter__(self) -> Iterator[PersiaBatch]:
        while self.next < STEPS:
            rng = np.random.default_rng([5, self.next])
            self.next += 1
            ids = rng.integers(0, IDS, SAMPLES, dtype=np.uint64)
            yield PersiaBatch(
                [IDTypeFeature(slot, list(ids[:, None])) for slot in self.slots],
                [NonIDTypeFeature(rng.standard_normal((SAMPLES, 1), dtype=np.float32))],
                [Label((ids % 2).astype(np.float32)[:, None])],
            )
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.next = state_dict["next"]


class Model(torch.nn.Module):
    """A dense layer over the mean of each slot's embedding of any shape."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(slots + 1, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        means = [each.flatten(1).mean(1, keepdim=True) for each in embeddings]
        result: torch.Tensor = self.layer(torch.cat([*dense, *means], 1))
        return result


@pytest.fixture
def folder(any_stack: Stack | LiveStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Return the path for a checkpoint of this test alone, below the stack's folder of checkpoints."""
    any_stack.use(monkeypatch)
    monkeypatch.setenv("PERSIA_RUN_DIR", str(tmp_path / "run"))  # the files of a user's run remain
    name = f"test-{uuid.uuid4().hex}"
    yield name
    shutil.rmtree(Path(any_stack.settings["PERSIA_CKPT_DIR"]) / name)


def context(slots: list[str], seed: int) -> TrainCtx:
    torch.manual_seed(seed)
    model = Model(len(slots))
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainCtx(Adagrad(lr=0.1), dense, mixed_precision=False, model=model)


def train(ctx: TrainCtx, loader: DataLoader, steps: int) -> list[float]:
    losses = []
    for batch in loader:
        output, labels = ctx.forward(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0])
        losses.append(float(ctx.backward(loss)))
        if len(losses) == steps:
            break
    return losses


def state(ctx: TrainCtx, slots: list[str]) -> bytes:
    """Return the rows of all ids and the weights of the model."""
    assert ctx.model is not None
    ids = np.arange(IDS, dtype=np.uint64)
    wanted = PersiaBatch([IDTypeFeature(slot, list(ids[:, None])) for slot in slots], requires_grad=False)
    rows = [from_dlpack(tensor) for tensor in ctx.get_embedding_from_data(wanted).embeddings()]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in (*rows, *ctx.model.parameters()))


@pytest.mark.live
def test_a_run_resumes_from_its_checkpoint_with_equal_bits(any_stack: Stack | LiveStack, folder: str) -> None:
    slots = Configuration.find().embedding.slots
    half = STEPS // 2
    with context(slots, seed=1) as ctx:
        loader = DataLoader(Batches(slots), reproducible=True)
        assert len(train(ctx, loader, half)) == half
        ctx.dump_checkpoint(folder)
        saved = state(ctx, slots)
        rest = train(ctx, loader, STEPS)
        rows, trained = ctx.get_embedding_size(), state(ctx, slots)
    servers = [
        one for one in job_status.status(any_stack.nats_url, job_name()).processes if one.service == "persia-server"
    ]
    assert len(rows) == len(servers) and all(rows)
    assert trained != saved

    with context(slots, seed=2) as ctx:
        assert not any(ctx.get_embedding_size()), "a run starts from empty tables"
        ctx.load_checkpoint(folder)
        assert state(ctx, slots) == saved
        assert train(ctx, DataLoader(Batches(slots), reproducible=True), STEPS) == rest
        assert ctx.get_embedding_size() == rows and state(ctx, slots) == trained
