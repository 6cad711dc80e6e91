"""``persia logs --follow``: lines of a run's folder and of containers as they are written, until Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

import pytest
from conftest import Verb
from waiting import is_running, wait_until

from persia.doctor import follow
from persia.doctor.follow import FollowedLog
from persia.runtime import log_files

WAIT_S = 90.0
PERSIA = [sys.executable, "-c", "from persia.cli.main import main; main()"]


def line(second: int, text: str) -> str:
    return f"2025-11-25T10:00:{second:02}Z {text}\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the logs of a run with a server and a trainer."""
    made = tmp_path / "runs" / "one" / "logs"
    made.mkdir(parents=True)
    (made / "server-0.log").write_text(line(1, "info  ready") + line(4, "info  served"))
    (made / "trainer.log").write_text(line(2, "INFO begin") + line(3, "INFO step"))
    return made


class Following:
    """A command that follows, and its output."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.readers = []
        for stream, into in ((process.stdout, self.lines), (process.stderr, self.errors)):
            assert stream is not None
            self.readers.append(threading.Thread(target=self._read, args=(stream, into), daemon=True))
            self.readers[-1].start()

    @staticmethod
    def _read(stream: IO[str], into: list[str]) -> None:
        with stream:
            into.extend(each.rstrip("\n") for each in stream)

    def expect(self, count: int) -> list[str]:
        both = (self.lines, self.errors)
        wait_until(f"{count} lines", lambda: len(self.lines) >= count, WAIT_S, evidence=lambda: str(both))
        return self.lines

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)


@contextmanager
def following(cwd: Path, *words: str, path: str | None = None) -> Iterator[Following]:
    environment = {**os.environ, **({} if path is None else {"PATH": path})}
    process = subprocess.Popen(
        [*PERSIA, "logs", *words],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    followed = Following(process)
    try:
        yield followed
    finally:
        process.kill()
        process.wait()
        for reader in followed.readers:
            reader.join(WAIT_S)


def texts(lines: list[str]) -> list[str]:
    return [each.partition(" | ")[2] for each in lines]


@pytest.mark.row("S4-46")
def test_new_lines_of_all_processes_are_printed_until_ctrl_c(tmp_path: Path, folder: Path) -> None:
    with following(tmp_path, "runs/one", "-f") as followed:
        assert texts(followed.expect(4)) == ["info  ready", "INFO begin", "INFO step", "info  served"]
        append(folder / "trainer.log", line(5, "INFO step 2") + "Traceback of step 2\n")
        assert texts(followed.expect(6))[4:] == ["INFO step 2", "Traceback of step 2"]
        assert followed.lines[5].startswith("2025-11-25T10:00:05.000Z trainer "), "that of the line before it"
        (folder / "middleware-0.log").write_text(line(6, "info  a process that has started since"))
        assert texts(followed.expect(7))[6:] == ["info  a process that has started since"]
        append(folder / "server-0.log", "2025-11-25T10:00:07Z info  half")
        append(folder / "trainer.log", line(8, "INFO whole"))
        assert texts(followed.expect(8))[7:] == ["INFO whole"], "a line is shown when it is complete"
        append(folder / "server-0.log", " and half\n")
        assert texts(followed.expect(9))[8:] == ["info  half and half"]
        assert followed.interrupt() == 0, followed.errors
        assert not [each for each in followed.errors if "Traceback" in each]


@pytest.mark.row("S4-46")
def test_filters_apply_to_new_lines_and_tail_to_those_before(tmp_path: Path, folder: Path) -> None:
    with following(tmp_path, "--follow", "--tail", "1", "--grep", "step", "--service", "trainer") as followed:
        assert texts(followed.expect(1)) == ["INFO step"]
        append(folder / "server-0.log", line(5, "info  step of the server"))
        append(folder / "trainer.log", line(5, "INFO step 2") + line(6, "INFO save") + line(7, "INFO step 3"))
        assert texts(followed.expect(3)) == ["INFO step", "INFO step 2", "INFO step 3"]
        assert followed.interrupt() == 0


@pytest.mark.row("S4-46")
def test_a_file_that_is_rotated_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is rotated as the launcher does, more than once between two reads."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(log_files, "MAX_BYTES", 60)
    file = log_files.LineFile(tmp_path / "logs" / "a.log")
    log = FollowedLog(tmp_path, "a")
    try:
        for number in range(3):
            file.write_line(f"{number:>25}")  # two lines fit into a file
        assert [int(each) for each in log.read()] == [0, 1, 2]
        for number in range(3, 7):
            file.write_line(f"{number:>25}")
        assert (tmp_path / "logs" / "a.log.2").exists()
        assert [int(each) for each in log.read()] == [3, 4, 5, 6]
        assert log.read() == []
        file.write_line("7")
        assert log.read() == ["7"]
    finally:
        file.close()
        log.close()


def test_lines_without_any_time_get_none_of_1970(tmp_path: Path, folder: Path) -> None:
    rounds = follow.run(tmp_path / "runs" / "one")
    assert len([*next(rounds)]) == 4
    (folder / "nats.log").write_text("no time\n")
    before = datetime.now(timezone.utc).timestamp()
    (found,) = next(rounds)
    assert found.text == "no time" and found.time >= before - 60
    rounds.close()


FAKE = """#!/bin/sh
case "$*" in
*--services) echo trainer ;;
*"ps --all --quiet"*) echo id ;;
*"logs --follow"*)
    echo "$@" > {folder}/call
    printf '%s\\n' "trainer-1     | 2025-11-25T10:00:02Z second" "emb_server-1  | 2025-11-25T10:00:01Z first"
    while [ ! -e {folder}/more ]; do sleep 0.05; done
    echo "trainer-1     | 2025-11-25T10:00:03Z third"
    while [ ! -e {folder}/end ]; do sleep 0.05; done
    echo "emb_server-1 exited with code 0"
    {last} ;;
