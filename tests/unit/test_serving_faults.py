"""Faults of a serving process: signals, changed bundles, slow clients, lost clients, overload, malformed requests."""

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http import framed, rest, send_malformed
from serving_model import SmallModel
from serving_process import Serving, serving, started, write_bundle
from waiting import wait_until

ROWS = [{"user": 3, "site": "a", "tags": [1, 2], "price": 0.5}, {"user": 5, "tags": [7], "price": 2}]
BODY = json.dumps(ROWS).encode()
REQUEST = framed(BODY)


def expected(scale: float) -> list[float]:
    """Return the scores of the rows by the model with this scale."""
    return SmallModel(scale).scores(ROWS)


def version(folder: Path, number: int, **keys: Any) -> Path:
    """Write a version whose scale is its number."""
    return write_bundle(folder / str(number), float(number), **keys)


@contextmanager
def load_on(server: Serving, clients: int = 4) -> Iterator[list[tuple[int, Any]]]:
    """Request scores from several clients until the end of the block, and return all responses."""
    answers: list[tuple[int, Any]] = []
    over = threading.Event()

    def ask() -> None:
        client = server.client()
        while not over.is_set():
            try:
                status, _, content = client.score(BODY)
            except OSError as error:
                status, content = 0, str(error)
            answers.append((status, content))

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def check(answers: list[tuple[int, Any]]) -> set[str]:
    """Check that each response has the scores of the bundle that it names, and return these bundles."""
    scores: dict[str, list[float]] = {}
    for status, content in answers:
        assert status == 200, content
        name = content["bundle"]
        scores.setdefault(name, expected(float(name.removeprefix("small-"))))
        assert content["scores"] == scores[name]
    return {*scores}


def test_a_signal_ends_it_after_the_requests_that_arrived(tmp_path: Path) -> None:
    with serving(version(tmp_path, 1, delay_s=1.5), tmp_path / "log") as server:
        connections = [server.connect() for _ in range(3)]
        for connection in connections:
            connection.sendall(REQUEST)
        wait_until("three requests", lambda: server.metric("persia_serving_waiting_requests") == 3, 20)
        server.process.send_signal(signal.SIGTERM)
        server.says("stopping")
        for connection in connections:
            answer = connection.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert server.process.wait(20) == 0
    with serving(tmp_path / "1", tmp_path / "log") as server:
        assert server.stop(signal.SIGINT) == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_load_of_the_first_bundle(tmp_path: Path, number: int, code: int) -> None:
    with started(version(tmp_path, 1, slow=1), tmp_path / "log") as server:
        server.says("loading")
        assert server.stop(number) == code
        assert "nothing has begun" in server.output


def test_it_answers_while_a_load_balancer_learns_that_it_stops(tmp_path: Path) -> None:
    with serving(version(tmp_path, 1), tmp_path / "log", drain_s=60) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
            assert server.metric("persia_serving_ready") == 1
            server.process.send_signal(signal.SIGTERM)
            server.says("no longer ready")
            wait_until("not ready", lambda: server.client().ask("GET", "/v2/health/ready")[0] == 503, 20)
            assert "persia_serving_ready 0.0" in server.client().ask("GET", "/metrics")[2].decode()
            assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert check([server.client().score(BODY)[::2]]) == {"small-1"}  # by a new connection
        assert server.stop() == 0  # the second signal ends the wait


