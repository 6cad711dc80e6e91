"""The trainer: results that are bit-identical to those of a hand-written loop, evaluation, early stop, predictions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from trainer_files import config_of, fit, summary, write_clicks, write_config

import persia
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.errors import CheckpointError, ConfigError, UsageError
from persia.features import to_batch
from persia.models import DCNv2
from persia.nn import EmbeddingCollection, TableConfig
from persia.trainer import EvaluationReport, StepReport, Trainer, models, prediction
from persia.trainer.batches import TrainingBatches
from persia.trainer.parts import Parts

Tensors = list[torch.Tensor]


def state_of(checkpoint: Path, name: str = "dense.pt") -> dict[str, Any]:
    state: dict[str, Any] = torch.load(checkpoint / name, weights_only=True)
    return state


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Return the files with the rows and the model of a checkpoint."""
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.suffix in (".arrow", ".pt")}


# --- bit-identical results


def test_trainer_a_loop_and_a_collection_give_equal_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, data={"split": {"fractions": [0.9, 0.1, 0.0]}, "epochs": 2})
    trainer, _ = fit(config)
    assert trainer.folder is not None
    transform = config.compiled.load((trainer.folder.path / "transform.json").read_text())
    probe = transform(pa.parquet.read_table(config.folder / "clicks.parquet").slice(0, 200))
    with Trainer(config).resume(trainer.folder.path) as again:
        again.evaluate()
        assert again._loaded is not None
        with eval_ctx(model=again._loaded.model) as ctx:
            by_trainer = ctx.prepare_features(to_batch(probe))[1]
        weights = {name: value.clone() for name, value in again._loaded.model.state_dict().items()}
    part = Parts(config).train

    def batches() -> TrainingBatches:
        reader = part.reader(128, shuffle=True, epochs=2, seed=0)
        return TrainingBatches(part, reader, transform, None)

    def optimizer() -> Adagrad:
        return Adagrad(0.1, initial_accumulator_value=1e-6 * (1024 / 128) ** 2, vectorwise_shared=True)

    def model() -> DCNv2:
        torch.manual_seed(0)
        return DCNv2(1, [4, 4, 4], cross_layers=1, deep_mlp=[8])

    loss_fn = torch.nn.BCEWithLogitsLoss()
    by_hand = model()
    dense_optimizer = torch.optim.Adam(by_hand.parameters())
    new_rows = EmbeddingConfig((-0.05, 0.05))
    slots = models.slots_of(config)
    with TrainCtx(
        optimizer(),
        dense_optimizer,
        mixed_precision=False,
        model=by_hand,
        embedding_config=new_rows,
        configuration=slots,
    ) as train_ctx:
        for batch in DataLoader(batches(), reproducible=True):
            output, labels = train_ctx.forward(batch)
            train_ctx.backward(loss_fn(output, labels[0]))
        with eval_ctx(model=by_hand) as ctx:
            by_loop = ctx.prepare_features(to_batch(probe))[1]

    monkeypatch.setenv("REPRODUCIBLE", "1")
    own = model()
    dense_optimizer = torch.optim.Adam(own.parameters())
    tables = [TableConfig(slot, 4, [slot]) for slot in transform.slots]
    collection = EmbeddingCollection(tables, optimizer(), new_rows)
    for rows in part.reader(128, shuffle=True, epochs=2, seed=0):
        samples = transform(rows)
        vectors = collection({slot: samples.ids(slot)[0] for slot in transform.slots})
        output = own([torch.from_numpy(samples.dense)], [*vectors.values()])
        loss_fn(output, torch.from_numpy(samples.label("label")).view(-1, 1)).backward()
        dense_optimizer.step()
        dense_optimizer.zero_grad()
    collection.eval()
    by_collection = [*collection({slot: probe.ids(slot)[0] for slot in transform.slots}).values()]
    collection.close()

    assert any(bool(rows.any()) for rows in by_trainer)
    for rows, of_loop, of_collection in zip(by_trainer, by_loop, by_collection, strict=True):
        assert torch.equal(rows, of_loop)
        assert torch.equal(rows, of_collection)
    assert_equal(weights, by_hand.state_dict())
    assert_equal(weights, own.state_dict())


