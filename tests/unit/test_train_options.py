"""Options of ``persia train``: logs and their frequency, and the next commands in error messages of a job."""

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import Verb
from trainer_files import write_clicks, write_config

from persia.errors import ConfigError, PersiaError, StorageError
from persia.launch import background, ranks, up
from persia.launch.job_config import JobConfig, read_job_config

MINE = """\
import torch
from persia.logger import get_default_logger

class Mine(torch.nn.Module):
    def __init__(self, num_dense, embedding_dims):
        super().__init__()
        get_default_logger("mine").debug("a detail of the model")
        self.top = torch.nn.Linear(num_dense + sum(embedding_dims), 1)

    def forward(self, dense, embeddings):
        return self.top(torch.cat([*dense, *embeddings], 1))
"""


@pytest.mark.row("S1-26")
def test_verbose_logs_all(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "")
    write_clicks(tmp_path / "clicks.parquet", 300)
    (tmp_path / "mine.py").write_text(MINE)
    path = str(write_config(tmp_path, model={"class": "mine:Mine"}))
    # Both commands create the model.
    doctor, test = ("doctor", path, "--only", "disk"), ("train", path, "--test", "--local")
    assert "detail" not in verb(*doctor)[1]
    assert "DEBUG   persia.mine: a detail of the model" in verb("--verbose", *doctor)[1]
    monkeypatch.setenv("LOG_LEVEL", "")
    assert "DEBUG   persia.mine: a detail of the model" in verb(*test, "--verbose")[1]


@pytest.mark.parametrize(
    "options", [["--profile"], ["--nproc", "2", "--set", f"run.name={'x' * 65}"], ["--profile", "--resume", "runs/one"]]
)
def test_a_warning_of_the_configuration_is_shown_once(tmp_path: Path, verb: Verb, options: list[str]) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = str(write_config(tmp_path, train={"micro_batch": 999}))
    if "--resume" in options:
        verb("train", path)
    out, errors = verb("train", path, *options, code=2 if "--nproc" in options else 0)
    assert (out + errors).count("found 999, which has no effect, because data.batch_size is 128") == 1


# --- training in the background


@pytest.mark.parametrize(
    ("step", "number", "said", "hint"),
    [
        ("mkdir", errno.EACCES, "cannot create the folder FOLDER", "check the owner and the free space of its parent"),
        ("open", errno.ENOSPC, "cannot create the file FOLDER/train-", "check the owner and the free space of FOLDER,"),
        ("Popen", errno.EAGAIN, "cannot start a process", "train in this process: repeat the command without --follow"),
    ],
)
def test_a_start_in_the_background_that_fails_says_at_which_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, said: str, hint: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    folder = tmp_path / "runs"
    with monkeypatch.context() as patch, pytest.raises(PersiaError) as caught:
        patch.setattr(subprocess if step == "Popen" else Path, step, refuse)
        background.start(["train", "persia.yml"], folder)
    message = str(caught.value)
    assert message.startswith(said.replace("FOLDER", str(folder))) and message.endswith(f": {os.strerror(number)}")
    assert caught.value.hint.startswith(hint.replace("FOLDER", str(folder)))
    assert isinstance(caught.value, StorageError) == (step != "Popen")
    assert not [*folder.glob("*")], "no empty file is left"


def test_a_job_file_with_two_files_of_slots_names_both(tmp_path: Path) -> None:
    (tmp_path / "job.yml").write_text("config: persia.yml\nembedding_config: slots.yml\ntrainer: {}\n")
    both = "config is persia.yml, and embedding_config is slots.yml: slots come from one file; remove one of the two"
    with pytest.raises(ConfigError, match=both):
        read_job_config(tmp_path / "job.yml")


# --- next commands


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobConfig, up.Commands | None]]:
    """Return the list of jobs with the commands that their messages name. Nothing is started."""
    found: list[tuple[JobConfig, up.Commands | None]] = []

    def run(config: JobConfig, path: Path, commands: up.Commands | None = None) -> int:
        del path
        found.append((config, commands))
        return 0

    monkeypatch.setattr(up, "run_job", run)
    monkeypatch.setattr(ranks, "run_job", run)
    return found


def test_the_next_commands_are_those_of_the_verb(
    tmp_path: Path, verb: Verb, job: list[tuple[JobConfig, up.Commands | None]]
) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = str(write_config(tmp_path, run={"dir": "runs"}))
    verb("train", path, "--nproc", "2", "--set", "data.batch_size=64", "--set", "run.name=mine")
    verb("train", path, "--nproc", "2", "--test")
    verb("up", path, "--ranks", "2")
    train, test, started = (commands for _, commands in job)
    whole = f"persia train {path} --nproc 2 --set data.batch_size=64"
    alone = f"persia train {path} --set data.batch_size=64"
    assert train == up.Commands(f"{whole} --set run.name=NAME", f"{whole} --resume runs/mine", alone)
    assert test is None, "nothing of a test is continued"
    whole = f"persia up {path} --ranks 2"
    assert started == up.Commands(f"{whole} --name NAME", f"{whole} --name one", f"persia train {path}")


def test_a_finished_run_names_the_command_of_its_verb(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = str(write_config(tmp_path))
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"status": "finished", "job": "one"}')
    _, errors = verb("train", path, "--nproc", "2", code=2)
    assert f"choose another name for the new run: persia train {path} --nproc 2 --set run.name=NAME" in errors
    _, errors = verb("up", path, code=2)
    assert f"choose another name for the new run: persia up {path} --name NAME" in errors
    (tmp_path / "job.yml").write_text(f"job: one\nconfig: {path}\ntrainer: {{}}\nrun_dir: {folder}\n")
    _, errors = verb("up", "job.yml", code=2)
    assert "choose another name for the new run: `job: NAME` in job.yml" in errors
    (folder / "summary.json").unlink()
    (folder / "persia.yml").write_text("")
    _, errors = verb("up", "job.yml", code=2)
    assert f"continue it: persia train {path} --resume {folder}" in errors


def test_a_name_that_no_job_can_have(tmp_path: Path, verb: Verb) -> None:
    """The ranks read a copy of the configuration in a temporary folder. No message names this folder."""
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = str(write_config(tmp_path, run={"name": "x" * 65}))
    _, errors = verb("train", path, "--nproc", "2", code=2)
    assert "run.name: found `xxx" in errors
    assert f"next:  correct each error, then run: persia train {path} --nproc 2" in errors
    _, errors = verb("train", path, "--nproc", "65", code=2)
    assert "--nproc 65: a job on one host has at most 64 ranks" in errors
