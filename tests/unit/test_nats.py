"""Failed queries to NATS."""

import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from persia.cli import status
from persia.discovery import nats
from persia.doctor import monitoring
from persia.errors import UnreachableError, UsageError


@contextmanager
def closes_after_its_greeting() -> Iterator[int]:
    """A server that greets as NATS does, then closes the connection."""

    def serve() -> None:
        with suppress(OSError):  # the listener is shut down
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.sendall(b'INFO {"server_id": "one"}\r\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def refuses() -> Iterator[int]:
    """A port at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_the_form_that_reaches_a_stack_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = "docker compose run --rm --no-deps trainer persia status"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("persia.discovery.nats.in_container", lambda: False)

    def fails(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    with refuses() as port:
        for expected in (False, True):
            with pytest.raises(UnreachableError) as found:
                nats.services(f"nats://127.0.0.1:{port}", job=None)
            assert (form in (found.value.hint or "")) is expected
            (tmp_path / "docker-compose.yaml").touch()
    (tmp_path / "docker-compose.yaml").unlink()
    monkeypatch.setattr("persia.discovery.nats._check_listens", fails)
    with pytest.raises(UnreachableError) as found:
        nats.services("nats://persia_nats_service:4222", job=None)
    assert form in (found.value.hint or "") and "persia_nats_service" in (found.value.hint or "")
    monkeypatch.setattr("persia.discovery.nats.in_container", lambda: True)
    with pytest.raises(UnreachableError) as found:
        nats.services("nats://persia_nats_service:4222", job=None)
    assert form not in (found.value.hint or "")


def test_a_next_step_names_the_form_of_status_that_works_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = "docker compose run --rm --no-deps trainer persia status"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERSIA_NATS_URL", raising=False)
    monkeypatch.setattr("persia.discovery.nats.in_container", lambda: False)
    down = {"health": "down", "lastError": "timeout", "scrapeUrl": "http://a:1/metrics", "labels": {"instance": "a:1"}}
    assert nats.status_command() == "persia status"
    (tmp_path / "docker-compose.yaml").touch()
    (found,) = monitoring._target("persia-server", down, set())
    assert found.next.startswith(f"{form}; then curl")
    for variable, place in (("PERSIA_NATS_URL", False), ("", True)):
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv(variable, "nats://127.0.0.1:4222")
            patch.setattr("persia.discovery.nats.in_container", lambda place=place: place)
            assert nats.status_command() == "persia status"


def test_status_without_an_address_names_the_form_for_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_NATS_URL", raising=False)
    with pytest.raises(UsageError) as found:
        status._url(None)
    assert "docker compose run --rm --no-deps trainer persia status" in (found.value.hint or "")


@pytest.mark.parametrize("failing", [refuses, closes_after_its_greeting])
def test_a_question_that_fails_leaves_no_socket_open(failing: object) -> None:
    """An open socket would cause a ResourceWarning when it is collected, and the warning fails the test."""
    with failing() as port:  # type: ignore[operator]
        with pytest.raises(UnreachableError, match=f"NATS at 127.0.0.1:{port} is not reachable"):
            nats.services(f"nats://127.0.0.1:{port}", job=None)
        gc.collect()