def test_a_run_that_is_left_and_resumed_equals_one_that_is_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data": {"epochs": 2},
        "train": {"lr_schedule": "cosine", "warmup": 3, "clip_norm": 0.5, "early_stop": {"patience": 9}},
    }
    whole, reports = fit(config_of(tmp_path, **options))
    config = config_of(tmp_path, **options, run={"name": "two"})
    with Trainer(config) as trainer:
        for report in trainer.fit():
            if isinstance(report, StepReport) and report.step == 8:
                break  # the newest checkpoint is that of step 5
    assert summary(trainer)["status"] == "interrupted"
    assert trainer.folder is not None and whole.folder is not None
    with Trainer(config).resume() as resumed:
        more = [*resumed.fit()]
    assert resumed.folder is not None and resumed.folder.path == trainer.folder.path
    assert next(each.step for each in more if isinstance(each, StepReport)) == 8
    last = max(each.step for each in reports)  # the last report is that of the best step
    one, two = (folder / "checkpoints" / f"step-{last}" for folder in (whole.folder.path, resumed.folder.path))
    assert_equal(state_of(one), state_of(two))
    rows = [path.name for path in one.glob("*.arrow")]
    assert rows
    for name in rows:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert_equal_results(summary(whole), summary(resumed))
    evaluations = [
        [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" not in line]
        for folder in (whole.folder.path, resumed.folder.path)
    ]
    assert evaluations[0] == evaluations[1]


def assert_equal_results(one: dict[str, Any], two: dict[str, Any]) -> None:
    for key in ("status", "step", "early_stopped", "unusual", "best", "embedding_rows"):
        assert one[key] == two[key], key
    for part in ("valid", "test"):
        assert {**one[part], "seconds": 0} == {**two[part], "seconds": 0}


# --- a run


def test_a_run_and_its_folder(tmp_path: Path) -> None:
    trainer, reports = fit(config_of(tmp_path))
    assert trainer.folder is not None
    folder = trainer.folder.path
    found = summary(trainer)
    assert found["status"] == "finished" and found["rows"]["train"] == 1615 and found["step"] == 13
    steps = [each for each in reports if isinstance(each, StepReport)]
    assert [each.step for each in steps] == [4, 8, 12, 13]
    assert steps[-1].loss < steps[0].loss
    assert all(abs(sum(each.shares.values()) - 1) < 1e-6 for each in steps)
    parts = [each.part for each in reports if isinstance(each, EvaluationReport)]
    assert parts[-1] == "test" and {*parts[:-1]} == {"valid"}
    assert (folder.parent / "LATEST").read_text() == "one\n"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(reports) and lines[-1]["test"]["label"]["auc"] == found["test"]["labels"]["label"]["auc"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "") and "data:image/png;base64," in page
    assert f"{found['test']['labels']['label']['auc']:.4f}" in page
    again = persia.load_config(folder / "persia.yml")
    assert again.data.train == str(tmp_path / "clicks.parquet")
    assert again.train.embedding_optimizer.arguments["vectorwise_shared"] is True


def test_a_model_learns(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.parquet", 20_000)
    options: dict[str, Any] = {"data": {"epochs": 3, "batch_size": 512}, "train": {"metrics": ["auc", "ne"]}}
    trainer, _ = fit(config_of(tmp_path, **options))
    label = summary(trainer)["test"]["labels"]["label"]
    assert label["auc"] > 0.68 and label["ne"] < 0.95  # a model without information has 0.5 and 1


def test_training_stops_early_and_keeps_the_best(tmp_path: Path) -> None:
    train_block = {"early_stop": {"patience": 2}, "evaluate_every": 2, "dense_optimizer": {"name": "adam", "lr": 0.2}}
    config = config_of(tmp_path, data={"epochs": 20}, train=train_block)
    trainer, reports = fit(config)
    found = summary(trainer)
    valid = [each for each in reports if isinstance(each, EvaluationReport) and each.part == "valid"]
    values = [each.value("auc") or 0.0 for each in valid]
    best = int(np.argmax(values))
    assert found["early_stopped"] and found["step"] == valid[-1].step < found["total_steps"]
    assert len(valid) == best + 3
    assert found["valid"]["step"] == valid[best].step  # the table shows the model that is used
    assert found["best"]["step"] == valid[best].step and found["best"]["value"] == values[best]
    assert [each.is_best for each in valid][best] and not any(each.is_best for each in valid[best + 1 :])
    assert trainer.folder is not None
    kept = [path.name for path in Path(trainer.folder.best).glob("step-*")]
    assert f"step-{valid[best].step}" in kept and len(kept) <= 2
    assert reports[-1].step == valid[best].step  # the test set is scored with the best model
    with Trainer(config).resume() as again:
        assert [*again.fit()] == []  # the run is finished
        assert again.evaluate().labels == reports[-1].labels  # type: ignore[union-attr]


def test_predictions_equal_the_scores_of_evaluation(tmp_path: Path) -> None:
    trainer, _ = fit(config_of(tmp_path))
    assert trainer.folder is not None
    rows = pa.parquet.read_table(tmp_path / "clicks.parquet").slice(100, 300)
    pa.parquet.write_table(rows, tmp_path / "some.parquet")
    pa.parquet.write_table(
        rows.drop_columns(["label", "dense1"]).append_column("dense1", rows["dense1"]), tmp_path / "unlabelled.parquet"
    )
    out = tmp_path / "scores.parquet"
    with Trainer(trainer.config).resume(trainer.folder.path) as again:
        judged = again.evaluate(str(tmp_path / "some.parquet"))
        written = prediction.write(again, str(tmp_path / "unlabelled.parquet"), out, keep=["id1"])
    assert written.unusual.rows == 300
    scores = pa.parquet.read_table(out)
    assert scores.column_names == ["id1", "score"] and scores["id1"].equals(rows["id1"])
    from persia.trainer import metrics

    found = np.asarray(scores["score"], np.float64)
    expected = metrics.auc(found, np.asarray(rows["label"], np.float64), np.ones(300))
    assert judged.labels["label"].values["auc"] == pytest.approx(expected, abs=1e-12)
    mean = metrics.calibration(found, np.asarray(rows["label"], np.float64), np.ones(300))
    assert judged.labels["label"].values["calibration"] == pytest.approx(mean, rel=1e-6)


def test_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    trainer, _ = fit(config_of(tmp_path))
    assert trainer.folder is not None
    first = trainer.folder.saves(trainer.config) / "step-10"
    with Trainer(trainer.config).resume(first) as early, Trainer(trainer.config) as late:
        report = early.evaluate()
        early.close()
        assert report.step == 10 and late.resume(trainer.folder.path.parent / "LATEST").evaluate().step == 13


def test_save_and_evaluate_between_reports(tmp_path: Path) -> None:
    with Trainer(config_of(tmp_path, checkpoint={"every": 1000}, run={"log_every": 1})) as trainer:
        with pytest.raises(UsageError, match="nothing is being trained"):
            trainer.save()
        reports = trainer.fit()
        next(reports)
        path = trainer.save()
        assert path.name == "step-1" and Path(path, "MANIFEST.json").exists()
        assert trainer.evaluate(str(tmp_path / "clicks.parquet")).step == 1
        for _ in reports:
            pass
        assert trainer.evaluate().step == 13
        with pytest.raises(UsageError, match="create a new Trainer"):
            trainer.fit()


# --- resume


def test_another_configuration_or_transform_is_refused(tmp_path: Path) -> None:
    trainer, _ = fit(config_of(tmp_path))
    with pytest.raises(ConfigError, match=r"train.seed: 0 in the run, 7 now"):
        Trainer(config_of(tmp_path, train={"seed": 7})).resume().fit()
    assert trainer.folder is not None
    path = trainer.folder.path / "transform.json"
    other = config_of(tmp_path)
    rows = pa.parquet.read_table(tmp_path / "clicks.parquet").slice(0, 100)
    path.write_text(other.compiled.fit(rows).to_json())
    (trainer.folder.path / "summary.json").unlink()
    with Trainer(other).resume() as again, pytest.raises(CheckpointError, match="ids, floats or labels would differ"):
        again.fit()


def test_more_epochs_continue_a_finished_run(tmp_path: Path) -> None:
    fit(config_of(tmp_path))
    with Trainer(config_of(tmp_path, data={"epochs": 2})).resume() as again:
        reports = [*again.fit()]
    assert reports[0].step > 13 and reports[-1].step == 26


def test_a_run_that_exists_is_not_replaced(tmp_path: Path) -> None:
    fit(config_of(tmp_path))
    with pytest.raises(UsageError, match="a run of this name already exists") as caught:
        Trainer(config_of(tmp_path)).fit()
    assert "--resume" in caught.value.hint
    with pytest.raises(UsageError, match="no run"):
        Trainer(config_of(tmp_path, run={"name": "never"})).resume()


def test_split_by_time_and_by_files(tmp_path: Path) -> None:
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet"))
    pa.parquet.write_table(table.append_column("at", pa.array(np.arange(2000))), tmp_path / "clicks.parquet")
    split = {"by": "time", "column": "at", "valid": 1000, "test": 1500}
    trainer, _ = fit(config_of(tmp_path, data={"split": split}))
    found = summary(trainer)
    assert [found["rows"]["train"], *(found[part]["labels"]["label"]["rows"] for part in ("valid", "test"))] == [
        1000,
        500,
        500,
    ]
    files = {"valid": "clicks.parquet", "split": {"by": "file"}}
    trainer, _ = fit(config_of(tmp_path, data=files, run={"name": "files"}))
    found = summary(trainer)
    assert found["rows"]["train"] == found["valid"]["labels"]["label"]["rows"] == 2000 and "test" not in found
    own = {"test": "clicks.parquet", "split": {"by": "time", "column": "at", "valid": 1000}}
    trainer, _ = fit(config_of(tmp_path, data=own, run={"name": "own"}))
    found = summary(trainer)
    assert (found["rows"]["train"], found["test"]["labels"]["label"]["rows"]) == (1000, 2000)


def test_a_trainer_restores_the_settings_of_torch(tmp_path: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    config = persia.load_config(write_config(tmp_path), ["train.threads=2"])
    write_clicks(tmp_path / "clicks.parquet")
    with Trainer(config) as trainer:
        next(trainer.fit())
        assert torch.get_num_threads() == 2 and torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled() is before


# --- sources and baselines


def test_files_and_batches_of_ones_own(tmp_path: Path) -> None:
    write_clicks(tmp_path / "more.parquet", 3000)
    config = config_of(tmp_path, data={"split": {"fractions": [1, 0, 0]}})
    with Trainer(config) as trainer:
        steps = [report.step for report in trainer.fit(str(tmp_path / "more.parquet"))]
    assert steps[-1] == 24 and summary(trainer)["rows"]["train"] == 3000
    part = Parts(config).train
    transform = config.compiled.fit(pa.parquet.read_table(tmp_path / "clicks.parquet"))
    given = TrainingBatches(part, part.reader(500), transform, None)
    config = config_of(tmp_path, data={"split": {"fractions": [1, 0, 0]}}, run={"name": "own", "log_every": 1})
    with Trainer(config) as trainer:
        assert [report.step for report in trainer.fit(given)] == [1, 2, 3, 4]
