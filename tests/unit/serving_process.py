"""A serving process over the small model, and clients of it.

The manifest of its bundle is ``{"scale": 2.0, "delay_s": 0}``. As a script: ``serving_process.py PATH [OPTION=VALUE]``.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from serving_model import SmallModel
from waiting import wait_until

from persia.errors import CheckpointError
from persia.serving.limits import Limits
from persia.serving.server import Options, serve

TESTS = Path(__file__).parents[1]
START_S = 60.0


def write_bundle(folder: Path, scale: float, **keys: Any) -> Path:
    """Write a bundle of the small model atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "part"
    part.write_text(json.dumps({"scale": scale, **keys}))
    part.replace(folder / "manifest.json")
    return folder


def load(path: Path) -> SmallModel:
    """Load a bundle of the small model.

    A bundle with the key ``damaged`` cannot be loaded. A bundle with ``broken`` ends the thread that scores. A bundle
    with ``slow`` reports that it is loading, and loads for minutes in native code. A bundle with ``die`` kills the
    process.
    """
    content = json.loads((path / "manifest.json").read_text())
    if content.pop("damaged", None):
        raise CheckpointError(f"{path}: damaged")
    if content.pop("slow", None):
        sys.stdout.write("loading\n")
        sys.stdout.flush()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
    if content.pop("die", None):
        os.kill(os.getpid(), signal.SIGKILL)
    if content.pop("broken", None):
        return _Broken(**content)
    return SmallModel(**content)


class _Broken(SmallModel):
    """A model whose rows end the thread that scores, because the number of rows can be read only once."""

    def transform(self, data: Any) -> Any:
        class Rows:
            left = 1

            def __len__(self) -> int:
                self.left -= 1
                if self.left < 0:
                    raise SystemError("broken")
                return 1

        return Rows()


class Client:
    """An HTTP client with one connection."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self.connection = HTTPConnection("127.0.0.1", port, timeout=30)
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def ask(
        self, method: str, path: str, body: bytes | str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Return the status, the headers in lower case, and the body: parsed JSON, or bytes of another type."""
        self.connection.request(method, path, body, {**self.headers, **(headers or {})})
        answer = self.connection.getresponse()
        content, found = answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        is_json = found.get("content-type") == "application/json"
        return answer.status, found, json.loads(content) if is_json and content else content

    def score(self, content: Any) -> tuple[int, dict[str, str], Any]:
        """Ask for scores."""
        return self.ask("POST", "/score", content if isinstance(content, bytes | str) else json.dumps(content))


class Serving:
    """A serving process."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self.log = log
        self.port, self.grpc_port = 0, 0
        self.sockets: list[Any] = []

    @property
    def output(self) -> str:
        """The log of the process."""
        return self.log.read_text()

    def says(self, text: str, timeout: float = 30.0) -> str:
        """Wait until the process has logged a text, and return the line."""

        def found() -> str | None:
            line = next((line for line in self.output.splitlines() if text in line), None)
            assert line or self.process.poll() is None, f"ended without saying {text!r}\n{self.output}"
            return line

        return wait_until(f"{text!r}", found, timeout, evidence=lambda: self.output)

    def client(self, token: str | None = None) -> Client:
        """Return a client, which is closed with the process."""
        client = Client(self.port, token)
        self.sockets.append(client.connection)
        return client

    def connect(self) -> socket.socket:
        """Return a connection, which is closed with the process."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self.sockets.append(connection)
        return connection

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the process by a signal, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)

    def metric(self, line: str) -> float:
        """Return the value of the first metric whose line begins with this text; 0 if there is none."""
        _, _, text = self.client().ask("GET", "/metrics")
        return next((float(each.split()[-1]) for each in text.decode().splitlines() if each.startswith(line)), 0.0)


@contextmanager
def started(path: Path, log: Path, environment: dict[str, str] | None = None, **limits: Any) -> Iterator[Serving]:
    """Start a process that serves a bundle of the small model. It ends with the block."""
    from forking import Popen  # imported here, because the serving process does not need it

    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, __file__, str(path), *(f"{name}={value}" for name, value in limits.items())]
    with log.open("w") as file:
        process = Popen(
            words, env={**settings, **(environment or {})}, stdout=file, stderr=subprocess.STDOUT, text=True
        )
    found = Serving(process, log)
    try:
        yield found
    finally:
        for each in found.sockets:
            each.close()
        if process.poll() is None:
            process.kill()
        process.wait()


@contextmanager
def serving(path: Path, log: Path, environment: dict[str, str] | None = None, **limits: Any) -> Iterator[Serving]:
    """Serve a bundle of the small model in a process until the end of the block."""
    with started(path, log, environment, **limits) as found:
        line = found.says(": http", START_S)
        found.port = int(line.split("127.0.0.1:")[1].split(",")[0])
        found.grpc_port = int(line.split("127.0.0.1:")[2])
        yield found


def _main(path: str, *words: str) -> int:
    pairs = [each.partition("=")[::2] for each in words]
    given: dict[str, Any] = {name: float(value) if "." in value else int(value) for name, value in pairs}
    return serve(Path(path), Options("127.0.0.1:0", "127.0.0.1:0", "small", Limits(**given)), load)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
