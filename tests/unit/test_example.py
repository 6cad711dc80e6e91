"""The DLRM example as a user runs it, on a part of its data."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import ROOT

pytestmark = pytest.mark.usefixtures("forks")

EXAMPLE = ROOT / "examples" / "dlrm"
FILES = ("census_income_train.parquet", "census_income_test.parquet")
ALONE = """
import pathlib, runpy, sys
sys.modules["persia.backend"] = None  # an import of what holds rows fails
sys.argv = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script that may use neither the engine in this process nor servers."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 20,000 samples of each file."""
    return first(20_000, tmp_path_factory.mktemp("data"))


def first(samples: int, folder: Path) -> Path:
    """Write the first samples of each file, and return the folder."""
    for name in FILES:
        pq.write_table(pq.read_table(EXAMPLE / "data" / name).slice(0, samples), folder / name)
    return folder


def command(data: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, str(EXAMPLE / "train.py"), "--data", str(data), "--out", str(out), *options]


def environment() -> dict[str, str]:
    dropped = (
        "PERSIA_EMBEDDING_CONFIG",
        "PERSIA_GLOBAL_CONFIG",
        "PERSIA_NATS_URL",
        "EMBEDDING_STALENESS",
        "REPRODUCIBLE",
    )
    return {name: value for name, value in os.environ.items() if name not in dropped}


def run(data: Path, out: Path, *options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(data, out, *options), env=environment(), capture_output=True, text=True, check=False, cwd=cwd
    )


def test_it_trains_from_any_folder_and_prints_its_summary_last(small: Path, tmp_path: Path) -> None:
    done = run(small, tmp_path / "runs", "--epochs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.split()[-1])
    assert path.name == "summary.json"
    summary = json.loads((tmp_path / path).read_text())
    assert {"status", "auc", "log_loss", "samples_per_s", "steps", "seconds", "rows"} <= set(summary)
    assert summary["status"] == "finished"
    assert summary["auc"] > 0.85
    assert summary["rows"] > 100
    assert (path.parent / "curves.png").stat().st_size > 1000


@pytest.mark.row("S1-02")
def test_the_model_trains_with_torch_alone(small: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", ALONE, str(EXAMPLE / "plain.py"), "--data", str(small), "--epochs", "2"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.85 and not [*tmp_path.iterdir()]


def test_equal_runs_give_equal_results(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = first(4_000, tmp_path / "data")
    results = []
    for attempt in ("a", "b"):
        done = run(data, tmp_path / attempt, "--epochs", "1", "--reproducible")
        assert done.returncode == 0, done.stderr
        summary = json.loads(Path(done.stdout.split()[-1]).read_text())
        results.append((summary["auc"], summary["log_loss"], summary["rows"]))
    assert results[0] == results[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_aborted_run_never_looks_finished(small: Path, tmp_path: Path, number: int) -> None:
    child = subprocess.Popen(
        command(small, tmp_path, "--epochs", "50"), env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    while not list(tmp_path.iterdir()):  # the run's folder is made when training starts
        assert child.poll() is None, child.stdout.read()
    child.send_signal(number)
    child.communicate()
    assert child.returncode != 0
    for summary in tmp_path.glob("*/summary.json"):
        assert json.loads(summary.read_text())["status"] != "finished"


def truncate(path: Path) -> str:
    os.truncate(path, path.stat().st_size // 2)
    return "complete parquet file"


def remove(path: Path) -> str:
    path.unlink()
    return "No such file"


def rename_column(path: Path) -> str:
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["years" if name == "age" else name for name in table.column_names]), path)
    return "age"


def damage(path: Path) -> str:
    data = bytearray(path.read_bytes())
    middle = len(data) // 3
    data[middle : middle + 4000] = bytes(4000)
    path.write_bytes(data)
    return "damaged|complete parquet file"


@pytest.mark.parametrize("spoil", [truncate, remove, rename_column, damage])
def test_a_bad_data_file_is_named_with_the_next_step(small: Path, tmp_path: Path, spoil: object) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in FILES:
        (data / name).write_bytes((small / name).read_bytes())
    text = spoil(data / FILES[0])  # type: ignore[operator]
    done = run(data, tmp_path / "runs")
    assert done.returncode != 0
    assert FILES[0] in done.stderr
    assert any(part in done.stderr for part in text.split("|")), done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("*/summary.json"))
