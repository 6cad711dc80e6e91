"""The port for metrics: slow clients, and many simultaneous clients."""

import contextlib
import http.client
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge
from waiting import wait_until

from persia.monitor import port


def read(number: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{number}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("seen", "A number", registry=registry).set(7)
    return registry


def idle(number: int) -> socket.socket:
    """Return a connection that sends no request."""
    return socket.create_connection(("127.0.0.1", number), timeout=10)


def test_a_client_that_sends_nothing_is_closed(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert port._Handler.timeout == port.REQUEST_S == 5
    monkeypatch.setattr(port._Handler, "timeout", 0.2)
    with idle(port.serve("127.0.0.1", 0, registry)) as connection:
        assert connection.recv(1) == b"", "the server closes it"


def test_connections_above_the_limit_are_closed_and_others_are_served(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "CONNECTIONS", 2)
    number = port.serve("127.0.0.1", 0, registry)

    def is_served() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return "seen 7.0" in read(number)
        return False

    with idle(number), idle(number):
        assert not is_served()
    for _ in range(3):
        wait_until("a connection to be free", is_served, 10)


def test_it_is_served_over_ipv6(registry: CollectorRegistry) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    number = port.serve("::1", 0, registry)
    with urllib.request.urlopen(f"http://[::1]:{number}/metrics", timeout=10) as answer:
        assert b"seen 7.0" in answer.read()
