"""A connection between two ranks. Its messages are lines of JSON, with flags and names, never tensors."""

import contextlib
import json
import select
import socket
import threading
from typing import Any

from persia.runtime import clock

_LINE = 1 << 20
"""The maximum size of a message, in bytes."""

Message = dict[str, Any]


class Link:
    """A connection between two ranks that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()
        self.heard = clock.now()

    def send(self, message: Message) -> bool:
        """Send a message; return False if the connection is closed, which the reading thread notices too."""
        data = line(message)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """Return the next message; None at the end of the connection, or for an invalid message."""
        try:
            data = self._lines.readline(_LINE)
        except (OSError, ValueError):
            return None
        self.heard = clock.now()
        return parsed(data)

    @property
    def over(self) -> bool:
        """Whether the peer has closed the connection, even if unread data remains."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # this process has closed the connection
            return True

    def hang_up(self) -> None:
        """Shut the connection down, and wake the reading thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket. No thread may be reading from it."""
        self.hang_up()
        self._lines.close()
        self._socket.close()


def line(message: Message) -> bytes:
    """Return a message as an encoded line."""
    return json.dumps(message).encode() + b"\n"


def parsed(data: bytes) -> Message | None:
    """Return the message in a complete line; None for an invalid one."""
    try:
        message = json.loads(data) if data.endswith(b"\n") else None
    except (ValueError, RecursionError):  # RecursionError: the lists are nested too deeply
        return None
    return message if isinstance(message, dict) else None


def names(ranks: list[int]) -> str:
    """Return the names of ranks for a message."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
