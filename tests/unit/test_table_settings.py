"""The effect on training of the settings of tables in slots: dtype, rounding, optimizer, init, admission, ttl."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import Configure, Given, Sum
from torch.utils.dlpack import from_dlpack

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig, Uniform
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.embedding.optim import SGD

pytestmark = pytest.mark.stack

IDS = np.arange(64, dtype=np.uint64)


def rows(ctx: TrainCtx, ids: np.ndarray = IDS) -> np.ndarray:
    batch = PersiaBatch([IDTypeFeatureWithSingleID("a", ids)], requires_grad=False)
    (found,) = ctx.get_embedding_from_data(batch).embeddings()
    return np.array(from_dlpack(found).numpy())


def trained(
    *batches: np.ndarray, lr: float = 1.0, config: EmbeddingConfig | None = None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the rows of ``IDS`` after training on ``batches``, and the counters."""
    torch.manual_seed(3)
    model = Sum()
    config = config or EmbeddingConfig(Uniform(1.0, 1.0), weight_bound=0)
    with TrainCtx(
        SGD(lr), torch.optim.SGD(model.parameters(), 0.0), model=model, mixed_precision=False, embedding_config=config
    ) as ctx:
        for batch in DataLoader(Given(*batches), reproducible=True):
            output, _ = ctx.forward(batch)
            ctx.backward(output.sum())
        return rows(ctx), ctx.engine.stats()


def test_small_updates_are_lost_in_16_bits_unless_rounding_is_drawn(configure: Configure) -> None:
    def mean(slot: str) -> float:
        configure(f"a: {{dim: 16, {slot}}}")
        return float(trained(*[IDS] * 40, lr=1e-4)[0].mean())

    assert abs(mean("dtype: f32") - 0.996) < 1e-5
    for dtype in ("f16", "bf16"):
        assert mean(f"dtype: {dtype}") == 1.0
        assert abs(mean(f"dtype: {dtype}, rounding: stochastic") - 0.996) < 1e-3


def test_rows_of_16_bits_are_those_of_f32_rounded(configure: Configure) -> None:
    config = EmbeddingConfig(Uniform(-1.0, 1.0))
    configure("a: {dim: 7}")
    exact, stats = trained(IDS, lr=0.0, config=config)
    configure("a: {dim: 7, dtype: f16}")
    half, half_stats = trained(IDS, lr=0.0, config=config)
    assert np.array_equal(half, exact.astype(np.float16).astype(np.float32))
    assert half_stats["payload_bytes"] * 2 == stats["payload_bytes"]
    configure("a: {dim: 7, dtype: bf16}")
    brain = trained(IDS, lr=0.0, config=config)[0]
    assert np.array_equal(brain, torch.from_numpy(exact).bfloat16().float().numpy())


def test_a_table_has_its_own_optimizer_and_init(configure: Configure) -> None:
    configure("a: {dim: 4, optimizer: {name: sgd, lr: 0.25}, init: {name: uniform, low: 3, high: 3}}")
    assert (trained(IDS, IDS)[0] == 3 - 2 * 0.25).all()


def test_an_id_gets_its_row_when_it_comes_again(configure: Configure) -> None:
    configure("a: {dim: 4, admission: {min_count: 2}}")
    found, stats = trained(IDS, IDS[:10], IDS[:10])
    # The first look-up returns zeros, the second one the initial row. From this step on, gradients are applied.
    assert (found[:10] == 1 - 2).all()
    assert not found[10:].any()
    assert stats["lookups"] == {"hits": 10, "initial": 10, "missing": len(IDS)}
    assert stats["pushes"]["rows_inserted"] == 10
    assert stats["pushes"]["rows_missing"] == len(IDS)
    configure("a: {dim: 4}")
    config = EmbeddingConfig(Uniform(1.0, 1.0), weight_bound=0, admit_min_count=2)
    assert np.array_equal(trained(IDS, IDS[:10], IDS[:10], config=config)[0], found)


def test_a_row_without_pushes_expires(configure: Configure) -> None:
    configure("a: {dim: 4, ttl: 2}")
    found, stats = trained(IDS, IDS[:10], IDS[:10], IDS[:10])
    assert (found[:10] == 1 - 4).all()
    assert not found[10:].any()
    again, _ = trained(IDS, IDS[:10], IDS[:10], IDS)
    assert (again[:10] == 1 - 4).all()
    assert (again[10:] == 1 - 1).all()
    assert stats["pushes"]["rows_evicted"] == 0


def test_counts_ages_and_halves_are_in_checkpoints(configure: Configure, tmp_path) -> None:  # type: ignore[no-untyped-def]
    configure("a: {dim: 4, dtype: bf16, rounding: stochastic, admission: {min_count: 2}, ttl: 3}")
    batches = [IDS, IDS[:40], IDS[20:], IDS[:30], IDS[5:], IDS, IDS[::2], IDS]

    def run(*parts: list[np.ndarray]) -> np.ndarray:
        torch.manual_seed(3)
        model = Sum()
        with TrainCtx(SGD(0.01), torch.optim.SGD(model.parameters(), 0.0), model=model, mixed_precision=False) as ctx:
            for number, part in enumerate(parts):
                if number > 0:
                    ctx.dump_checkpoint(str(tmp_path / "saved"))
                    ctx.clear_embeddings()
                    ctx.load_checkpoint(str(tmp_path / "saved"))
                for batch in DataLoader(Given(*part), reproducible=True):
                    output, _ = ctx.forward(batch)
                    ctx.backward(output.sum())
            return rows(ctx)

    assert np.array_equal(run(batches), run(batches[:3], batches[3:]))
