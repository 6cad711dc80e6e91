"""Look-ups in advance have no effect: rows, recency and counts are those of the trained steps."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Configure, Given, Sum
from stack import MakeStack
from waiting import wait_until

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig, Uniform
from persia.embedding.optim import SGD

AHEAD = 8
NEW = 100
SLOTS = "a: {dim: 4, admission: {min_count: 2}, ttl: 6}"

Start = Callable[[int], None]


@pytest.fixture(params=["embedded", "servers"])
def start(
    request: pytest.FixtureRequest, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Return a function that creates tables with a capacity, in this process or on two servers."""

    def embedded(capacity: int) -> None:
        configure(SLOTS, capacity=capacity)
        monkeypatch.setenv("PERSIA_CKPT_DIR", str(tmp_path))

    def servers(capacity: int) -> None:
        make_stack: MakeStack = request.getfixturevalue("make_stack")
        make_stack(servers=2, slots=SLOTS, capacity=capacity).use(monkeypatch)

    return embedded if request.param == "embedded" else servers


def context() -> TrainCtx:
    torch.manual_seed(3)
    model = Sum()
    return TrainCtx(
        SGD(1.0),
        torch.optim.SGD(model.parameters(), 0.0),
        model=model,
        mixed_precision=False,
        embedding_config=EmbeddingConfig(Uniform(1.0, 2.0), weight_bound=0),
    )


def step(ctx: TrainCtx, batch: Any) -> None:
    output, _ = ctx.forward(batch)
    ctx.backward(output.sum())


def looked_up(ctx: TrainCtx) -> int:
    return sum(ctx.engine.stats()["lookups"].values())


def wait_for_lookups(ctx: TrainCtx, ids: int) -> None:
    wait_until("look-ups ahead", lambda: looked_up(ctx) >= ids, 30)


def shards(ctx: TrainCtx, name: str) -> dict[str, bytes]:
    """Save a checkpoint, and return the content of all shards: ids, weights, state, recency and admission counts."""
    ctx.dump_checkpoint(name)
    folder = Path(os.environ["PERSIA_CKPT_DIR"]) / name
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*.arrow"))}


def test_batches_that_are_never_trained_on_leave_no_trace(start: Start) -> None:
    start(100_000)
    batches = [np.arange(NEW) + NEW * number for number in range(AHEAD + 1)]

    def trained(staleness: int) -> tuple[int, dict[str, bytes]]:
        with context() as ctx:
            for batch in DataLoader(Given(*batches, buffer_size=2 * AHEAD), embedding_staleness=staleness):
                wait_until("look-ups ahead", lambda: looked_up(ctx) >= NEW * staleness, 30)
                step(ctx, batch)
                break
            for batch in DataLoader(Given(*batches, buffer_size=2 * AHEAD), embedding_staleness=staleness):
                step(ctx, batch)
            return sum(ctx.get_embedding_size()), shards(ctx, f"staleness-{staleness}")

    # Only the ids of the first batch were pushed twice.
    rows, ahead = trained(AHEAD)
    assert rows == NEW
    assert (rows, ahead) == trained(1)


def test_a_checkpoint_has_rows_recency_and_counts_of_its_step(start: Start) -> None:
    start(512)  # two rows in each shard
    rng = np.random.default_rng(5)
    batches = [rng.choice(1_500, 300, replace=False) for _ in range(24)]

    def trained(staleness: int) -> tuple[list[dict[str, bytes]], dict[str, int]]:
        saved = []
        with context() as ctx:
            for batch in DataLoader(Given(*batches, buffer_size=2 * AHEAD), embedding_staleness=staleness):
                ahead = min(batch.step + staleness - 1, len(batches))
                wait_for_lookups(ctx, 300 * ahead)
                step(ctx, batch)
                if batch.step % 5 == 0:
                    saved.append(shards(ctx, f"staleness-{staleness}-{batch.step}"))
            ctx.engine.drain()
            return saved, ctx.engine.stats()["pushes"]

    ahead, counters = trained(AHEAD)
    assert len(ahead) == 4 and all(ahead)
    assert counters["rows_evicted"] > 0 and counters["rows_expired"] > 0 and counters["rows_missing"] > 0, counters
    assert (ahead, counters) == trained(1)
