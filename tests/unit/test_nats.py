"""Questions to NATS that fail."""

import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from persia.discovery import nats
from persia.errors import UnreachableError


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
    """A port where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("failing", [refuses, closes_after_its_greeting])
def test_a_question_that_fails_leaves_no_socket_open(failing: object) -> None:
    """An open socket would be a ResourceWarning, which fails the test, once it is collected."""
    with failing() as port:  # type: ignore[operator]
        with pytest.raises(UnreachableError, match=f"NATS at 127.0.0.1:{port} is not reachable"):
            nats.services(f"nats://127.0.0.1:{port}", job=None)
        gc.collect()
