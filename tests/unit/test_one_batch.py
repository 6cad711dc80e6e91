"""``persia train --test`` trains four steps on one batch, and leaves no files."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import Verb
from trainer_files import config_of, write_clicks, write_config
from waiting import wait_until

from persia.launch import ranks
from persia.trainer import one_batch

TICKS = ["✓ build", "✓ batch", "✓ evaluate", "✓ checkpoint"]
MINE = """\
import torch

class Mine(torch.nn.Module):
    def __init__(self, num_dense, embedding_dims):
        super().__init__()
        {build}
        self.top = torch.nn.Linear(num_dense + sum(embedding_dims), 1)

    def forward(self, dense, embeddings):
        {forward}
        return self.top(torch.cat([*dense, *embeddings], 1))

    def state_dict(self, *arguments, **options):
        {state}
        return super().state_dict(*arguments, **options)
"""


def mine(folder: Path, build: str = "pass", forward: str = "pass", state: str = "pass") -> Path:
    """Write a user's model that fails at a given place, and a configuration with this model."""
    (folder / "mine.py").write_text(MINE.format(build=build, forward=forward, state=state))
    write_clicks(folder / "clicks.parquet", 300)
    return write_config(folder, model={"class": "mine:Mine"})


def content(folder: Path) -> dict[str, str]:
    """Return the hash of each file of a folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, which is empty at first."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.row("S1-05")
def test_four_ticks_and_nothing_is_left(tmp_path: Path, temporary: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet")
    path = write_config(tmp_path, checkpoint={"dir": str(tmp_path / "saves"), "every": 5})
    verb("train", str(path))
    before = content(tmp_path)
    assert "runs/LATEST" in before and any(name.startswith("saves/one/step-") for name in before)
    began = time.monotonic()
    out, _ = verb("train", str(path), "--test", "--local")
    assert time.monotonic() - began < 20
    assert out.splitlines()[:4] == TICKS
    assert re.match(r"ok: one batch passed in this process, in [0-9.]+ s; no file is left", out.splitlines()[4])
    assert content(tmp_path) == before, "the run and its checkpoints"
    assert not [*temporary.glob("persia-*")]


@pytest.mark.row("S1-05")
def test_local_stays_in_this_process_in_a_job(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = write_config(tmp_path)
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    out, _ = verb("train", str(path), "--test", "--local")
    assert out.splitlines()[:4] == TICKS


@pytest.mark.row("S1-05", "S1-26")
@pytest.mark.parametrize(
    ("broken", "step", "error"),
    [
        ({"build": "self.table = {}['gone']"}, "build", "KeyError: 'gone'"),
        ({"forward": "dense = embeddings[7]"}, "batch", "IndexError: list index out of range"),
        ({"forward": "assert self.training, 'not in training'"}, "evaluate", "AssertionError: not in training"),
    ],
)
def test_a_step_that_fails_names_itself(
    tmp_path: Path, temporary: Path, verb: Verb, broken: dict[str, str], step: str, error: str
) -> None:
    path = mine(tmp_path, **broken)
    before = content(tmp_path)
    out, errors = verb("train", str(path), "--test", "--local", code=1)
    place = list(one_batch.STEPS).index(step)
    assert out.splitlines()[:place] == TICKS[:place]
    assert out.splitlines()[place].startswith(f"✗ {step}: could not ")
    assert f"error: {error}" in errors and "  at mine.py:" in errors
    assert "Traceback" not in errors and "site-packages" not in errors
    assert content(tmp_path) == before
    assert {path.name.split("-")[1] for path in temporary.glob("persia-*")} == {"traceback"}


def test_the_batch_of_a_rank_has_the_rows_of_a_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, data={"batch_size": 20}, train={"accumulate": 3})
    assert next(iter(one_batch._own_batch(config))).data.batch_size == 60


@pytest.mark.row("S1-05")
def test_an_error_of_persia_has_a_next_command(tmp_path: Path, verb: Verb) -> None:
    path = mine(tmp_path, forward="return self.top(torch.cat([*dense, *embeddings], 1)).expand(-1, 3)")
    out, errors = verb("train", str(path), "--test", "--local", code=2)
    assert "✗ batch" in out and "expected [batch, 1]" in errors
    assert f"next:  python -m persia.testing {path}" in errors
    write_config(tmp_path, run={"dir": "/proc/runs"})
    out, errors = verb("train", str(path), "--test", "--local", code=1)
    assert "Checkpoint storage validation failed: /proc: user" in errors and "✓" not in out


@pytest.mark.row("S1-05")
def test_a_state_that_cannot_be_saved_is_found(tmp_path: Path, verb: Verb) -> None:
    path = mine(tmp_path, state="raise RuntimeError('not this one')")
    out, errors = verb("train", str(path), "--test", "--local", code=1)
    assert "✓ batch" in out and "✗" in out and "not this one" in errors


def test_one_batch_of_each_part_is_copied(tmp_path: Path) -> None:
    config = config_of(tmp_path, data={"batch_size": 100, "epochs": 7}, train={"lr_schedule": "linear", "warmup": 5})
    folder = tmp_path / "test"
    folder.mkdir()
    short = one_batch.shortened(config, folder)
    from persia.trainer.parts import Parts

    parts = Parts(short)
    assert parts.train.count() == 100 and short.data.epochs == 1 and short.train.warmup == 0
    assert parts.valid is not None and parts.test is not None and 0 < parts.valid.count() <= 100
    alone = config_of(tmp_path, data={"split": {"fractions": [1, 0, 0]}})
    parts = Parts(one_batch.shortened(alone, folder))
    assert parts.test is None and parts.valid is not None and parts.valid.count() == 128, "those of train"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--test", "--resume"], "--resume and --test cannot be combined"),
        (["--sweep", "train.seed=1,2", "--nproc", "2"], "--nproc and --sweep cannot be combined"),
    ],
)
def test_options_that_exclude_each_other(tmp_path: Path, verb: Verb, options: list[str], text: str) -> None:
    _, errors = verb("train", str(write_config(tmp_path)), *options, code=2)
    assert text in errors


@pytest.mark.usefixtures("forks")
@pytest.mark.row("S1-05")
def test_a_test_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    held = tmp_path / "held"
    path = mine(tmp_path, build=f"import time; open({str(held)!r}, 'w').close(); time.sleep(600)")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = [sys.executable, "-m", "persia", "train", str(path), "--test", "--local"]
    with subprocess.Popen(words, env={**os.environ, "TMPDIR": str(temporary)}) as test:
        wait_until("the model", held.exists, 90)
        assert [*temporary.iterdir()]
        test.terminate()
        assert test.wait(60) == 75
    assert not [*temporary.iterdir()]


@pytest.mark.row("S1-23")
def test_more_ranks_than_gpus_are_named_before_anything_starts(
    tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_NUM", "1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    path = write_config(tmp_path)
    for options in (["--test"], []):
        _, errors = verb("train", str(path), "--nproc", "5", *options, code=2)
        assert "--nproc 5: 5 GPUs requested, 1 visible" in errors and "next:  --nproc 1" in errors
    assert not [*tmp_path.glob("runs/*")]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    ranks.check_devices(5)  # each rank has a device


def test_ranks_resume_only_what_ranks_have_trained(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = str(write_config(tmp_path, run={"name": None}))
    verb("train", path)
    (run,) = (tmp_path / "runs").glob("*-*")
    _, errors = verb("train", path, "--nproc", "2", "--resume", code=2)
    assert "--resume needs the folder of the run" in errors and "--resume" in errors
    _, errors = verb("train", path, "--nproc", "2", "--resume", str(run), code=2)
    assert "the run was trained in one process" in errors and f"--resume runs/{run.name}" in errors


@pytest.mark.row("S1-19", "S1-17")
def test_the_storage_of_checkpoints_is_tried_before_training(tmp_path: Path, verb: Verb) -> None:
    """The storage is tried before rows are read and before the model is created, which may take long."""
    path = mine(tmp_path, build=f"open({str(tmp_path / 'made')!r}, 'w').close()")
    (tmp_path / "clicks.parquet").write_bytes(b"no rows can be read")
    for options in ([], ["--test", "--local"], ["--test", "--nproc", "2"]):
        _, errors = verb("train", str(path), "--set", "checkpoint.dir=/proc", *options, code=1)
        assert f"Checkpoint storage validation failed: /proc: user {os.geteuid()} cannot write here" in errors
        assert "persia doctor --only disk --dir /proc" in errors
        _, errors = verb("train", str(path), "--set", f"checkpoint.dir={tmp_path}/mnt/disk/saves", *options, code=1)
        assert f"checkpoint.dir: {tmp_path}/mnt does not exist; its disk may not be mounted" in errors
        assert f"mount the disk, or create the folder: mkdir -p {tmp_path}/mnt/disk" in errors
    assert not [*tmp_path.glob("runs/*")] and not (tmp_path / "made").exists()
    assert "Checkpoint storage" not in verb("train", str(path), code=2)[1], "the rows come next"
