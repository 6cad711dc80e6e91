"""``persia-launcher data-loader --until-finished`` ends with the run, also with one that its budget has stopped."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

DEADLINE = 30.0
SUMMARIES: dict[str, dict[str, Any]] = {
    "stopped": {"status": "stopped", "job": "one", "generation": 2, "reason": "budget"},
    "resumed": {"status": "running", "name": "run"},
    "stopped again": {"status": "stopped", "job": "one", "generation": 3, "reason": "budget"},
    "of another job": {"status": "stopped", "job": "another", "generation": 2},
    "finished": {"status": "finished", "job": "one"},
}
LAUNCH = """
import sys
from pathlib import Path
from persia.launch import data_loader
data_loader._PERIOD, data_loader._LAST_S = 0.05, {last}
sys.exit(data_loader.run(Path("send.py"), [], index=0, size=1, until_finished={until_finished}))
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the launcher of ``send.py``."""
    started: list[subprocess.Popen[str]] = []

    def call(*, last: float = DEADLINE, until_finished: bool = True) -> "subprocess.Popen[str]":
        variables = {"NATS_URL": "nats://127.0.0.1:1", "RUN_DIR": str(tmp_path), "JOB": "one"}
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH.format(last=last, until_finished=until_finished)],
            cwd=tmp_path,
            env={**os.environ, **{f"PERSIA_{name}": value for name, value in variables.items()}},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


def write(folder: Path, summary: Mapping[str, Any]) -> None:
    """Replace the file atomically, as rank 0 does."""
    (folder / "new").write_text(json.dumps(summary))
    (folder / "new").replace(folder / "summary.json")


@pytest.mark.parametrize(
    ("summaries", "code"),
    [
        ([None, "stopped"], 0),
        (["resumed", "stopped"], 0),
        (["stopped", "stopped again"], 0),
        (["stopped", "resumed", "stopped again"], 0),
        (["stopped", "finished"], 0),
        (["stopped"], 75),
        (["stopped", "resumed"], 75),
        ([None, "of another job"], 75),
    ],
)
def test_a_signal_ends_it_with_0_if_the_run_has_stopped(
    start: Start, tmp_path: Path, summaries: list[str | None], code: int
) -> None:
    """A summary of a stopped run that exists at the start does not count, because the job resumes this run."""
    (tmp_path / "send.py").write_text("import pathlib, time\npathlib.Path('sends').touch()\ntime.sleep(600)\n")
    first, *later = summaries
    if first is not None:
        write(tmp_path, SUMMARIES[first])
    process = start()
    wait_until("the script", (tmp_path / "sends").exists, DEADLINE)
    for each in later:
        assert each is not None
        write(tmp_path, SUMMARIES[each])
    process.terminate()
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, errors


@pytest.mark.parametrize(("status", "said"), [("finished", "is finished"), ("stopped", "has stopped")])
def test_a_script_that_does_not_end_is_stopped_after_the_run(
    start: Start, tmp_path: Path, status: str, said: str
) -> None:
    """The script may be waiting for trainers that have ended."""
    (tmp_path / "send.py").write_text("import pathlib, time\npathlib.Path('sends').touch()\ntime.sleep(600)\n")
    process = start(last=0.1)
    wait_until("the script", (tmp_path / "sends").exists, DEADLINE)
    write(tmp_path, SUMMARIES[status])
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    assert "the script has not: stopping the script" in errors and f"this run {said}: {tmp_path}" in errors


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_a_script_that_fails_after_the_run_is_no_failure(start: Start, tmp_path: Path, status: str) -> None:
    """The script fails, for example because no trainer is left to receive its last batch."""
    (tmp_path / "ready.json").write_text(json.dumps(SUMMARIES[status]))
    (tmp_path / "send.py").write_text("import os\nos.link('ready.json', 'summary.json')\nraise SystemExit(5)\n")
    process = start()
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0 and "the script ended with exit code 5" in errors, errors
    (tmp_path / "summary.json").unlink()
    process = start(until_finished=False)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 5, errors


def test_a_script_that_fails_before_the_end_of_the_run_is_a_failure(start: Start, tmp_path: Path) -> None:
    (tmp_path / "send.py").write_text("raise SystemExit(5)\n")
    write(tmp_path, SUMMARIES["stopped"])  # the summary of an earlier attempt
    process = start()
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 5, errors
