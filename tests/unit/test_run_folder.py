"""``runs/LATEST``, and the name of a run that failed before it had results."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from trainer_files import config_of, write_clicks, write_config

from persia.doctor.logs import run_folder
from persia.errors import CheckpointError, DataError, StorageError, UsageError
from persia.launch import up
from persia.launch.job_config import Sizes, read_job_config
from persia.runtime.logging import get_logger
from persia.trainer import Trainer
from persia.trainer.run_folder import find_run


def train(folder: Path, name: str, **blocks: Any) -> Path:
    """Train a run to its end, and return its folder."""
    config = config_of(folder, **{**blocks, "run": {"name": name}})
    with Trainer(config) as trainer:
        for _ in trainer.fit():
            pass
        assert trainer.folder is not None
        return trainer.folder.path


def fails(folder: Path, name: str) -> None:
    """Begin a run whose first batch has wrong labels."""
    table = pa.parquet.read_table(folder / "clicks.parquet")
    labels = pa.array([2] * len(table), pa.int8())
    pa.parquet.write_table(table.set_column(table.column_names.index("label"), "label", labels), folder / "bad.parquet")
    with pytest.raises(DataError, match="found the integer 2"):
        train(folder, name, data={"train": "bad.parquet"})


def test_a_run_that_fails_at_once_is_not_the_latest_and_does_not_block_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs, latest = tmp_path / "runs", tmp_path / "runs" / "LATEST"
    write_clicks(tmp_path / "clicks.parquet", 500)
    fails(tmp_path, "zero")
    assert not latest.exists() and json.loads((runs / "zero" / "summary.json").read_text())["status"] == "failed"
    one = train(tmp_path, "one")
    fails(tmp_path, "two")
    assert latest.read_text() == "one\n" and find_run(latest).path == one
    get_logger("trainer").addHandler(caplog.handler)
    try:
        two = train(tmp_path, "two")
    finally:
        get_logger("trainer").removeHandler(caplog.handler)
    assert "two: replacing the run of this name, which ended before its first step" in caplog.text
    assert json.loads((two / "summary.json").read_text())["status"] == "finished" and latest.read_text() == "two\n"
    with pytest.raises(UsageError, match="a run of this name already exists") as caught:
        train(tmp_path, "two")
    assert "--resume" in caught.value.hint


def test_a_folder_with_anything_to_keep_is_not_replaced(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.parquet", 500)
    fails(tmp_path, "one")
    run = tmp_path / "runs" / "one"
    (run / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already exists, with the status failed and without a checkpoint") as caught:
        train(tmp_path, "one")
    assert "rm -r" in caught.value.hint and (run / "notes.txt").exists()
    (run / "notes.txt").unlink()
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 0.5}\n')
    with pytest.raises(UsageError, match="a run of this name already exists"):
        train(tmp_path, "one")
    (run / "metrics.jsonl").write_text("")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    with pytest.raises(UsageError, match="already exists, with the status running"):
        train(tmp_path, "one")


def test_an_older_run_that_resumes_is_not_the_latest(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.parquet", 500)
    one = train(tmp_path, "one")
    summary = json.loads((one / "summary.json").read_text())
    (one / "summary.json").write_text(json.dumps({**summary, "started": "2024-01-01T00:00:00+00:00"}))
    train(tmp_path, "two")
    with Trainer(config_of(tmp_path, data={"epochs": 2}, run={"name": "one"})).resume() as trainer:
        for _ in trainer.fit():
            pass
    assert json.loads((one / "summary.json").read_text())["step"] == 8
    assert (tmp_path / "runs" / "LATEST").read_text() == "two\n"


def test_a_run_with_a_damaged_checkpoint_resumes_after_the_previous_one_on_demand(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.parquet", 500)
    run = train(tmp_path, "one", checkpoint={"every": 2})
    newest = max((run / "checkpoints").glob("step-*"), key=lambda each: int(each.name[5:]))
    damaged = next(newest.glob("shard-*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01\x02")
    for allowed in (False, True):
        config = config_of(
            tmp_path, data={"epochs": 2}, checkpoint={"every": 2, "allow_previous": allowed}, run={"name": "one"}
        )
        with Trainer(config).resume() as trainer:
            if not allowed:
                with pytest.raises(CheckpointError, match="is intact$") as refused:
                    next(iter(trainer.fit()))
                assert "--set checkpoint.allow_previous=true" in refused.value.hint
            else:
                assert next(iter(trainer.fit())).step <= int(newest.name[5:])


def test_a_run_is_the_latest_when_its_first_checkpoint_is_written(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint={"every": 5}, run={"log_every": 1})
    latest = tmp_path / "runs" / "LATEST"
    with Trainer(config) as trainer:
        for report in trainer.fit():
            if report.step < 5:
                assert not latest.exists()
    assert latest.read_text() == "one\n"


def test_a_file_latest_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    latest = tmp_path / "LATEST"
    latest.write_bytes(b"one\xff\n")
    for find in (find_run, run_folder):
        with pytest.raises(StorageError, match=r"cannot read .*LATEST: expected the name of a folder"):
            find(latest)


def test_a_run_whose_checkpoints_are_elsewhere_is_not_replaced(tmp_path: Path) -> None:
    """The configuration of the existing run determines where its checkpoints are, not that of the new run."""
    write_clicks(tmp_path / "clicks.parquet", 500)
    one = train(tmp_path, "one", checkpoint={"dir": str(tmp_path / "elsewhere")})
    assert next((tmp_path / "elsewhere").rglob("MANIFEST.json"), None) is not None
    (one / "metrics.jsonl").write_text("")
    (one / "summary.json").write_text(json.dumps({"status": "interrupted"}))
    for name in ("report.html", "curves.png"):
        (one / name).unlink(missing_ok=True)
    with pytest.raises(UsageError, match="a run of this name already exists"):
        train(tmp_path, "one")
    assert (one / "transform.json").exists()


def test_a_job_does_not_overwrite_a_run_of_one_process(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.parquet", 500)
    one = train(tmp_path, "one")
    kept = {path: path.read_bytes() for path in one.iterdir() if path.is_file()}
    config = read_job_config(tmp_path / "persia.yml", Sizes(name="one"))
    with pytest.raises(UsageError, match="a job would overwrite it"):
        up.run_job(config.model_copy(update={"run_dir": str(one)}), tmp_path / "persia.yml")
    assert {path: path.read_bytes() for path in one.iterdir() if path.is_file()} == kept


def test_a_profile_that_cannot_be_shown_does_not_fail_a_finished_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The profile of an earlier start of the run is not shown."""
    write_config(tmp_path)
    config = read_job_config(tmp_path / "persia.yml", Sizes(name="one"))
    profile = tmp_path / "runs" / "one" / "profile" / "rank-0.json"
    profile.parent.mkdir(parents=True)
    profile.write_text("of an earlier start")
    written: list[str] = []

    class Run(SimpleNamespace):
        def __init__(self, *_: object) -> None:
            super().__init__(stop=lambda: None)

        def run(self) -> int:
            for text in written:
                profile.write_text(text)
            return 0

    monkeypatch.setattr(up, "_Run", Run)
    config = config.model_copy(update={"run_dir": str(profile.parent.parent)})
    for text, told in (([], 0), (["damaged"], 1)):
        written[:] = text
        assert up.run_job(config, tmp_path / "persia.yml") == 0
        assert caplog.text.count("cannot show the profile") == told
