"""The memory that a run needs, estimated before it starts."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from conftest import Configure, TinyModel, insert_rows
from trainer_files import config_of, fit, write_config

import persia
from persia.ctx import TrainCtx
from persia.embedding import EmbeddingConfig
from persia.trainer import optimizers, sizing
from persia.trainer.parts import Parts

ROWS = 1_000_000


@pytest.mark.parametrize(
    ("optimizer", "feature"),
    [
        ({"name": "adagrad"}, {"dim": 16}),
        ({"name": "adam"}, {"dim": 8}),
        ({"name": "sgd", "lr": 0.1}, {"dim": 32, "dtype": "f16"}),
    ],
    ids=["adagrad", "adam", "sgd f16"],
)
def test_the_estimate_of_a_million_rows_is_what_they_take(
    configure: Configure, tmp_path: Path, optimizer: dict[str, Any], feature: dict[str, Any]
) -> None:
    features = {"id0": {"type": "id", **feature}}
    config = config_of(tmp_path, features=features, train={"embedding_optimizer": optimizer})
    estimated = sizing.estimate(config, {"id0": ROWS}, torch.nn.Linear(1, 1), sizing.Place()).server
    settings = ", ".join(f"{key}: {value}" for key, value in feature.items())
    configure(f"id0: {{{settings}}}", capacity=2 * ROWS)
    model = TinyModel(embeddings=feature["dim"])
    with TrainCtx(
        optimizers.of_rows(config.train, 1),
        torch.optim.SGD(model.parameters(), 0.1),
        mixed_precision=False,
        model=model,
        embedding_config=EmbeddingConfig((-0.1, 0.1)),
    ) as ctx:
        insert_rows(ctx, ["id0"], range(ROWS))
        stats = ctx.engine.stats()
    assert stats["rows"] == {"id0": ROWS}
    assert estimated == pytest.approx(stats["memory_bytes"], rel=0.25)


def clicks(path: Path, rows: int, ids: int, repeats: bool = True) -> None:
    rng = np.random.default_rng(0)
    names = rng.integers(0, ids, rows) if repeats else np.arange(rows)
    pa.parquet.write_table(pa.table({"id0": names, "label": rng.integers(0, 2, rows)}), path)


@pytest.mark.parametrize(
    ("rows", "ids", "repeats"), [(50_000, 1000, True), (400_000, 1000, True), (400_000, 400_000, False)]
)
def test_ids_are_counted_or_extrapolated(tmp_path: Path, rows: int, ids: int, repeats: bool) -> None:
    clicks(tmp_path / "clicks.parquet", rows, ids, repeats)
    features = {"id0": {"type": "id", "dim": 4}}
    config = persia.load_config(
        write_config(tmp_path, features=features, data={"split": {"by": "file"}, "test": "clicks.parquet"})
    )
    found = sizing.of_config(config)
    (table,) = found.tables
    assert found.is_exact == (rows <= sizing.SAMPLE)
    assert table.rows == pytest.approx(ids, rel=0 if found.is_exact else 0.25)
    assert Parts(config).count_train() == rows


def test_a_capacity_bounds_the_rows(configure: Configure, tmp_path: Path) -> None:
    configure("a: {dim: 4}", capacity=500)
    config = config_of(tmp_path)
    found = sizing.estimate(config, {"id0": 600, "id1": 400}, torch.nn.Linear(1, 1), sizing.Place())
    assert {table.name: table.rows for table in found.tables} == {"id0": 300, "id1": 200}


def test_the_parts_of_a_job_are_added_up(tmp_path: Path) -> None:
    config = config_of(tmp_path, train={"dense_optimizer": {"name": "adam"}, "staleness": 1})
    model = torch.nn.Linear(999, 1000)
    alone = sizing.estimate(config, {"id0": 1000, "id1": 1000}, model, sizing.Place())
    assert alone.dense == 4 * 1_000_000 * 4
    assert alone.trainer == sizing.BASE + alone.dense + alone.batches + alone.server
    two = sizing.estimate(config, {"id0": 1000, "id1": 1000}, model, sizing.Place(2, servers_here=1, ranks_here=3))
    assert two.server == alone.server // 2
    assert two.here == two.server + 3 * two.trainer
    assert "each of 2 servers" in str(two) and "servers on other hosts: 1 of 2" in str(two)


def test_shards_need_a_part_of_the_states_and_the_whole_model_beside_them(tmp_path: Path) -> None:
    adam = {"dense_optimizer": {"name": "adam"}}
    model = torch.nn.Linear(999, 1000)
    whole, sharded = config_of(tmp_path, train=adam), config_of(tmp_path, train=adam, parallel="fsdp")
    found = {
        (config.parallel, ranks): sizing.estimate(config, {}, model, sizing.Place(ranks=ranks)).dense
        for config in (whole, sharded)
        for ranks in (1, 4)
    }
    copy = 4 * 1_000_000
    assert found["ddp", 1] == found["ddp", 4] == found["fsdp", 1] == 4 * copy
    # The script's model, gathered weights and both states of Adam, and a quarter of weights, gradients and states.
    assert found["fsdp", 4] == (1 + 3 + 1) * copy
    plain = config_of(tmp_path, train={"dense_optimizer": {"name": "sgd"}}, parallel="fsdp")
    assert sizing.dense_bytes(plain, model, 4) == 3.5 * copy  # in a step: whole weights and gradients


def test_a_run_says_what_it_needs_and_warns_where_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    trainer, _ = fit(config_of(tmp_path))
    found = trainer.sizing
    assert found is not None and found.fits and {table.name for table in found.tables} == {"id0", "id1", "level"}
    assert "memory: trainer" in str(found) and "fits in the" in str(found)
    assert not [message for message in caplog.messages if "does not fit" in message]
    monkeypatch.setattr(sizing, "available", lambda: 100 << 20)
    trainer, _ = fit(config_of(tmp_path, run={"name": "two"}))
    assert trainer.sizing is not None and not trainer.sizing.fits
    (warning,) = {message for message in caplog.messages if "does not fit" in message}
    for knob in ("`dim`", "dtype: f16", "admission", "capacity", "--servers"):
        assert knob in warning
