"""Measures the round trip and the speed of a connection between two ranks."""

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass

_ECHO, _SINK = b"e", b"s"
_PINGS = 21
_SEND_S = 0.3
"""Seconds during which bytes are sent as fast as possible."""
_CHUNK = 1 << 20
_LIMIT_S = 10.0
"""Seconds within which the other rank must respond."""
_COUNT = struct.Struct("!Q")


@dataclass(frozen=True)
class Speed:
    """The measured properties of a connection.

    Attributes:
        round_trip_s: The median round trip of one byte, in seconds.
        bytes_per_s: Bytes per second over one TCP connection.
    """

    round_trip_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        """Return both values with their units."""
        return f"{self.round_trip_s * 1000:.2f} ms {self.bytes_per_s * 8 / 1e9:.2f} Gbit/s"


def serve(server: socket.socket) -> None:
    """Respond to measurements of other ranks in threads, until the socket is closed. Other connections are closed."""
    threading.Thread(target=_accept, args=(server,), name="persia-measure", daemon=True).start()


def _accept(server: socket.socket) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # the socket is closed
            return
        threading.Thread(target=_answer, args=(client,), name="persia-measure", daemon=True).start()


def _answer(client: socket.socket) -> None:
    with client, contextlib.suppress(OSError):  # the other rank reports the failure
        client.settimeout(_LIMIT_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = client.recv(1)
        if kind == _ECHO:
            while byte := client.recv(1):
                client.sendall(byte)
        elif kind == _SINK:
            buffer, count = memoryview(bytearray(_CHUNK)), 0
            while got := client.recv_into(buffer):
                count += got
            client.sendall(_COUNT.pack(count))


def measure(host: str, port: int) -> Speed:
    """Measure the connection to a rank that serves.

    Raises:
        OSError: The connection fails.
    """
    with _connected(host, port, _ECHO) as client:
        trips = []
        for _ in range(_PINGS):
            began = time.monotonic()
            client.sendall(b".")
            client.recv(1)
            trips.append(time.monotonic() - began)
    with _connected(host, port, _SINK) as client:
        block, began = bytes(_CHUNK), time.monotonic()
        while time.monotonic() < began + _SEND_S:
            client.sendall(block)
        client.shutdown(socket.SHUT_WR)
        answer = client.recv(_COUNT.size, socket.MSG_WAITALL)
        seconds = time.monotonic() - began
    if len(answer) != _COUNT.size:
        raise ConnectionResetError("the other rank closed the connection")
    return Speed(sorted(trips)[_PINGS // 2], _COUNT.unpack(answer)[0] / seconds)


def _connected(host: str, port: int, kind: bytes) -> socket.socket:
    client = socket.create_connection((host, port), timeout=_LIMIT_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.sendall(kind)
    return client
