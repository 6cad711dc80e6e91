"""HTTP requests as bytes, for clients that damage them."""

import errno
import random
import re
import socket
from collections.abc import Callable
from typing import Any

SHORTEST = 30
"""A request is not made shorter than this many bytes."""
NOT_FINITE = b"the model returned a score that is not a finite number"
"""The error for a huge number, which damaged bytes can create, for example by the loss of a decimal point."""
DISCONNECTED = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)
"""The errors of a connection that the server has ended."""


def rest(connection: socket.socket) -> bytes:
    """Return the data that a connection receives until its end."""
    found = b""
    try:
        while part := connection.recv(65_536):
            found += part
    except ConnectionResetError:
        pass
    return found


def malformed(draw: random.Random, request: bytes) -> bytes:
    """Return a request in which bytes are replaced, removed or added."""
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


def framed(body: bytes) -> bytes:
    """Return a request for scores with this body and the correct content length."""
    return b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def answers(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Return the status and the body of each of the next responses."""
    found: list[tuple[int, bytes]] = []
    text = b""
    while len(found) < count:
        head, end, body = text.partition(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
        if end and length and len(body) >= int(length[1]):
            assert head.startswith(b"HTTP/1.1 "), head
            size = int(length[1])
            found.append((int(head.split()[1]), body[:size]))
            text = body[size:]
            continue
        part = connection.recv(65_536)
        assert part, f"the connection ended after {len(found)} of {count} responses: {text!r}"
        text += part
    return found


def send_malformed(connection: socket.socket, draw: random.Random, body: bytes, count: int) -> None:
    """Send malformed requests over one connection, and check that no response is a failure of the server.

    All requests except the last have malformed bodies of the correct length, and are sent together. Each of them must
    get a response. The last one has wrong bytes anywhere, so the server may also close the connection.
    """
    connection.sendall(b"".join(framed(malformed(draw, body)) for _ in range(count - 1)))
    for status, content in answers(connection, count - 1):
        assert 200 <= status < 500 or NOT_FINITE in content, (status, content)
    try:
        connection.sendall(malformed(draw, framed(body)))
        connection.shutdown(socket.SHUT_WR)
        answer = rest(connection)
    except OSError as error:
        if error.errno not in DISCONNECTED:
            raise
        return
    assert not answer or re.match(rb"HTTP/1\.1 [234]\d\d ", answer) or NOT_FINITE in answer, answer
