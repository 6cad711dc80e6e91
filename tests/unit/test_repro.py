"""``persia dump --repro`` reproduces a failure elsewhere with one batch, and with the smallest model."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch
from conftest import Verb
from test_one_batch import mine
from trainer_files import write_clicks, write_config

from persia.errors import ConfigError, DataError
from persia.models import Tiny


def repeated(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the script of a reproduction as its recipient would."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PERSIA_")}
    words = ["sh", str(folder / "run.sh")]
    return subprocess.run(words, env=own, capture_output=True, text=True, check=False, timeout=240)


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack an archive, and return its reproduction."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (top,) = folder.glob("persia-dump-*/repro")
    return top


@pytest.mark.row("S3-38")
@pytest.mark.skipif(shutil.which("persia") is None, reason="the command is not installed here")
def test_a_failure_is_repeated_without_the_data_and_the_code_of_the_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, verb: Verb
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path_factory.mktemp("elsewhere")
    home.mkdir()
    path = mine(home)
    verb("train", str(path))
    (home / "mine.py").write_text((home / "mine.py").read_text().replace("self.top(torch", "self.gone(torch"))
    _, errors = verb("dump", str(home / "runs" / "one"), "--repro", "-o", str(elsewhere / "dump.tar.gz"))
    assert "up to 128 rows of each part of the data; rows are not redacted" in errors
    shutil.rmtree(home)
    repro = unpacked(elsewhere / "dump.tar.gz", elsewhere)
    rows = {"train.parquet", "valid.parquet", "test.parquet"}
    assert {each.name for each in repro.iterdir()} - rows == {"mine.py", "persia.yml", "run.sh"}
    assert (repro / "train.parquet").is_file() and str(home) not in (repro / "persia.yml").read_text()
    done = repeated(repro)
    ticks = [line for line in done.stdout.splitlines() if line[:1] in ("✓", "✗")]
    assert ticks[:5] == ["✓ build", "✓ batch", "✓ evaluate", "✓ checkpoint", "✓ build"], done.stdout + done.stderr
    assert ticks[5].startswith("✗ batch") and len(ticks) == 6
    assert done.returncode == 1 and "has no attribute 'gone'" in done.stderr, done.stderr


@pytest.mark.row("S3-38")
def test_one_batch_trains_the_smallest_model(tmp_path: Path, verb: Verb) -> None:
    path = mine(tmp_path, forward="raise ArithmeticError('in the layers')")
    _, errors = verb("train", str(path), "--local", "--test", code=1)
    assert "in the layers" in errors
    out, _ = verb("train", str(path), "--local", "--test", "--set", "model={name: tiny}")
    assert "✓ checkpoint" in out and not (tmp_path / "runs").exists()


def test_without_a_configuration_nothing_is_reproduced(
    tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    _, errors = verb("dump", "runs/one", "--repro", "-o", "dump.tar.gz", code=2)
    assert "--repro: there is no persia.yml to reproduce" in errors and not (tmp_path / "dump.tar.gz").exists()


def test_a_model_that_is_installed_is_named_as_missing(
    tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "lib" / "installed_model.py")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setenv("PERSIA_CONFIG", str(write_config(tmp_path, model={"class": "installed_model:Mine"})))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    out, _ = verb("dump", "runs/one", "--repro", "--preview")
    assert f"repro/installed_model:Mine: it is not below {tmp_path}" in out


def test_a_batch_that_does_not_fit_is_an_error(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.doctor.dump.archive.MOST", (1 << 20) + (16 << 10))
    write_clicks(tmp_path / "clicks.parquet", 3000)
    monkeypatch.setenv("PERSIA_CONFIG", str(write_config(tmp_path, data={"batch_size": 3000})))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    _, errors = verb("dump", "runs/one", "--repro", "-o", "dump.tar.gz", code=1)
    assert "does not fit" in errors and not (tmp_path / "dump.tar.gz").exists()


def test_tiny_is_linear_and_refuses_wrong_inputs() -> None:
    dense, embeddings = [torch.ones(3, 2)], [torch.ones(3, 4), torch.ones(3, 1)]
    model = Tiny(2, [4, 1], num_labels=2)
    found = model(dense, embeddings)
    assert torch.allclose(found, model.top(torch.ones(3, 7))) and found.shape == (3, 2)
    with pytest.raises(DataError, match="Tiny: slot 1 has shape"):
        model(dense, [embeddings[0], torch.ones(3, 2)])
    with pytest.raises(ConfigError, match=r"num_dense \(-1\) must be .* embedding_dims is empty.*; num_labels \(0\)"):
        Tiny(-1, [], 0)
