"""Log files: those of a run in one process, rotation, full disks, and the last line of a killed process."""

import errno
import json
import logging
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
from trainer_files import config_of, fit, write_clicks, write_config

import persia
from persia.launch.logs import Logs
from persia.launch.process import Process
from persia.logger import get_default_logger
from persia.runtime import log_files
from persia.trainer import StepReport, Trainer


@pytest.mark.row("S4-46", "S4-49")
def test_a_run_in_one_process_keeps_its_log(tmp_path: Path) -> None:
    logger = get_default_logger()
    logger.setLevel("WARNING")  # like `persia train`, whose standard error has only warnings
    _, reports = fit(config_of(tmp_path, data={"epochs": 1}))
    assert logger.level == logging.WARNING
    lines = [json.loads(line) for line in (tmp_path / "runs" / "one" / "logs" / "train.log").read_text().splitlines()]
    assert all(line["run_id"] == "one" and line["node"] == socket.gethostname() for line in lines)
    steps = [line for line in lines if line["event"] == "step"]
    shown = [report for report in reports if isinstance(report, StepReport)]
    assert [(line["step"], line["loss"]) for line in steps] == [(each.step, round(each.loss, 6)) for each in shown]
    keys = {"ts", "level", "event", "run_id", "service", "replica", "step", "node", "target", "loss", "rank"}
    assert steps and {*steps[0]} == keys and steps[0]["rank"] == 0


def test_the_last_line_is_the_error(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.parquet")
    config = persia.load_config(write_config(tmp_path))
    with pytest.raises(ZeroDivisionError), Trainer(config) as trainer:
        for _ in trainer.fit():
            raise ZeroDivisionError("planted")
    last = json.loads((tmp_path / "runs" / "one" / "logs" / "train.log").read_text().splitlines()[-1])
    assert (last["level"], last["error"]) == ("error", "ZeroDivisionError: planted")


@pytest.mark.row("S4-46")
def test_a_file_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_BYTES", 1000)
    with Logs(tmp_path / "logs") as logs:
        for number in range(100):
            logs.writer("server-0", shown=False)(f"line {number:03} {'x' * 40}")
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["server-0.log", "server-0.log.1", "server-0.log.2"]
    assert all(path.stat().st_size <= 1000 for path in (tmp_path / "logs").iterdir())
    (name, files), *more = log_files.files(tmp_path).items()
    kept = [line for path in files for line in path.read_text().splitlines()]
    numbers = [int(line.split()[1]) for line in kept]
    assert name == "server-0" and not more
    assert numbers == [*range(numbers[0], 100)], "the rotated files come first, without a gap"


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(record: logging.LogRecord) -> None:
        del record
        raise OSError(errno.ENOSPC, "No space left on device")

    file = log_files.LineFile(tmp_path / "one.log")
    file.write_line("one")
    with monkeypatch.context() as broken:
        broken.setattr(file, "shouldRollover", full)
        file.write_line("two")
        file.write_line("three")
    file.write_line("four")
    file.close()
    assert capsys.readouterr().err.count("No space left on device; lines of this log are lost") == 1
    assert (tmp_path / "one.log").read_text() == "one\nfour\n", "it goes on when there is space"


def test_a_full_disk_does_not_hide_the_error_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("train", "server-0"):
        (tmp_path / "logs" / f"{name}.log").symlink_to("/dev/full")
    with pytest.raises(ZeroDivisionError, match="planted"), log_files.kept(tmp_path):
        raise ZeroDivisionError("planted")
    with Logs(tmp_path / "logs") as logs:
        logs.writer("server-0", shown=False)("a line")
    assert capsys.readouterr().err.count("No space left on device; lines of this log are lost") == 2


LAST = """
import os, signal
from persia.logger import get_default_logger
print("the last line of the script")
get_default_logger().warning("the last line of the log")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.row("S4-48")
def test_a_process_that_is_killed_has_written_its_last_line(tmp_path: Path) -> None:
    ended = threading.Event()
    with Logs(tmp_path / "logs") as logs:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        process = Process(
            "trainer",
            [sys.executable, "-c", LAST],
            env=environment,
            line=logs.writer("trainer", shown=False),
            ended=lambda _: ended.set(),
        )
        assert ended.wait(60) and process.outcome() == "was killed by SIGKILL"
    text = (tmp_path / "logs" / "trainer.log").read_text()
    assert "the last line of the script" in text and "the last line of the log" in text
