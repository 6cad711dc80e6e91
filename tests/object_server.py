"""An S3 server as a real program, and a proxy in front of it that fails requests on demand."""

import contextlib
import http.client
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from typing_extensions import Self
from waiting import wait_until

BUCKET = "bucket"
SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class Server:
    """An S3 server with its objects in memory."""

    def __init__(self, log: Path, host: str = "127.0.0.1") -> None:
        self.log = log
        command = [sys.executable, "-m", "moto.server", "--host", host, "--port", "0"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.address = wait_until("moto to listen", self._says_where, 120, evidence=log.read_text)

    def _says_where(self) -> str | None:
        found = re.search(r"Running on (http://127.0.0.1:\d+)", self.log.read_text())
        assert self.process.poll() is None, self.log.read_text()
        return found[1] if found else None

    def empty(self) -> None:
        """Start again with one empty bucket."""
        self.request("POST", "/moto-api/reset")
        self.request("PUT", f"/{BUCKET}")

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the response to a request, which must succeed."""
        status, content = send(self.address, method, path, body)
        assert status in (200, 204), f"{method} {path}: {status} {content!r}"
        return content

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects below ``prefix``, without the prefix."""
        found, token = list[str](), ""
        while True:
            path = f"/{BUCKET}?list-type=2&prefix={prefix}" + (f"&continuation-token={quote(token)}" if token else "")
            page = self.request("GET", path).decode()
            found += re.findall(r"<Key>([^<]*)</Key>", page)
            more = re.search(r"<NextContinuationToken>([^<]*)</NextContinuationToken>", page)
            if more is None:
                return sorted(unquote(key).removeprefix(prefix) for key in found)
            token = more[1]

    def close(self) -> None:
        """End the program."""
        self.process.terminate()
        self.process.wait()


def send(address: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request, and return the status and the content of its response."""
    with contextlib.closing(http.client.HTTPConnection(address.removeprefix("http://"))) as connection:
        connection.request(method, path, body, {"Authorization": SIGNED})  # anonymous requests are refused
        answer = connection.getresponse()
        return answer.status, answer.read()


def use(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of a store at ``address``."""
    settings = {"ACCESS_KEY_ID": "somebody", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    for name, value in {**settings, "ENDPOINT_URL": address}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@dataclass(frozen=True)
class Request:
    """A request for the store.

    Attributes:
        number: The number of earlier requests since the rule was set.
        method: The method.
        key: The key of the object; empty for a request about the bucket.
        query: The names in the query.
        size: The size of the body in bytes.
        target: The whole path with the query.
    """

    number: int
    method: str
    key: str
    query: tuple[str, ...]
    size: int
    target: str

    @property
    def is_manifest(self) -> bool:
        """Whether the request puts a manifest."""
        return self.method == "PUT" and self.key.endswith("/MANIFEST.json")


@dataclass(frozen=True)
class Answer:
    """A response of the proxy, instead of that of the store."""

    status: int
    code: str

    @property
    def body(self) -> bytes:
        return f"<Error><Code>{self.code}</Code><Message>by the test</Message></Error>".encode()


CUT = "cut"
"""The connection is closed before the store gets the request."""
HALF = "half"
"""The connection is closed in the middle of the request's body."""
LOSE = "lose"
"""The store gets the request, and the connection is closed instead of its response."""
UNCONDITIONAL = "unconditional"
"""The store gets the request without its conditions. A store that ignores conditions does the same."""
PRETEND = "pretend"
"""The response says that the object was put, but the store does not get it."""
Rule = Callable[[Request], "Answer | str | None"]


class Proxy:
    """Forwards requests to a store, unless a rule says otherwise.

    Attributes:
        address: Its URL.
        seen: The requests since the rule was set.
    """

    def __init__(self, target: str) -> None:
        self.target = target.removeprefix("http://")
        self.seen: list[Request] = []
        self._rule: Rule = lambda _: None
        self._lock = threading.Lock()
        self._put: set[str] = set()
        self._hidden: set[str] | None = None
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def set_rule(self, rule: Rule) -> None:
        """Use another rule, and forget the requests so far."""
        with self._lock:
            self._rule, self.seen = rule, []

    def lag(self, on: bool = True) -> None:
        """Freeze or unfreeze listings. A frozen listing shows only objects that were put before."""
        with self._lock:
            self._hidden = set() if on else None

    def decide(self, method: str, path: str, size: int) -> tuple[Request, Answer | str | None]:
        """Record a request, and return the decision of the rule about it."""
        parts = urlsplit(path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        with self._lock:
            request = Request(
                len(self.seen), method, key, tuple(parse_qs(parts.query, keep_blank_values=True)), size, path
            )
            self.seen.append(request)
            rule = self._rule
            if method in ("PUT", "POST") and key and self._hidden is not None and key not in self._put:
                self._hidden.add(key)
            elif method in ("PUT", "POST") and key:
                self._put.add(key)
        return request, rule(request)

    def shown(self, request: Request, content: bytes) -> bytes:
        """Return a listing without the objects that it must not show yet."""
        with self._lock:
            hidden = set(self._hidden or ())
            known = set(self._put) - hidden
        if not hidden or "list-type" not in request.query:
            return content

        def entry(match: re.Match[str]) -> str:
            return "" if unquote(match[1]) in hidden else match[0]

        def prefix(match: re.Match[str]) -> str:
            return match[0] if any(key.startswith(unquote(match[1])) for key in known) else ""

        text = re.sub(r"<Contents>.*?<Key>([^<]*)</Key>.*?</Contents>", entry, content.decode(), flags=re.DOTALL)
        pattern = r"<CommonPrefixes>\s*<Prefix>([^<]*)</Prefix>\s*</CommonPrefixes>"
        return re.sub(pattern, prefix, text, flags=re.DOTALL).encode()


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        request, outcome = self.owner.decide(self.command, self.path, size)
        if outcome in (CUT, HALF):
            if outcome == HALF:
                self.rfile.read(size // 2)
            self._drop()
            return
        body = self.rfile.read(size)
        if isinstance(outcome, Answer):
            self._reply(outcome.status, {"Content-Type": "application/xml"}, outcome.body)
            return
        if outcome == PRETEND:
            self._reply(200, {"ETag": '"pretended"'}, b"")
            return
        conditions = {"if-none-match", "if-match"} if outcome == UNCONDITIONAL else set()
        sent = {name: value for name, value in self.headers.items() if name.lower() not in conditions}
        with contextlib.closing(http.client.HTTPConnection(self.owner.target)) as connection:
            connection.request(self.command, self.path, body, sent)
            answer = connection.getresponse()
            content = answer.read()
        if outcome == LOSE:
            self._drop()
            return
        left_out = {"content-length", "transfer-encoding", "connection", "date", "server"}
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in left_out}
        if self.command == "HEAD":
            self._reply(answer.status, headers, b"", length=answer.getheader("Content-Length") or "0")
        else:
            self._reply(answer.status, headers, self.owner.shown(request, content))

    def _reply(self, status: int, headers: dict[str, str], content: bytes, length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _drop(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815  # the names that http.server calls

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return an S3 server, which ends with the module."""
    pytest.importorskip("moto", reason="moto is not installed here")
    started = Server(tmp_path_factory.mktemp("s3") / "log")
    yield started
    started.close()


@pytest.fixture
def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return the empty server, which is the store of this process and of its child processes."""
    server.empty()
    use(server.address, monkeypatch)
    return server


@pytest.fixture
def proxy(store: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Return a proxy in front of the server, which is the store of this process."""
    with Proxy(store.address) as made:
        use(made.address, monkeypatch)
        yield made
