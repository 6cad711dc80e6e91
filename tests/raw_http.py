"""HTTP requests as bytes, for clients that break them."""

import random
import socket
from collections.abc import Callable
from typing import Any

SHORTEST = 30
"""A request is not made shorter than this many bytes."""


def rest(connection: socket.socket) -> bytes:
    """Return what a connection still receives until its end."""
    found = b""
    try:
        while part := connection.recv(65_536):
            found += part
    except ConnectionResetError:
        pass
    return found


def malformed(draw: random.Random, request: bytes) -> bytes:
    """Return a request with something wrong: bytes replaced, removed or added."""
    text = bytearray(request)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(text))
        change: Callable[[], Any] = draw.choice(
            [
                lambda at=at: text.__setitem__(at, draw.randrange(256)),
                lambda at=at: text.__delitem__(slice(at, at + draw.randint(1, 20))),
                lambda at=at: text.__setitem__(slice(at, at), draw.randbytes(draw.randint(1, 20))),
            ]
        )
        if len(text) > SHORTEST:
            change()
    return bytes(text)