def test_a_higher_version_replaces_the_served_one_without_a_failed_request(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    version(versions, 1)
    (versions / "notes").mkdir()
    with serving(versions, tmp_path / "log") as server, load_on(server) as answers:
        for number in (2, 10):
            version(versions, number)
            server.says(f"serving {versions / str(number)}, bundle small-{number}")
            count = len(answers)
            wait_until("more answers", lambda count=count: len(answers) > count + 20, 30)  # type: ignore[misc]
    assert check(answers) == {"small-1", "small-2", "small-10"}
    assert answers[-1][1]["bundle"] == "small-10"


def test_the_ages_are_those_of_the_bundle_that_is_served(tmp_path: Path) -> None:
    hour, minute = 3600.0, 60.0
    versions = tmp_path / "versions"
    began = time.time()
    version(versions, 1, exported_at=began - hour)
    with serving(versions, tmp_path / "log") as server:

        def ages() -> tuple[float, float]:
            found = [server.metric(f"persia_serving_bundle_{name}age_seconds ") for name in ("", "load_")]
            return found[0], found[1]

        wait_until("a second", lambda: ages()[1] > 1, 20)
        exported, loaded = ages()
        assert hour < exported < hour + minute and loaded < minute
        at = time.monotonic()
        version(versions, 2, exported_at=began - 2 * hour)
        server.says("bundle small-2, loaded")
        wait_until("the new bundle", lambda: server.metric('persia_serving_bundle{bundle="small-2"}') == 1, 20)
        exported, since = ages()
        assert 2 * hour < exported < 2 * hour + minute
        assert since < min(loaded, 1.0) + time.monotonic() - at, "the time starts again"
        version(versions, 3, exported_at=began + hour)  # exported by a machine whose clock is ahead
        server.says("bundle small-3, loaded")
        wait_until("no age", lambda: ages()[0] == 0.0, 20)


def test_a_link_that_changes_and_sighup_replace_the_bundle(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(version(tmp_path, 1))
    with serving(link, tmp_path / "log") as server:
        (tmp_path / "new").symlink_to(version(tmp_path, 2))
        (tmp_path / "new").replace(link)
        server.says("bundle small-2, loaded")
        write_bundle(tmp_path / "2", 3)  # the same folder with another bundle
        server.process.send_signal(signal.SIGHUP)
        server.says("bundle small-3, loaded")
        assert check([server.client().score(BODY)[::2]]) == {"small-3"}
        assert server.metric('persia_serving_reloads_total{outcome="ok"}') == 2


def test_a_bundle_that_cannot_be_loaded_leaves_the_served_one(tmp_path: Path) -> None:
    version(tmp_path, 1)
    with serving(tmp_path, tmp_path / "log") as server:
        version(tmp_path, 2, damaged=1)
        server.says("2 cannot be served")
        (tmp_path / "3").mkdir()  # half copied: no manifest yet
        assert check([server.client().score(BODY)[::2]]) == {"small-1"}
        assert server.metric('persia_serving_reloads_total{outcome="failed"}') >= 1
        version(tmp_path, 2)  # repaired
        server.says("bundle small-2, loaded")
        (tmp_path / "2" / "manifest.json").unlink()
        (tmp_path / "1" / "manifest.json").unlink()
        server.process.send_signal(signal.SIGHUP)
        server.says("no bundle")
        assert check([server.client().score(BODY)[::2]]) == {"small-2"}


def test_killed_while_reloading_it_starts_with_what_is_whole(tmp_path: Path) -> None:
    version(tmp_path, 1)
    with serving(tmp_path, tmp_path / "log") as server:
        version(tmp_path, 2, die=1)
        assert server.process.wait(30) == -signal.SIGKILL
    (tmp_path / "2" / "manifest.json").unlink()
    with serving(tmp_path, tmp_path / "log") as server:
        assert check([server.client().score(BODY)[::2]]) == {"small-1"}


def test_without_its_thread_for_scores_it_ends(tmp_path: Path) -> None:
    with serving(version(tmp_path, 1, broken=1), tmp_path / "log") as server:
        assert server.client().score(BODY)[0] == 500
        assert server.process.wait(30) == 1
        server.says("the scoring thread has ended: SystemError: broken")
        server.says("all connections are closed; ending")


def test_slow_clients_are_disconnected_and_harm_no_other(tmp_path: Path) -> None:
    with serving(version(tmp_path, 1), tmp_path / "log", timeout_s=2.0, connections=20) as server:
        slow = [server.connect() for _ in range(10)]
        for index, connection in enumerate(slow):
            connection.sendall(REQUEST[: (0, 10, 60, len(REQUEST) - 1)[index % 4]])
        with load_on(server, 2) as answers:
            for connection in slow:
                assert not rest(connection), "an answer to half a request"
        assert check(answers) == {"small-1"}
        many = [server.connect() for _ in range(21)]
        assert rest(many[-1]).startswith(b"HTTP/1.1 503 ")
        wait_until("those without a request to be disconnected", lambda: not rest(many[0]), 20)
        long = server.connect()
        long.sendall(b"GET /v2 HTTP/1.1\r\nx: " + b"y" * 40_000)
        assert rest(long).startswith(b"HTTP/1.1 400 ")
        assert server.metric("persia_serving_waiting_bytes") == 0


def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    with serving(version(tmp_path, 1), tmp_path / "log", timeout_s=1.0) as server:
        body = json.dumps(ROWS[:1] * 10_000).encode()
        request = b"POST /score HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        connection = server.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.5)

        def send() -> bool:
            try:
                connection.sendall(request)
            except TimeoutError:
                return False
            except OSError:
                return True
            return False

        wait_until("the connection to be closed", send, 60)
        assert check([server.client().score(BODY)[::2]]) == {"small-1"}


def test_clients_that_leave_do_no_harm(tmp_path: Path) -> None:
    with serving(version(tmp_path, 1, delay_s=0.05), tmp_path / "log") as server:
        for index in range(60):
            with server.connect() as connection:
                connection.sendall(REQUEST if index % 2 else REQUEST[:-5])
        assert check([server.client().score(BODY)[::2]]) == {"small-1"}
        wait_until("nothing to wait", lambda: server.metric("persia_serving_waiting_requests") == 0, 20)
        server.client().score(BODY)
        assert server.metric("persia_serving_waiting_bytes") == 0
        assert "Traceback" not in server.output


def test_more_requests_than_may_wait_are_told_to_come_again(tmp_path: Path) -> None:
    with serving(version(tmp_path, 1, delay_s=0.3), tmp_path / "log", waiting=4, batch_rows=2) as server:
        connections = [server.connect() for _ in range(12)]
        for connection in connections:
            connection.sendall(REQUEST.replace(b"Host: x", b"Connection: close"))
        answers = [rest(connection) for connection in connections]
        served = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200 ")]
        refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
        assert 4 <= len(served) <= 8 and len(served) + len(refused) == 12
        assert all(b"retry-after: 1\r\n" in answer for answer in refused)
        assert check([server.client().score(BODY)[::2]]) == {"small-1"}
        assert server.metric('persia_serving_requests_total{api="score",outcome="busy"}') == len(refused)


def test_a_request_that_waits_too_long_is_refused(tmp_path: Path) -> None:
    with serving(version(tmp_path, 1, delay_s=2.0), tmp_path / "log", timeout_s=1.0, batch_rows=2) as server:
        connections = [server.connect() for _ in range(3)]
        for connection in connections:
            connection.sendall(REQUEST.replace(b"Host: x", b"Connection: close"))
        statuses = sorted(rest(connection)[9:12] for connection in connections)
        assert statuses == [b"200", b"503", b"503"]


def overload(server: Serving, clients: int, seconds: float) -> list[tuple[int, Any]]:
    """Put load on a server from more clients than it can serve."""
    with load_on(server, clients) as answers:
        over = time.monotonic() + seconds
        wait_until("the end of the load", lambda: answers and time.monotonic() > over, seconds + 30, interval=0.2)
    return answers


def saturate(tmp_path: Path, clients: int, seconds: float) -> None:
    limits: dict[str, Any] = {"waiting": clients // 2, "batch_rows": 4}
    with serving(version(tmp_path, 1, delay_s=0.005), tmp_path / "log", **limits) as server:
        process = psutil.Process(server.process.pid)
        check(overload(server, 2, 1.0))
        before = process.memory_info().rss
        answers = overload(server, clients, seconds)
        refused = [content for status, content in answers if status == 503]
        check([answer for answer in answers if answer[0] != 503])
        assert refused and len(answers) - len(refused) > 100 * seconds / 2, (len(refused), len(answers))
        assert process.memory_info().rss < before + (64 << 20)
        assert check(overload(server, 1, 0.2)) == {"small-1"}  # the server recovers without intervention


def test_twice_the_load_that_it_can_serve(tmp_path: Path) -> None:
    saturate(tmp_path, 16, 3)


@pytest.mark.nightly
def test_twice_the_load_that_it_can_serve_for_a_minute(tmp_path: Path) -> None:
    saturate(tmp_path, 32, 60)


def refuse_malformed(tmp_path: Path, count: int, by_connection: int = 1) -> None:
    draw = random.Random(7)
    connections = count // by_connection
    with serving(version(tmp_path, 1), tmp_path / "log") as server:
        process = psutil.Process(server.process.pid)
        before = None
        for number in range(connections):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                send_malformed(connection, draw, BODY, by_connection)
            if number == connections // 4:
                before = process.memory_info().rss
            assert before is None or process.memory_info().rss < before + (32 << 20)
        assert before is not None
        assert "Traceback" not in server.output
        assert check([server.client().score(BODY)[::2]]) == {"small-1"}
        wait_until("nothing to wait", lambda: server.metric("persia_serving_waiting_requests") == 0, 20)


def test_malformed_requests(tmp_path: Path) -> None:
    refuse_malformed(tmp_path, 1_000)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_many_malformed_requests(tmp_path: Path) -> None:
    refuse_malformed(tmp_path, 100_000, by_connection=20)


def test_no_bundle_and_open_addresses_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from persia.errors import AuthError, CheckpointError, UsageError
    from persia.serving import access
    from persia.serving.location import find
    from persia.serving.manifest import Manifest

    (tmp_path / "empty").mkdir()
    (tmp_path / "versions" / "7").mkdir(parents=True)
    hints = [
        (find, "missing", "missing"),
        (find, "empty", "empty/1"),  # export refuses a folder that exists
        (find, "versions", "versions/8"),
        (Manifest.read, "missing", "missing"),
        (Manifest.read, "empty", "empty-2"),
    ]
    read: Callable[[Path], Any]
    for read, name, new in hints:
        with pytest.raises(CheckpointError, match="no bundle|no such folder") as caught:
            read(tmp_path / name)
        assert caught.value.hint == f"write a bundle: persia export runs/LATEST -o {tmp_path / new}"
    monkeypatch.delenv("PERSIA_TOKEN_FILE", raising=False)
    assert access.address("localhost:8000", "--http") == ("localhost", 8000)
    assert access.address("[::1]:0", "--http") == ("::1", 0)
    with pytest.raises(AuthError, match="--http 0.0.0.0:8000: refusing to listen without a token"):
        access.address("0.0.0.0:8000", "--http")
    for wrong in ("8000", ":8000", "x:", "127.0.0.1:99999"):
        with pytest.raises(UsageError, match="expected HOST:PORT"):
            access.address(wrong, "--http")
    monkeypatch.setenv("PERSIA_TLS_CERT", os.devnull)
    with pytest.raises(Exception, match="PERSIA_TLS_KEY is not set"):
        access.certificate()
