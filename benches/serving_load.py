"""Send HTTP requests at a rate, and measure their latency: ``serving_load.py SPEC.json`` prints one JSON object.

Requests begin at random times whose mean interval is 1 / rate, even if earlier requests have no response yet. The
latency of a request counts from the time at which it should have begun, so a slow server cannot hide it.
"""

import asyncio
import json
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any


class Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._buffer = b""
        self._begun = 0.0
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Store the connection."""
        self.transport = transport
        self._load.free.append(self)

    def send(self, request: bytes, begun: float) -> None:
        """Send a request."""
        self._begun = begun
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Receive data of a response."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.index(b"content-length:") + 15
        length = int(head[at : at + 12].split(b"\r\n")[0])
        if len(self._buffer) >= end + 4 + length:
            answer, self._buffer = self._buffer, b""
            self._load.answered(self, answer[9:12] == b"200", self._begun)

    def connection_lost(self, error: BaseException | None) -> None:
        """Count a lost connection."""
        del error
        self._load.lost += 1


class Load:
    """Requests at a rate over some connections."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.free: deque[Connection] = deque()
        self.late: deque[tuple[bytes, float]] = deque()
        self.lost = 0
        self.refused = 0
        self.latencies: list[float] = []
        self._left = 0
        self._spec = spec
        body_files = [Path(name).read_bytes() for name in spec["bodies"]]
        self._requests = [
            f"POST {spec['path']} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
            for body in body_files
        ]

    def answered(self, connection: Connection, ok: bool, begun: float) -> None:
        """Record a response, and send the next waiting request."""
        if ok:
            self.latencies.append(time.perf_counter() - begun)
        else:
            self.refused += 1
        self._left -= 1
        if self.late:
            connection.send(*self.late.popleft())
        else:
            self.free.append(connection)

    async def run(self) -> dict[str, Any]:
        """Return the measurements."""
        spec, loop = self._spec, asyncio.get_running_loop()
        for _ in range(spec["connections"]):
            await loop.create_connection(lambda: Connection(self), "127.0.0.1", spec["port"])
        draw = random.Random(spec.get("seed", 0))
        rate, seconds = spec["rate"], spec["seconds"]
        started = time.perf_counter()
        due, sent, most = started, 0, rate * seconds
        while sent < most and not self.lost:
            now = time.perf_counter()
            while due <= now and sent < most:
                request = self._requests[sent % len(self._requests)]
                self._left += 1
                if self.free:
                    self.free.popleft().send(request, due)
                else:
                    self.late.append((request, due))
                sent += 1
                due += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, min(due - now, 0.002)))
        end = time.perf_counter() + 10
        while self._left and not self.lost and time.perf_counter() < end:
            await asyncio.sleep(0.005)
        took = time.perf_counter() - started
        found = sorted(self.latencies)
        at = {name: found[min(int(len(found) * part), len(found) - 1)] if found else None for name, part in
              (("p50_ms", 0.5), ("p99_ms", 0.99), ("p999_ms", 0.999))}  # fmt: skip
        return {
            "rate": rate,
            "throughput": len(found) / took,
            "answered": len(found),
            **{name: None if value is None else round(1e3 * value, 3) for name, value in at.items()},
            "refused": self.refused,
            "unanswered": self._left,
            "lost": self.lost,
        }


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    print(json.dumps(asyncio.run(Load(json.loads(Path(sys.argv[1]).read_text())).run())))