esac
"""


def docker(folder: Path, last: str) -> str:
    folder.mkdir()
    (folder / "docker").write_text(FAKE.format(folder=folder, last=last))
    (folder / "docker").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.row("S4-46")
def test_containers_are_followed_with_their_lines_in_order(tmp_path: Path) -> None:
    made = tmp_path / "docker"
    with following(tmp_path, "-f", "--since", "2025-11-25T10:00:00Z", path=docker(made, "exit 0")) as followed:
        assert texts(followed.expect(2)) == ["first", "second"]
        (made / "more").touch()
        assert texts(followed.expect(3))[2:] == ["third"]
        assert followed.interrupt() == 0, followed.errors
    assert "--follow --no-color --timestamps --since 2025-11-25T10:00:00.000Z" in (made / "call").read_text()


def test_the_end_of_all_containers_ends_it_and_an_error_of_docker_is_named(
    tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_QUIET_S", 10.0)  # the lines arrive together, however slow docker is
    for number, (last, code) in enumerate((("exit 0", 0), ("echo no space >&2; exit 1", 3))):
        made = tmp_path / str(number)
        monkeypatch.setenv("PATH", docker(made, last))
        (made / "more").touch()
        (made / "end").touch()
        out, errors = verb("logs", "-f", code=code)
        found = [each.split(maxsplit=1)[1] for each in out.splitlines()]
        assert found == [
            "emb_server-1   | first",
            "emb_server-1   | emb_server-1 exited with code 0",  # compose writes this line at the time of the last line
            "trainer-1      | second",
            "trainer-1      | third",
        ]
        assert ("docker compose logs: no space" in errors) == bool(code), errors


@pytest.mark.parametrize("ignores", ["docker", "its child"])
def test_a_docker_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: str) -> None:
    """A child process that keeps the output pipe open is killed too."""
    first = "trap '' TERM" if ignores == "docker" else ":"
    child = "(trap '' TERM; exec sleep 600) &"
    line = "echo 'trainer-1  | 2025-11-25T10:00:01Z first'"
    (tmp_path / "docker").write_text(
        f'#!/bin/sh\n{first}\n{child}\necho "$$ $!" > {tmp_path}/ids\n{line}\nwait\nsleep 600\n'
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(follow, "_END_S", 0.5)
    rounds = follow.stack()
    assert [each.text for each in next(rounds)] == ["first"]
    ids = [int(each) for each in (tmp_path / "ids").read_text().split()]
    assert len(ids) == 2 and all(map(is_running, ids))
    closing = threading.Thread(target=rounds.close)
    closing.start()
    try:
        closing.join(WAIT_S)
        assert not closing.is_alive()
        wait_until("the end of both", lambda: not any(map(is_running, ids)), WAIT_S)
    finally:
        for each in filter(is_running, ids):
            os.kill(each, signal.SIGKILL)


def test_a_folder_without_logs_is_refused(tmp_path: Path, verb: Verb) -> None:
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    assert "runs/empty: no logs" in verb("logs", "runs/empty", "-f", code=2)[1]
