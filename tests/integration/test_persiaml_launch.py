"""A script pair in PersiaML's style gives equal results with each of PersiaML's ways to start it."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from conftest import ROOT
from stack import missing

from persia.launch.local_job import free_ports

pytestmark = pytest.mark.usefixtures("forks")

PAIR = ROOT / "tests" / "persiaml_style"
DEADLINE = 180.0
RUN = {"BATCHES": "60", "STOP_AT": "40", "REPRODUCIBLE": "1"}
EQUAL = re.compile(r"test auc: ([0-9.]+) rows: ([0-9]+)")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(no_job: None, tmp_path: Path) -> Path:
    """A copy of the scripts, in which a job may leave its files."""
    if reason := missing():
        pytest.skip(reason)
    return Path(shutil.copytree(PAIR, tmp_path / "job"))


@pytest.fixture
def start(folder: Path, commands: str) -> Iterator[Start]:
    """Run a command line in the folder, in a new session."""
    started: list[subprocess.Popen[str]] = []

    def begin(line: str, env: Mapping[str, str]) -> "subprocess.Popen[str]":
        with (folder / f"{len(started)}.log").open("w") as log:
            process = subprocess.Popen(
                ["/bin/sh", "-c", line],
                cwd=folder,
                env={**os.environ, "PATH": commands, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    for process in started:
        process.wait(DEADLINE)
    for log in sorted(folder.glob("*.log")):
        sys.stdout.write(f"=== {log.name}\n{log.read_text()}\n")  # shown if the test failed


def read(folder: Path) -> list[tuple[str, str]]:
    """Return AUC and rows of every run so far."""
    return EQUAL.findall("".join(log.read_text() for log in sorted(folder.glob("*.log"))))


@pytest.fixture
def embedded(folder: Path) -> tuple[str, str]:
    """AUC and rows of ``python train.py``."""
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, **RUN},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the staleness is 1" in done.stderr, "its default of 10 is not refused"
    found = EQUAL.search(done.stdout)
    assert found, done.stdout
    return found[1], found[2]


def procfile(first: int) -> dict[str, str]:
    """The command lines of the Procfile by name, with ports of this test. NATS has the first of three ports."""
    ports = {"$NATS_PORT": first, "$WORKER_PORT": first + 1, "$SERVER_PORT": first + 2}
    lines = {}
    for line in (PAIR / "Procfile").read_text().splitlines():
        name, command = line.split(":", 1)
        for variable, port in ports.items():
            command = command.replace(variable, str(port))
        lines[name] = command.strip()
    return lines


def test_a_procfile_trains_each_time_it_is_started(folder: Path, start: Start, embedded: tuple[str, str]) -> None:
    """Server and middleware share a host, the default port of metrics and a configuration, without a token."""
    nats_port = free_ports(None, 3)
    env = {"PERSIA_NATS_URL": f"nats://0.0.0.0:{nats_port}", "LOG_LEVEL": "info", **RUN}
    lines = procfile(nats_port)
    processes = {name: start(line, env) for name, line in lines.items()}
    assert processes.pop("nn_worker").wait(DEADLINE) == 0, read(folder)
    assert read(folder) == [embedded]
    assert {name for name, process in processes.items() if process.poll() is not None} == set()
    assert start(lines["nn_worker"], env).wait(DEADLINE) == 0
    assert read(folder) == [embedded] * 2, "the second start trains too"
    assert list(folder.glob("runs/*/summary-previous.json"))


def test_up_gives_the_same_numbers(folder: Path, start: Start, embedded: tuple[str, str]) -> None:
    (folder / "job.yml").write_text(
        "embedding_config: config/embedding_config.yml\nglobal_config: config/global_config.yml\n"
        "servers: 2\nmiddlewares: 2\ndata_compose: {entry: data_loader.py}\ntrainer: {entry: train.py}\n"
    )
    assert start("persia up job.yml", RUN).wait(DEADLINE) == 0
    assert read(folder) == [embedded]
