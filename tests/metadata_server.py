"""The metadata service of a cloud instance, whose responses a test sets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/latest/meta-data/spot/instance-action"


class Metadata:
    """The responses of the service, and the requests so far.

    Attributes:
        status: The status of the next responses.
        body: The text of the next responses.
        bodies: The texts of successive responses, which replace ``body``.
        token: The token that requests need; None means no token.
        asked: The requests so far: method, path, headers in lower case.
    """

    def __init__(self) -> None:
        self.status, self.body = 404, ""
        self.bodies: Iterator[str] | None = None
        self.token: str | None = None
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.url = ""

    def announce(self, seconds: float = 120.0) -> datetime:
        """Announce that the instance ends after a number of seconds, and return the announced time."""
        ends = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        self.status, self.body = 200, f'{{"action": "terminate", "time": "{ends:%Y-%m-%dT%H:%M:%SZ}"}}'
        return ends


@contextmanager
def metadata() -> Iterator[Metadata]:
    """Serve at ``.url`` inside the block."""
    found = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._note("GET")
            allowed = found.token in (None, self.headers.get("X-aws-ec2-metadata-token"))
            body = found.body if found.bodies is None else next(found.bodies)
            self._answer(found.status if allowed else 401, body)

        def do_PUT(self) -> None:
            self._note("PUT")
            self._answer(200, found.token or "")

        def _note(self, method: str) -> None:
            found.asked.append((method, self.path, {name.lower(): value for name, value in self.headers.items()}))

        def _answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}{PATH}"
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
