"""``persia doctor --matrix``: each rank connects to every other rank, found by a rendezvous or by NATS."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Verb
from stack import MakeStack

from persia.doctor import link_speed, matrix

pytestmark = pytest.mark.usefixtures("forks")


def rank(number: int, size: int, env: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "persia", "doctor", "--matrix", str(size), "--json"],
        env={**os.environ, "RANK": str(number), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(ranks: "list[subprocess.Popen[str]]") -> list[tuple[int, list[dict[str, Any]], str]]:
    """Return the exit code, the checks and the errors of each rank."""
    found = []
    for each in ranks:
        out, errors = each.communicate(timeout=120)
        found.append((each.returncode, json.loads(out) if out else [], errors))
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.row("S3-11")
def test_ranks_of_this_host(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "persia", "doctor", "--matrix", "2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, all 2 connections are open" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if f"rank 0 {socket.gethostname()}" in line]
    assert lines and lines[0][-2:] == ["-", "ok"], done.stdout


@pytest.mark.row("S4-19")
def test_connections_are_measured(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "persia", "doctor", "--matrix", "2", "--measure"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = re.findall(r"(\d+\.\d\d) ms (\d+\.\d\d) Gbit/s", done.stdout)
    assert len(cells) == 2, done.stdout
    assert all(float(ms) < 1000 and float(speed) > 0.1 for ms, speed in cells), "loopback"


@pytest.mark.row("S4-19")
def test_a_slow_link_is_measured_as_slow() -> None:
    """The peer waits 20 ms before each response, and 1 s before it confirms the data that it has read."""
    read: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=slow, args=(server, read), daemon=True)
        thread.start()
        found = link_speed.measure("127.0.0.1", server.getsockname()[1])
        thread.join(60)
    assert 0.02 <= found.round_trip_s < 0.5
    assert 0 < found.bytes_per_s < read[0], "bytes that are on their way take time, too"
    with pytest.raises(OSError, match="refused"):
        link_speed.measure("127.0.0.1", free_port())


def slow(server: socket.socket, read: list[int]) -> None:
    echo, _ = server.accept()
    with echo:
        echo.recv(1)
        while byte := echo.recv(1):
            time.sleep(0.02)
            echo.sendall(byte)
    sink, _ = server.accept()
    with sink:
        count = -1
        while part := sink.recv(1 << 16):
            count += len(part)
        time.sleep(1.0)
        read.append(count)
        sink.sendall(count.to_bytes(8, "big"))


@pytest.mark.row("S3-11")
def test_a_connection_that_fails_is_named_on_every_rank(make_stack: MakeStack) -> None:
    """The ranks find each other by NATS. Nothing listens at the address that rank 1 announces."""
    stack = make_stack(nats_only=True)
    env = {**stack.python_env, "PERSIA_START_TIMEOUT": "60"}
    away = {**env, "PERSIA_ADVERTISE": "no-such-host.invalid", "GLOO_SOCKET_IFNAME": ""}
    host = socket.gethostname()
    for code, checks, errors in results([rank(0, 2, env), rank(1, 2, away)]):
        assert code == 3, errors
        whole = next(each for each in checks if each["name"] == "matrix")
        assert "2 ranks, 1 of 2 connections fail" in whole["found"] and "unresolved" in whole["found"]
        (failed,) = [each for each in checks if each["name"] == "connection"]
        assert failed["found"] == f"rank 0 ({host}) to rank 1 ({host}) at no-such-host.invalid: unresolved"
        assert failed["next"] == "getent hosts no-such-host.invalid"


@pytest.mark.row("S3-11")
def test_a_rank_that_does_not_come_is_named() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "PERSIA_START_TIMEOUT": "2"}
    alone = [rank(number, 2, {**env, "MASTER_PORT": str(free_port())}) for number in (0, 1)]
    first, last = results(alone)
    assert first[0] == 3 and "rank 1 of 2 did not connect within 2 s" in first[2]
    assert last[0] == 3 and "127.0.0.1" in last[2] and "(DNS ok / TCP refused)" in last[2] and "waited 2 s" in last[2]
    assert "next:  start the command on every rank: RANK=R persia doctor --matrix 2" in last[2]


@pytest.mark.row("S3-11")
def test_a_port_of_the_rendezvous_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ((code, _, errors),) = results([rank(0, 2, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})])
    assert code == 2 and f"rank 0 cannot listen: port {port} is in use by pid {os.getpid()} (" in errors
    assert "set MASTER_PORT to another port" in errors


@pytest.mark.row("S3-11")
def test_outcomes_of_connections_are_told_apart() -> None:
    seats = [matrix.Seat("a", "10.0.0.1", 1), matrix.Seat("b", "10.0.0.2", 2), matrix.Seat("c", "172.17.0.2", 3)]
    rows = [
        [("", ""), ("filtered", "no answer in 2 s"), ("unreachable", "No route to host")],
        [("reached", ""), ("", ""), ("reached", "")],
        [("reached", ""), ("reached", ""), ("", "")],
    ]
    whole, filtered, unreachable = matrix.of(matrix.Matrix(seats, rows))
    assert whole.found.splitlines() == [
        "3 ranks, 2 of 6 connections fail",
        "from \\ to  rank 0  rank 1    rank 2",
        "rank 0 a   -       filtered  unreachable",
        "rank 1 b   ok      -         ok",
        "rank 2 c   ok      ok        -",
    ]
    assert filtered.found == "rank 0 (a) to rank 1 (b) at 10.0.0.2: filtered"
    assert "allow 10.0.0.1 to connect to all TCP ports of 10.0.0.2" in filtered.next
    assert "dist.interface" in unreachable.next and "172.17.0.2" in unreachable.next


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2: ranks go from 0 to 1"),
        (
            {"RANK": "1", "WORLD_SIZE": "4"},
            "contradicts WORLD_SIZE=4\nnext:  specify the number of all ranks: --matrix 4",
        ),
        ({"RANK": "1"}, "neither PERSIA_NATS_URL nor both MASTER_ADDR and a numeric MASTER_PORT"),
        ({"RANK": "1"}, "torchrun and `persia debug run` set MASTER_ADDR and MASTER_PORT on every rank"),
    ],
)
def test_variables_that_are_wrong(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str], text: str
) -> None:
    for name, value in {"WORLD_SIZE": "2", **env}.items():
        monkeypatch.setenv(name, value)
    assert text in verb("doctor", "--matrix", "2", code=2)[1]


@pytest.mark.row("S3-11")
def test_rank_0_listens_at_an_address_of_its_host() -> None:
    [(code, _, output)] = results([rank(0, 2, {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1234"})])
    assert code == 2
    assert "rank 0 listens at MASTER_ADDR=192.0.2.1, which is not an address of this host" in output


def test_a_rank_that_fails_leaves_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str | None] = []

    def all_gather(topic: str, mine: object) -> list[object]:
        if topic == "doctor: connections":
            raise OSError("too many open files")
        return [mine]

    monkeypatch.setattr(matrix, "_met", lambda *_: SimpleNamespace(all_gather=all_gather, leave=left.append))
    monkeypatch.setattr(matrix, "address", lambda: "127.0.0.1")
    with pytest.raises(OSError, match="too many"):
        matrix.connected(0, 1)
    assert left == ["OSError: too many open files"]
