"""``persia train``, ``eval`` and ``predict`` as processes: killed, interrupted, resumed, and with bad input."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from conftest import ROOT, Verb
from waiting import wait_until

from persia.errors import StorageError

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from trainer_files import write_clicks, write_config

pytestmark = pytest.mark.usefixtures("forks")

RUN: dict[str, Any] = {
    "data": {"batch_size": 64, "epochs": 3},
    "train": {"early_stop": {"patience": 99}, "evaluate_every": 50, "lr_schedule": "linear"},
    "checkpoint": {"every": 30},
}


def start(folder: Path, *arguments: str, largest_file: int | None = None) -> "subprocess.Popen[str]":
    """Start a verb. Writes beyond ``largest_file`` fail, as on a full disk."""
    environment = {**os.environ, "COLUMNS": "120"}
    code = "import resource, runpy, signal, sys; "
    if largest_file is not None:
        code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({largest_file}, {largest_file})); "
    code += "sys.argv[0] = 'persia'; runpy.run_module('persia', run_name='__main__')"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(folder: Path, *arguments: str, code: int = 0, largest_file: int | None = None) -> tuple[str, str]:
    with start(folder, *arguments, largest_file=largest_file) as process:
        out, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert "Traceback" not in errors, errors
    return out, errors


def interrupt(process: "subprocess.Popen[str]", folder: Path, step: int, number: int) -> tuple[str, str]:
    """Send a signal when the checkpoint of this step, or of one soon after it, is written. Return the output."""
    with process:
        saves = [folder / "checkpoints" / f"step-{at}" / "MANIFEST.json" for at in range(step, step + 100, 30)]
        wait_until(f"step {step}", lambda: any(each.exists() for each in saves) or process.poll() is not None, 90)
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(number)
        return process.communicate(timeout=60)


def test_a_run_that_is_killed_and_interrupted_equals_one_that_is_not(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 9000)
    config = str(write_config(tmp_path, **RUN))
    runs = tmp_path / "runs"
    out, _ = done(tmp_path, "train", config)
    assert "AUC" in out and out.splitlines()[-1] == "runs/one"
    two = ("train", config, "--set", "run.name=two")
    process = start(tmp_path, *two)
    interrupt(process, runs / "two", 60, signal.SIGKILL)
    assert json.loads((runs / "two" / "summary.json").read_text())["status"] == "running"
    process = start(tmp_path, *two, "--resume", "runs/two")
    _, errors = interrupt(process, runs / "two", 180, signal.SIGINT)
    assert process.returncode == 130, errors
    assert f"next:  persia train {config} --set run.name=two --resume runs/two" in errors
    assert json.loads((runs / "two" / "summary.json").read_text())["status"] == "interrupted"
    out, _ = done(tmp_path, *two, "--resume")
    one, other = (json.loads((runs / name / "summary.json").read_text()) for name in ("one", "two"))
    for key in ("status", "step", "best", "unusual", "embedding_rows"):
        assert one[key] == other[key], key
    for part in ("valid", "test"):
        assert {**one[part], "seconds": 0} == {**other[part], "seconds": 0}
    for folder in (f"checkpoints/step-{one['step']}", one["best"]["checkpoint"]):
        for path in (runs / "one" / folder).glob("*.arrow"):
            assert path.read_bytes() == (runs / "two" / folder / path.name).read_bytes(), path
    out, _ = verb("eval", "runs/two", "--json")
    assert json.loads(out)["labels"] == other["test"]["labels"]
    out, _ = verb("predict", "runs/LATEST", "clicks.parquet", "-o", "scores.parquet", "--keep", "id0")
    assert "9,000 rows, score" in out
    assert pyarrow.parquet.read_table(tmp_path / "scores.parquet").column_names == ["id0", "score"]
    predict = ("predict", "runs/two", "clicks.parquet", "-o", "full.parquet")
    _, errors = done(tmp_path, *predict, largest_file=4096, code=StorageError.exit_code)
    assert "error: cannot write full.parquet: " in errors and "File too large" in errors
    assert not [path for path in tmp_path.iterdir() if "full" in path.name]


def test_a_run_whose_end_cannot_be_saved_fails(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet")
    config = str(write_config(tmp_path, data={"split": {"fractions": [1, 0, 0]}}))
    _, errors = done(tmp_path, "train", config, largest_file=8192, code=StorageError.exit_code)
    assert "cannot write the checkpoint " in errors and "step-16: " in errors
    found = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())
    assert found["status"] == "failed" and "StorageError" in found["error"]
    assert not [*(tmp_path / "runs" / "one").rglob("MANIFEST.json")]
    verb("train", config, "--resume", "runs/one")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "persia.yml", "--set", "features.x={type: id, dim: 4}"], "no column 'x'"),
        (["train", "persia.yml", "--resume"], "no run"),
        (["train", "persia.yml", "runs/one"], "persia train persia.yml --resume runs/one"),
        (["train", "persia.yml", "--baseline", "xgboost"], "expected lightgbm"),
        (["eval", "runs/LATEST"], "no run"),
        (["predict", "runs/one", "clicks.parquet", "-o", "out.parquet"], "no run"),
        (["predict", "runs/one", "clicks.parquet", "-o", "nowhere/out.parquet"], "there is no folder nowhere"),
        (["train", "persia.yml", "--epochs", "3"], "next:  --set data.epochs=3"),
        (["train", "persia.yml", "--lr=0.1"], "--set train.embedding_optimizer.lr=0.1 or --set train.dense_optimizer"),
        (["config", "check", "-"], "persia config check /dev/stdin"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    tmp_path: Path, verb: Verb, arguments: list[str], message: str
) -> None:
    write_clicks(tmp_path / "clicks.parquet", 100)
    write_config(tmp_path)
    _, errors = verb(*arguments, code=2)
    assert message in errors
    assert not [*tmp_path.glob("runs/*")]
