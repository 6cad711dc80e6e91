"""The initial values and the bounds of rows."""

import numpy as np
import pytest
import torch
from conftest import Batches, Configure, TinyModel, insert_rows
from test_training import SLOTS, rows

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig, Gamma, InverseSqrtDim, Normal, Poisson, Uniform, Zero
from persia.embedding.optim import SGD
from persia.errors import ConfigError

pytestmark = pytest.mark.stack


def first_rows(config: EmbeddingConfig, *, lr: float = 1.0, steps: int = 1) -> np.ndarray:
    """Return the rows of slot ``a`` after one step, which inserts them, or after ``steps`` batches of many ids."""
    torch.manual_seed(3)
    model = TinyModel()
    with TrainCtx(
        SGD(lr), torch.optim.SGD(model.parameters(), 0.1), model=model, mixed_precision=False, embedding_config=config
    ) as ctx:
        if steps == 1:
            insert_rows(ctx, "ab", range(2000))
        else:
            for batch in DataLoader(Batches(steps, batch_size=2000, ids=2000), reproducible=True):
                output, _ = ctx.forward(batch)
                ctx.backward(output.sum())
        return rows(ctx, 2000)[0].numpy()


def test_rows_start_as_configured(configure: Configure) -> None:
    configure(SLOTS)
    uniform = first_rows(EmbeddingConfig(Uniform(-0.2, 0.4)))
    made = uniform[uniform.any(1)]
    assert len(made) > 1000
    assert made.min() >= -0.2
    assert made.max() < 0.4
    assert abs(made.mean() - 0.1) < 0.01
    assert np.array_equal(uniform, first_rows(EmbeddingConfig((-0.2, 0.4))))
    normal = first_rows(EmbeddingConfig(Normal(1.0, 0.5), weight_bound=0))
    made = normal[normal.any(1)]
    assert abs(made.mean() - 1) < 0.05
    assert abs(made.std() - 0.5) < 0.05
    assert not first_rows(EmbeddingConfig(Zero())).any()
    gamma = first_rows(EmbeddingConfig(Gamma(4.0, 0.5)))
    made = gamma[gamma.any(1)]
    assert abs(made.mean() - 2) < 0.1
    assert abs(made.var() - 1) < 0.1
    poisson = first_rows(EmbeddingConfig(Poisson(3.0), weight_bound=0))
    made = poisson[poisson.any(1)]
    assert np.array_equal(made, made.round())
    assert abs(made.mean() - 3) < 0.1
    inverse = first_rows(EmbeddingConfig(InverseSqrtDim()))
    made = inverse[inverse.any(1)]
    assert 0.49 < abs(made).max() <= 0.5  # 1 / sqrt(4)
    assert abs((made**2).sum(1).mean() - 1 / 3) < 0.02


def test_a_share_of_ids_is_admitted(configure: Configure) -> None:
    configure(SLOTS)
    everything = first_rows(EmbeddingConfig(Uniform(0.1, 0.2))).any(1).sum()
    half = first_rows(EmbeddingConfig(Uniform(0.1, 0.2), admit_probability=0.5)).any(1).sum()
    assert 0.4 < half / everything < 0.6
    assert not first_rows(EmbeddingConfig(Uniform(0.1, 0.2), admit_probability=0.0)).any()


def test_weights_stay_inside_their_bound(configure: Configure) -> None:
    configure(SLOTS)
    bounded = first_rows(EmbeddingConfig(weight_bound=0.5), lr=50, steps=5)
    assert abs(bounded).max() == 0.5
    assert abs(first_rows(EmbeddingConfig(weight_bound=0), lr=50, steps=5)).max() > 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        {"emb_initialization": (0.1, -0.1)},
        {"emb_initialization": (float("nan"), 1)},
        {"emb_initialization": Normal(0, -1)},
        {"emb_initialization": [-0.1, 0.1]},
        {"emb_initialization": (-0.1, 0.0, 0.1)},
        {"emb_initialization": ("-0.1", "0.1")},
        {"emb_initialization": Poisson("3")},  # type: ignore[arg-type]
        {"emb_initialization": None},
        {"admit_probability": 1.5},
        {"weight_bound": -1},
        {"weight_bound": float("inf")},
        {"emb_initialization": Gamma(0, 1)},
        {"emb_initialization": Poisson(501)},
        {"emb_initialization": Poisson(float("nan"))},
        {"admit_min_count": 0},
        {"admit_min_count": 1.5},
        {"admit_min_count": 65_536},
    ],
)
def test_a_number_out_of_range_is_named(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        EmbeddingConfig(**arguments)  # type: ignore[arg-type]


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"emb_initialization.*admit_probability.*weight_bound"):
        EmbeddingConfig((1, 0), 2, -1)
