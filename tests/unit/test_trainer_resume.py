"""Resuming a run with other files, another configuration, a lost file, or a changed early stop."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from trainer_files import config_of, fit, write_clicks

from persia.config import Config
from persia.errors import ConfigError, DataError, UsageError
from persia.trainer import EvaluationReport, StepReport, Trainer
from persia.trainer.run_folder import FACTS, find_checkpoint

STOP: dict[str, Any] = {"early_stop": {"patience": 1}, "evaluate_every": 1}
FAST = {"dense_optimizer": {"name": "adam", "lr": 0.3}}  # so fast that the metric soon gets worse


def small(folder: Path, **blocks: Any) -> Config:
    """Return a configuration like ``config_of``, with 500 rows in a folder."""
    (folder / "rows").mkdir(exist_ok=True)
    if not (folder / "rows" / "b.parquet").exists():
        write_clicks(folder / "rows" / "b.parquet", 500)
    return config_of(folder, **{**blocks, "data": {"train": "rows", "batch_size": 50, **blocks.get("data", {})}})


def stopped_early(folder: Path) -> tuple[Config, Trainer]:
    """Return a run that has stopped early, long before the end of its epochs."""
    config = small(folder, data={"epochs": 20}, train={**STOP, **FAST})
    trainer, _ = fit(config)
    assert trainer.folder is not None
    found = trainer.folder.read_json("summary.json")
    assert found["early_stopped"] and found["step"] < found["total_steps"]
    return config, trainer


def interrupted(config: Config, step: int) -> None:
    """Train up to a step, and save."""
    with Trainer(config) as trainer:
        for report in trainer.fit():
            if isinstance(report, StepReport) and report.step == step:
                trainer.save()
                return


def test_one_process_does_not_continue_the_run_of_a_job(tmp_path: Path) -> None:
    """The run of a job is not changed, and its model can be used."""
    config = small(tmp_path)
    trainer, _ = fit(config)
    folder = trainer.folder
    assert folder is not None
    folder.write_json(FACTS, {**folder.read_json(FACTS), "checkpoints": str(folder.path / "checkpoints")})
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with Trainer(config).resume(folder.path) as again:
        with pytest.raises(UsageError, match="trained by the ranks of a job; one process cannot continue it") as caught:
            again.fit()
        assert f"persia up persia.yml --name {folder.path.name}" in caught.value.hint
        assert again.evaluate().labels["label"].rows > 0
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


# --- other files


def test_rows_of_other_files_are_never_scored_as_the_test_part(tmp_path: Path) -> None:
    config = small(tmp_path)
    fit(config)
    write_clicks(tmp_path / "rows" / "a.parquet", 500)  # the rows of b.parquet would be divided differently
    with Trainer(config).resume() as again:
        with pytest.raises(DataError, match=r"data\.train.*added: a\.parquet") as caught:
            again.evaluate()
        assert "evaluate(FILE)" in caught.value.hint or "persia eval" in caught.value.hint
        given = again.evaluate(str(tmp_path / "rows" / "a.parquet"))
        assert given.labels["label"].rows == 500
    with Trainer(config).resume() as again, pytest.raises(DataError, match=r"added: a\.parquet"):
        again.fit()
    (tmp_path / "rows" / "b.parquet").unlink()
    with Trainer(config).resume() as again, pytest.raises(DataError, match=r"missing: b\.parquet"):
        again.evaluate()


def test_a_test_part_of_its_own_may_be_replaced(tmp_path: Path) -> None:
    write_clicks(tmp_path / "test.parquet", 200)
    config = small(tmp_path, data={"test": "test.parquet"})
    fit(config)
    write_clicks(tmp_path / "rows" / "a.parquet", 500)
    with Trainer(config).resume() as again:
        assert again.evaluate().labels["label"].rows == 200


def test_an_evaluation_refuses_another_configuration(tmp_path: Path) -> None:
    fit(small(tmp_path))
    other = small(tmp_path, data={"split": {"seed": 5}})
    with Trainer(other).resume() as again, pytest.raises(ConfigError, match=r"data\.split\.seed: 0 in the run, 5 now"):
        again.evaluate()


def test_files_given_to_fit_are_those_of_evaluate(tmp_path: Path) -> None:
    config = small(tmp_path)
    write_clicks(tmp_path / "more.parquet", 900)
    with Trainer(config) as trainer:
        reports = [*trainer.fit(str(tmp_path / "more.parquet"))]
        tested = reports[-1]
        assert isinstance(tested, EvaluationReport) and tested.part == "test"
        assert trainer.evaluate().labels == tested.labels
    message = r"added: b\.parquet; missing: more\.parquet"
    with Trainer(config).resume() as again, pytest.raises(DataError, match=message):
        again.evaluate()


# --- another early stop


def test_another_metric_begins_a_best_of_its_own(tmp_path: Path) -> None:
    interrupted(small(tmp_path, train={"early_stop": {"patience": 9}, "evaluate_every": 2}), 4)
    other = small(tmp_path, train={"early_stop": {"patience": 9, "metric": "loss"}, "evaluate_every": 2})
    with Trainer(other).resume() as again:
        reports = [*again.fit()]
    valid = [each for each in reports if isinstance(each, EvaluationReport) and each.part == "valid"]
    assert again.folder is not None
    best = again.folder.read_json("summary.json")["best"]
    losses = {each.step: each.loss for each in valid if each.loss is not None}
    assert best["metric"] == "loss" and best["value"] == min(losses.values()) == losses[best["step"]]
    assert valid[0].is_best


def test_a_run_without_an_early_stop_uses_its_last_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    interrupted(small(tmp_path, train={"early_stop": {"patience": 9}, "evaluate_every": 2}), 4)
    with Trainer(small(tmp_path, train={"evaluate_every": 2})).resume() as again:
        reports = [*again.fit()]
    steps = [each.step for each in reports if isinstance(each, StepReport)]
    assert reports[-1].step == steps[-1], "the test set was scored with the best of the earlier early stop"
    assert again.folder is not None
    assert find_checkpoint(again.folder.path).step == steps[-1]
    assert f"deletes the best checkpoint, {again.folder.path}/best/step-" in caplog.text


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (None, "no evaluation during training, because there is no validation set; to evaluate: set data.valid"),
        (2, "train.evaluate_every=2 has no effect, because there is no validation set; next: set data.valid"),
    ],
)
def test_a_run_without_a_validation_set_says_why_it_is_not_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int | None, said: str
) -> None:
    caplog.set_level("INFO", "persia")
    fit(small(tmp_path, data={"split": {"fractions": [0.9, 0, 0.1]}}, train={"evaluate_every": every}))
    assert f"{said}, or a share in data.split.fractions" in caplog.text


@pytest.mark.parametrize("change", ["patience", "epochs"])
def test_a_run_that_stopped_early_continues_if_it_may(tmp_path: Path, change: str) -> None:
    config, trainer = stopped_early(tmp_path)
    assert trainer.folder is not None
    step = trainer.folder.read_json("summary.json")["step"]
    with Trainer(config).resume() as again:
        assert [*again.fit()] == []
    stop = {"early_stop": {"patience": 3 if change == "patience" else 1}}
    epochs = 21 if change == "epochs" else 20
    more = small(tmp_path, data={"epochs": epochs}, train={**STOP, **FAST, **stop})
    with Trainer(more).resume() as again:
        reports = [*again.fit()]
    steps = [each.step for each in reports if isinstance(each, EvaluationReport) and each.part == "valid"]
    assert steps and steps[0] > step
    assert again.folder is not None and again.folder.read_json("summary.json")["status"] == "finished"


# --- lost files


def test_a_best_checkpoint_that_is_lost_is_judged_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"train": {"early_stop": {"patience": 9}, "evaluate_every": 2}}
    interrupted(small(tmp_path, **options), 4)
    shutil.rmtree(tmp_path / "runs" / "one" / "best")
    with Trainer(small(tmp_path, **options)).resume() as again:
        reports = [*again.fit()]
    assert "best" in caplog.text and "is missing" in caplog.text
    valid = [each for each in reports if isinstance(each, EvaluationReport) and each.part == "valid"]
    assert valid[0].is_best and isinstance(reports[-1], EvaluationReport) and reports[-1].part == "test"


def test_a_run_that_stopped_and_lost_its_best_checkpoint_trains_on(tmp_path: Path) -> None:
    config, trainer = stopped_early(tmp_path)
    assert trainer.folder is not None
    path = trainer.folder.path
    shutil.rmtree(path / "best")
    trainer.folder.write_json("summary.json", {**trainer.folder.read_json("summary.json"), "status": "interrupted"})
    with Trainer(config).resume() as again:
        assert isinstance([*again.fit()][-1], EvaluationReport)
    found = again.folder.read_json("summary.json") if again.folder else {}
    assert found["status"] == "finished" and (path / found["best"]["checkpoint"]).is_dir()


def test_the_best_checkpoint_is_uploaded_beside_the_saves(tmp_path: Path) -> None:
    for name in ("", "best"):  # folders that represent an object store
        (tmp_path / "store" / "one" / name).mkdir(parents=True, exist_ok=True)
    upload = {"upload_to": f"file://{tmp_path}/store"}
    trainer, reports = fit(small(tmp_path, train={"early_stop": {}, "evaluate_every": 3}, checkpoint=upload))
    assert trainer.folder is not None
    best = trainer.folder.read_json("summary.json")["best"]["step"]
    assert reports[-1].step == best
    assert [path.name for path in (tmp_path / "store" / "one" / "best").iterdir()] == [f"step-{best}"]
    assert (tmp_path / "store" / "one" / "best" / f"step-{best}" / "MANIFEST.json").exists()
