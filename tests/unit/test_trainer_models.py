"""Labels, weights and models of the trainer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from trainer_files import FEATURES, config_of, fit, summary, write_clicks

from persia.errors import ConfigError
from persia.models import DCNv2
from persia.trainer import EvaluationReport, StepReport, Trainer, models, prediction

# --- labels, weights, models


def test_several_labels_with_weights(tmp_path: Path) -> None:
    labels = {"label": {}, "steep": {"column": "dense1", "loss": "mse", "weight": 0.25}}
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet"))
    weights = pa.array(np.arange(len(table)) % 3, pa.int32())
    pa.parquet.write_table(table.append_column("times", weights), tmp_path / "clicks.parquet")
    features = {name: feature for name, feature in FEATURES.items() if name != "level"}  # level is read from dense1
    trainer, reports = fit(config_of(tmp_path, features=features, labels=labels, train={"weight": "times"}))
    last = reports[-1]
    assert isinstance(last, EvaluationReport) and [*last.labels] == ["label", "steep"]
    assert {*last.labels["steep"].values} == {"mse", "mae", "calibration"}
    log_loss, mse = last.labels["label"].values["log_loss"], last.labels["steep"].values["mse"]
    assert log_loss is not None and mse is not None and last.loss == pytest.approx(log_loss + 0.25 * mse)
    assert trainer.folder is not None
    with Trainer(trainer.config).resume() as again:
        written = prediction.write(again, str(tmp_path / "clicks.parquet"), tmp_path / "out.parquet")
    assert written.columns == ["score_label", "score_steep"]


def test_rows_of_weight_0_change_nothing(tmp_path: Path) -> None:
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet", 1000))
    flipped = table.set_column(table.column_names.index("label"), "label", pa.array(1 - np.asarray(table["label"])))
    both = pa.concat_tables(
        [table.append_column("w", pa.array(np.ones(1000))), flipped.append_column("w", pa.array(np.zeros(1000)))]
    )
    order = np.arange(2000).reshape(2, 1000).T.reshape(-1)  # a row, and the same row with weight 0
    pa.parquet.write_table(both.take(pa.array(order)), tmp_path / "clicks.parquet")
    data = {"shuffle": False, "split": {"fractions": [1, 0, 0]}}
    optimizer = {"embedding_optimizer": {"name": "adam", "lr": 0.01}}
    _, reports = fit(config_of(tmp_path, data=data, train={**optimizer, "weight": "w"}))
    pa.parquet.write_table(table, tmp_path / "clicks.parquet")
    _, expected = fit(config_of(tmp_path, data={**data, "batch_size": 64}, train=optimizer, run={"name": "two"}))
    for one, other in zip(reports, expected, strict=True):
        assert isinstance(one, StepReport) and isinstance(other, StepReport)
        assert one.loss == pytest.approx(other.loss, rel=1e-4)


def test_gauc_and_metrics_that_are_not_defined(tmp_path: Path) -> None:
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet"))
    config = config_of(tmp_path, train={"metrics": ["auc", "ne", "gauc"], "gauc_group": "id0"})
    _, reports = fit(config)
    last = reports[-1]
    assert isinstance(last, EvaluationReport)
    assert 0 < (last.value("gauc") or 0) < 1
    pa.parquet.write_table(table.filter(pa.compute.equal(table["label"], 0)), tmp_path / "none.parquet")
    with Trainer(config).resume() as again:
        report = again.evaluate(str(tmp_path / "none.parquet"))
    found = report.labels["label"]
    assert found.values == {"auc": None, "ne": None, "gauc": None}
    assert found.notes["auc"] == "all labels are 0" and "both classes" in found.notes["gauc"]
    json.dumps(report.results(), allow_nan=False)


OWN = """
import torch

class Own(torch.nn.Module):
    def __init__(self, num_dense, embedding_dims, num_labels, width=4):
        super().__init__()
        self.layer = torch.nn.Linear(num_dense + sum(embedding_dims), num_labels)

    def forward(self, dense, embeddings):
        return self.layer(torch.cat(dense + embeddings, 1))
"""


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own_model_of_a_test.py").write_text(OWN)
    trainer, _ = fit(config_of(tmp_path, model={"class": "own_model_of_a_test:Own", "width": 8}))
    assert trainer.folder is not None
    with Trainer(trainer.folder.config()).resume(trainer.folder.path) as again:
        assert again.evaluate().step == 13  # found in the folder of persia.yml, not in that of the run
    given, _ = fit(config_of(tmp_path, run={"name": "two"}), model=DCNv2(1, [4, 4, 4]))
    assert summary(given)["status"] == "finished"


def test_sequences_are_pooled_for_models_that_take_vectors(tmp_path: Path) -> None:
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet"))
    ids = np.asarray(table["id0"])
    lists = pa.array([[int(ids[row - place]) for place in range(row % 4)] for row in range(len(table))])
    pa.parquet.write_table(table.append_column("history", lists), tmp_path / "clicks.parquet")
    history = {"type": "sequence", "last": 2, "table": "id0", "dim": 4}
    features = {"id0": {"type": "id", "dim": 4, "values": "integer"}, "history": {**history, "values": "integer"}}
    trainer, _ = fit(config_of(tmp_path, features=features))
    assert summary(trainer)["unusual"]["counts"]["history"]["truncated"] > 0
    raw = torch.tensor([[[1.0, 2.0, 1.0], [3.0, 6.0, 1.0]], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    pooled = models.PooledSequences(torch.nn.Identity())
    pooled.model.forward = lambda dense, embeddings: embeddings[0]
    assert pooled([], [raw]).tolist() == [[2.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"model": {"name": "dcnv3"}}, "dcnv3"),
        ({"model": {"name": "dcnv2", "cross_layer": 2}}, "cross_layer"),
        ({"model": {"name": "dcnv2", "cross_layers": 0}}, "cross_layers"),
        ({"model": {"class": "nowhere_at_all:Model"}}, "nowhere_at_all"),
        ({"model": {"class": "json:Model"}}, "json"),
        ({"train": {"embedding_optimizer": {"name": "adagrad", "lrr": 1}}}, "lrr"),
        ({"train": {"embedding_optimizer": {"name": "lion"}}}, "lion"),
        ({"train": {"dense_optimizer": {"name": "adam", "lr": -1}}}, "dense_optimizer"),
        ({"train": {"lr_schedule": "linear", "warmup": 99}}, "train.warmup: 99 steps, but the run has 13"),
        ({"train": {"early_stop": {}}, "data": {"split": {"fractions": [1, 0, 0]}}}, "early_stop"),
        ({"train": {"metrics": ["gauc"]}}, "gauc"),
        ({"data": {"split": {"by": "time"}}}, "column"),
    ],
)
def test_a_mistake_of_the_configuration_is_named_before_anything_is_made(
    tmp_path: Path, blocks: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message), Trainer(config_of(tmp_path, **blocks)) as trainer:
        trainer.fit()
    assert not (tmp_path / "runs" / "one").exists()
