"""Failures of a run: NaN outputs, a full disk, a mistake in a call, an invalid value in the data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from conftest import Configure
from trainer_files import config_of, fit, write_clicks

from persia.checkpoint.snapshot import Save
from persia.config import Config
from persia.ctx import eval_ctx
from persia.errors import DataError, StorageError, UsageError
from persia.trainer import EvaluationReport, StepReport, Trainer, fit_once, metrics, pages, progress
from persia.trainer.batches import groups_of
from persia.trainer.parts import Parts
from persia.trainer.run_folder import Found, RunFolder


def small(folder: Path, **blocks: Any) -> Config:
    """Return a configuration like ``config_of``, with 500 rows."""
    if not (folder / "clicks.parquet").exists():
        write_clicks(folder / "clicks.parquet", 500)
    return config_of(folder, **{**blocks, "data": {"batch_size": 100, **blocks.get("data", {})}})


class Nan(torch.nn.Module):
    """A model whose outputs are finite in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return a logit for each row, of which the first is NaN in an evaluation."""
        del dense
        output: torch.Tensor = self.layer(embeddings[0])
        if not self.training:
            output = output.clone()
            output[0] = float("nan")
        return output


# --- outputs that are not finite


def test_outputs_that_are_not_finite_have_no_metric() -> None:
    names = ["auc", "log_loss", "ne", "calibration", "gauc"]
    found = metrics.binary([0.1, np.nan, np.inf, 0.2], [0, 1, 1, 0], names, None, [1, 1, 1, 1])
    assert found.values == dict.fromkeys(names)
    assert {*found.notes.values()} == {"2 outputs are NaN or infinite"}
    found = metrics.regression([0.1, np.nan], [0, 1], ["calibration"])
    assert found.values == dict.fromkeys(["mse", "mae", "calibration"])
    assert found.notes["mse"] == "1 output is NaN or infinite"


@pytest.mark.parametrize("metric", ["auc", "loss"])
def test_outputs_that_are_nan_are_never_the_best(tmp_path: Path, metric: str) -> None:
    config = small(tmp_path, train={"early_stop": {"metric": metric, "patience": 2}, "evaluate_every": 1})
    trainer, reports = fit(config, model=Nan())
    valid = [each for each in reports if isinstance(each, EvaluationReport) and each.part == "valid"]
    assert [each.is_best for each in valid] == [False, False]
    assert all(each.loss is None and each.value("auc") is None for each in valid)
    assert trainer.folder is not None
    lines = (trainer.folder.path / "metrics.jsonl").read_text().splitlines()
    for text in (*lines, (trainer.folder.path / "summary.json").read_text()):
        json.loads(text, parse_constant=lambda name: pytest.fail(name))
    found = trainer.folder.read_json("summary.json")
    assert found["best"] is None and found["test"]["loss"] is None
    assert "NaN or infinite" in (trainer.folder.path / "report.html").read_text()


def test_a_loss_that_is_never_finite_is_null(tmp_path: Path) -> None:
    report = StepReport(4, 8, 1, float("nan"), 1.0, 0.1, 0, {"dense": 1.0})
    assert report.as_dict()["loss"] is None
    assert pages.draw([report.as_dict(), {"step": 5, "loss": 0.5}]).startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="JSON"):
        RunFolder(tmp_path).write_json("a.json", {"loss": float("nan")})


# --- metrics


def test_an_early_stop_by_gauc_needs_no_gauc_in_the_metrics(tmp_path: Path) -> None:
    stop = {"early_stop": {"metric": "gauc", "patience": 9}, "gauc_group": "id0", "metrics": ["auc"]}
    trainer, reports = fit(small(tmp_path, train=stop))
    last = reports[-1]
    assert isinstance(last, EvaluationReport) and 0 <= (last.value("gauc") or -1) <= 1
    with Trainer(trainer.config).resume() as again:
        assert again.evaluate().value("gauc") == last.value("gauc")


def test_rows_without_a_group_are_not_those_of_group_0() -> None:
    table = pa.record_batch({"group": pa.array([0, None, 0, 1, None], pa.int64())})
    groups = groups_of(table, "group")
    assert groups[0] == groups[2] and groups[1] == groups[4]
    assert len({*groups.tolist()}) == 3


def test_the_table_of_results_has_the_step_of_each_part(tmp_path: Path) -> None:
    trainer, reports = fit(small(tmp_path, data={"epochs": 3}, train={"early_stop": {}, "evaluate_every": 3}))
    assert trainer.folder is not None
    summary = trainer.folder.read_json("summary.json")
    heads, rows = pages.results_table(summary)
    column = heads.index("step")
    assert [row[column] for row in rows] == [str(summary["best"]["step"])] * 2 == [str(reports[-1].step)] * 2


def test_an_evaluation_restores_the_mode_of_each_module(configure: Configure) -> None:
    configure("a: {dim: 4}")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    model[1].eval()  # frozen
    with eval_ctx(model=model):
        assert [each.training for each in model.modules()] == [False, False, False]
    assert [each.training for each in model.modules()] == [True, True, False]


# --- files


def failing_best(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Save.write

    def write(save: Save) -> None:
        if "/best/step" in save.what:
            save.abort()
            raise StorageError("/best: No space left on device")
        whole(save)

    monkeypatch.setattr(Save, "write", write)


def test_a_best_checkpoint_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing_best(monkeypatch)
    trainer, reports = fit(small(tmp_path, train={"early_stop": {"patience": 99}, "evaluate_every": 2}))
    assert "No space left" in caplog.text
    assert trainer.folder is not None
    found = trainer.folder.read_json("summary.json")
    assert found["status"] == "finished" and found["best"] is None
    assert not any(each.is_best for each in reports if isinstance(each, EvaluationReport))
    assert reports[-1].step == found["step"]


def test_latest_names_a_run_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(small(tmp_path))

    whole = RunFolder.write

    def write(folder: RunFolder, name: str, content: str | bytes) -> None:
        if name == "run.json":
            raise StorageError("run.json: No space left on device")
        whole(folder, name, content)

    monkeypatch.setattr(RunFolder, "write", write)
    with Trainer(small(tmp_path, run={"name": "two"})) as trainer, pytest.raises(StorageError):
        trainer.fit()
    assert (tmp_path / "runs" / "LATEST").read_text() == "one\n" and not (tmp_path / "runs" / "two").exists()


def test_the_page_of_a_run_has_its_status(tmp_path: Path) -> None:
    trainer, _ = fit(small(tmp_path))
    assert trainer.folder is not None
    trainer.folder.write_json("summary.json", {**trainer.folder.read_json("summary.json"), "status": "running"})
    pages.write(trainer.folder, trainer.config, status="finished")
    assert "<td class=n>finished</td>" in (trainer.folder.path / "report.html").read_text()


def test_a_fit_that_ranks_share_keeps_the_error_of_the_data(tmp_path: Path) -> None:
    rows = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet", 100))
    wrong = rows.set_column(rows.column_names.index("dense0"), "dense0", pa.array(["x"] * 100))
    pa.parquet.write_table(wrong, tmp_path / "clicks.parquet")
    config = config_of(tmp_path)
    with pytest.raises(DataError, match="dense0"):
        fit_once.fit_once(config, Parts(config), tmp_path / "fits")
    write_clicks(tmp_path / "clicks.parquet", 100)
    first = fit_once.fit_once(config, Parts(config), tmp_path / "fits")
    kept = next((tmp_path / "fits").glob("*.json"))
    kept.write_text(kept.read_text()[:20])
    with pytest.raises(StorageError, match=kept.name) as caught:
        fit_once.fit_once(config, Parts(config), tmp_path / "fits")
    assert "remove the file to fit again" in caught.value.hint
    kept.unlink()
    assert fit_once.fit_once(config, Parts(config), tmp_path / "fits").transform.digest == first.transform.digest


# --- calls and values


def test_a_configuration_that_was_not_read_is_refused(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.parquet", 100)
    content = {"data": {"train": "clicks.parquet"}, "features": {"id0": {"type": "id", "dim": 4}}, "labels": {"y": {}}}
    with pytest.raises(UsageError, match="made by a program") as caught:
        Trainer(Config.model_validate(content))
    assert "load_config" in caught.value.hint


def test_a_row_without_a_time_is_named(tmp_path: Path) -> None:
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet", 500))
    times = pa.array([None if row == 7 else row for row in range(500)], pa.int64())
    pa.parquet.write_table(table.append_column("at", times), tmp_path / "clicks.parquet")
    config = small(tmp_path, data={"split": {"by": "time", "column": "at", "valid": 300, "test": 400}})
    with (
        Trainer(config) as trainer,
        pytest.raises(DataError, match=r"clicks\.parquet: .*split by 'at', row 8: found null"),
    ):
        trainer.fit()


# --- several ranks


def test_another_rank_learns_from_rank_0_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(small(tmp_path, run={"log_every": 1})) as trainer:
        next(trainer.fit())
        training: Any = trainer._training
        backend, written = training._ctx.common_context, [True, False]
        gather = backend.all_gather

        def gathered(what: str, mine: Any) -> list[Any]:
            if what == "saved run":  # simulates rank 1, which may have a different disk
                assert mine is None
                return [["/of/rank0/step-1", written.pop(0), "no space left"], mine]
            found: list[Any] = gather(what, mine)
            return found

        monkeypatch.setattr(backend, "all_gather", gathered)
        monkeypatch.setattr(training, "_writes", False)
        assert trainer.save() == Path("/of/rank0/step-1")
        with pytest.raises(StorageError, match="cannot write the checkpoint /of/rank0/step-1: no space left"):
            trainer.save()
        monkeypatch.undo()


def test_ranks_meet_before_an_evaluation_and_agree_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, train={"evaluate_every": 2})
    with Trainer(config) as trainer:
        reports = trainer.fit()
        training: Any = trainer._training
        backend = training._ctx.common_context
        calls: list[str] = []
        gather, drain, evaluate = backend.all_gather, backend.engine.drain, training._evaluate

        def evaluated(*arguments: Any) -> EvaluationReport:
            calls.append("evaluate")
            found: EvaluationReport = evaluate(*arguments)
            return found

        def drained() -> None:
            calls.append("drain")
            drain()

        def gathered(what: str, mine: Any) -> list[Any]:
            calls.append(what)
            found: list[Any] = gather(what, mine)
            return found

        monkeypatch.setattr(backend, "all_gather", gathered)
        monkeypatch.setattr(backend, "engine", _Proxy(backend.engine, drain=drained))
        monkeypatch.setattr(training, "_evaluate", evaluated)
        for report in reports:
            if isinstance(report, EvaluationReport):
                break
    assert calls[0] == "start of training"
    place = calls.index("evaluate")
    assert calls[place - 2 : place] == ["drain", "evaluation"]


class _Proxy:
    """An object with another value of some attributes."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        self.__dict__.update(changes, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_note_of_an_evaluation_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = metrics.binary([np.nan], [1], ["auc"])
    report = EvaluationReport(1, "test", {"label": found}, None, files=("a.parquet",))
    used = Found(RunFolder(Path("runs/one")), Path("runs/one/best/step-1").absolute(), 1, is_best=True)
    progress.show_evaluation(report, used)
    shown = capsys.readouterr().out
    assert "AUC is not defined: 1 output is NaN or infinite" in shown
    assert "runs/one: the best checkpoint, best/step-1: the test set of a.parquet" in shown
