"""A TCP proxy between two parts of a job, which a fault can slow down, block or reset, and a proxy of NATS."""

import contextlib
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Literal

import psutil

Way = Literal["requests", "replies"]
_CHUNK = 1 << 16
_CHUNKS = 64
"""The number of chunks that may be in transit in one direction of one connection; a sender of more waits."""

Chunks = queue.Queue[tuple[float, bytes] | None]


class Link:
    """Forwards bytes from ``near``, where it listens, to ``far``, and back.

    Attributes:
        delay_s: The delay of each byte, in either direction.
        slow: The only process whose connections are delayed; None means all.
        bytes_per_s: The bandwidth in each direction of each connection.
        far: The address to which bytes are forwarded.
    """

    delay_s = 0.0
    slow: psutil.Process | None = None
    bytes_per_s = float("inf")

    def __init__(self, near: tuple[str, int], far: tuple[str, int]) -> None:
        self.far = far
        self._listener = socket.create_server(near)
        self._open: list[socket.socket] = []
        self._held: set[Way] = set()
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name=f"link {near[1]}", daemon=True).start()

    def hold(self, *ways: Way) -> None:
        """Forward nothing in these directions until :meth:`heal`, without closing connections."""
        with self._changed:
            self._held |= set(ways)

    def heal(self) -> None:
        """Forward again, starting with the data that was held back."""
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    def reset(self) -> None:
        """End every current connection by RST."""
        with self._changed:
            for each in self._open:
                with contextlib.suppress(OSError):  # the connection has ended on its own
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.shutdown(socket.SHUT_RD)  # wakes the reader, which keeps the connection open; no FIN
                each.close()
            self._open.clear()

    def close(self) -> None:
        """Close the listener and every connection."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()
        self.reset()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(self.far)
            except OSError:  # no process listens at the target at the moment
                near.close()
                continue
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self._open += [near, far]
            port = near.getpeername()[1]
            self._carry(near, far, "requests", port)
            self._carry(far, near, "replies", port)

    def _carry(self, source: socket.socket, sink: socket.socket, way: Way, port: int) -> None:
        chunks: Chunks = queue.Queue(_CHUNKS)
        threading.Thread(target=self._read, args=(source, chunks, way, port), daemon=True).start()
        threading.Thread(target=self._write, args=(sink, chunks, way), daemon=True).start()

    def _read(self, source: socket.socket, chunks: Chunks, way: Way, port: int) -> None:
        with contextlib.suppress(OSError):  # reset; the other side detects it by the end of the stream
            for data in self._arrivals(source, way):
                chunks.put((time.monotonic() + self._delay_of(port), data))
        chunks.put(None)

    def _delay_of(self, port: int) -> float:
        """Return the delay of the connection from this port."""
        if not self.delay_s or self.slow is None:
            return self.delay_s
        try:
            ports = {each.laddr.port for each in self.slow.net_connections(kind="tcp") if each.laddr}
        except psutil.NoSuchProcess:
            return 0.0
        return self.delay_s if port in ports else 0.0

    def _arrivals(self, source: socket.socket, way: Way) -> Iterator[bytes]:
        while data := source.recv(_CHUNK):
            yield data

    def _write(self, sink: socket.socket, chunks: Chunks, way: Way) -> None:
        gone = False
        while (chunk := chunks.get()) is not None:
            due, data = chunk
            time.sleep(max(0.0, due - time.monotonic()) + len(data) / self.bytes_per_s)
            with self._changed:
                self._changed.wait_for(lambda: way not in self._held)
            if not gone:
                try:
                    sink.sendall(data)
                except OSError:
                    gone = True  # the remaining data is read and dropped, because the sender may wait for space
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


class NatsLink(Link):
    """A proxy of NATS that may lose messages, deliver them twice, or swap a message with the next one.

    Attributes:
        lost: Messages that were not delivered.
        twice: Messages that were delivered twice.
        late: The number of messages that were delivered after a later one.
    """

    def __init__(self, near: tuple[str, int], far: tuple[str, int]) -> None:
        self._random = random.Random(0)
        self._share = 0.0
        self.lost = self.twice = self.late = 0
        super().__init__(near, far)

    def disturb(self, share: float, seed: int) -> None:
        """Apply each of the three faults to this share of the messages from now on. The seed selects the messages."""
        self._random = random.Random(seed)
        self._share = share

    def _arrivals(self, source: socket.socket, way: Way) -> Iterator[bytes]:
        if way == "requests":
            yield from super()._arrivals(source, way)
            return
        behind = b""
        with source.makefile("rb") as stream:
            while line := stream.readline():
                words = line.split()
                if words[0] not in {b"MSG", b"HMSG"}:
                    yield line
                    continue
                message = line + stream.read(int(words[-1]) + 2)  # the payload and the end of its line
                fate = self._random.random() / self._share if self._share else 3.0
                if fate < 1:
                    self.lost += 1
                elif fate < 2 and not behind:
                    self.late += 1
                    behind = message
                    continue
                elif fate < 3:
                    self.twice += 1
                    yield message + message
                else:
                    yield message
                if behind:
                    yield behind
                    behind = b""
            if behind:
                yield behind
