"""A new EmbeddingCollection has the measured defaults. PersiaML's classes keep theirs."""

import inspect
from pathlib import Path
from typing import Any

import torch
from conftest import Configure, TinyModel
from test_training import make

from persia.ctx import TrainCtx
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.nn import EmbeddingCollection, TableConfig, default_embedding_config, default_optimizer

TABLES = [TableConfig("a", 4, ["a"])]
IDS = torch.arange(500)


def new_rows(tables: EmbeddingCollection) -> torch.Tensor:
    """Return the initial weights of ids that have no row."""
    vectors: dict[str, torch.Tensor] = tables({"a": IDS})
    return vectors["a"].detach()


def settings(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in {"spec", "_schedule"}}


def test_a_collection_without_optimizer_trains_with_the_measured_one() -> None:
    tables = EmbeddingCollection(TABLES)
    assert type(tables.optimizer) is Adagrad
    assert settings(tables.optimizer) == settings(
        Adagrad(lr=0.1, initial_accumulator_value=1e-6, vectorwise_shared=True)
    )
    assert settings(default_optimizer()) == settings(tables.optimizer)
    assert default_optimizer() is not default_optimizer(), "update_lr of one must not change another"
    assert settings(default_optimizer(lr=0.5)) == settings(
        Adagrad(lr=0.5, initial_accumulator_value=1e-6, vectorwise_shared=True)
    )
    vectors = tables({"a": IDS})["a"]
    torch.autograd.backward(vectors.sum() / 1000)
    with torch.no_grad():
        step = vectors.detach() - tables({"a": IDS})["a"]
    assert torch.allclose(step, torch.full_like(step, 0.1), rtol=1e-3), "lr * gradient / sqrt(1e-6)"


def test_new_rows_of_a_collection_without_config_are_in_the_measured_range() -> None:
    torch.manual_seed(1)
    rows = new_rows(EmbeddingCollection(TABLES, SGD(0.1)))
    assert default_embedding_config() == EmbeddingConfig((-0.05, 0.05))
    assert 0.049 < rows.abs().max() <= 0.05


def test_a_checkpoint_continues_with_the_range_it_began_with(tmp_path: Path) -> None:
    """A checkpoint of an older version, or of a script with its own configuration, does not record the range."""
    EmbeddingCollection(TABLES, Adagrad(0.1)).save(tmp_path / "new")
    EmbeddingCollection(TABLES, Adagrad(0.1), EmbeddingConfig((-0.3, 0.3))).save(tmp_path / "old")
    loaded = EmbeddingCollection(TABLES, Adagrad(0.1))
    loaded.load(tmp_path / "new")
    assert 0.049 < new_rows(loaded).abs().max() <= 0.05
    loaded.load(tmp_path / "old")
    assert 0.0098 < new_rows(loaded).abs().max() <= 0.01
    loaded.save(tmp_path / "again")
    again = EmbeddingCollection(TABLES, Adagrad(0.1))
    again.load(tmp_path / "again")
    assert 0.0098 < new_rows(again).abs().max() <= 0.01
    given = EmbeddingCollection(TABLES, Adagrad(0.1), EmbeddingConfig((-0.2, 0.2)))
    given.load(tmp_path / "old")
    assert 0.19 < new_rows(given).abs().max() <= 0.2, "the script's own configuration comes first"


def test_a_checkpoint_of_a_context_continues_with_persiamls_range(configure: Configure, tmp_path: Path) -> None:
    configure("a: {dim: 4}")
    with make(optimizer=Adagrad(0.1)) as ctx:
        ctx.dump_checkpoint(str(tmp_path / "checkpoint"))
    loaded = EmbeddingCollection(TABLES, Adagrad(0.1))
    loaded.load(tmp_path / "checkpoint")
    assert 0.0098 < new_rows(loaded).abs().max() <= 0.01


def test_persiamls_defaults_are_unchanged(configure: Configure) -> None:
    expected = {
        SGD: {"momentum": 0.0, "weight_decay": 0.0},
        Adam: {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0, "eps": 1e-8},
        Adagrad: {
            "lr": 1e-2,
            "initial_accumulator_value": 1e-2,
            "weight_decay": 0,
            "g_square_momentum": 1,
            "eps": 1e-10,
            "vectorwise_shared": False,
        },
    }
    for kind, defaults in expected.items():
        parameters = inspect.signature(kind).parameters.values()
        assert {each.name: each.default for each in parameters if each.default is not each.empty} == defaults
    assert get_default_embedding_config() == EmbeddingConfig()
    assert EmbeddingConfig() == EmbeddingConfig((-0.01, 0.01), 1.0, 10, 1)
    configure("a: {dim: 4}")
    with TrainCtx(SGD(0.1), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), model=TinyModel()) as ctx:
        rows = ctx.common_context.row_settings  # type: ignore[union-attr]
        assert rows.config == EmbeddingConfig((-0.01, 0.01))
