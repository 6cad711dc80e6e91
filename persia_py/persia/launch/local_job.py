"""The fixed parts of a job on this host: NATS, servers and middlewares, as commands and environments."""

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from persia.launch.binaries import MIDDLEWARE, SERVER
from persia.launch.host import find_free_port, resolve_binary_execute_path
from persia.launch.process import Process
from persia.runtime import tokens
from persia.runtime.errors import UnreachableError, UsageError

LOOPBACK = "127.0.0.1"
_NATS_START = 10.0
"""Seconds NATS has to listen."""
_STOP_GRACE = "10"
"""Seconds a server waits for its connections to close; there is one host, and the trainers end first."""
_MAX_PAYLOAD = 65536
_MAX_CONNECTIONS = 256


Kind = Literal["server", "middleware"]
BINARIES: dict[Kind, str] = {"server": SERVER, "middleware": MIDDLEWARE}


@dataclass(frozen=True)
class Command:
    """A program with its arguments and its whole environment."""

    name: str
    words: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class LocalJob:
    """A job whose parts all run on this host.

    Attributes:
        name: The job's name.
        servers: How many servers hold its rows.
        middlewares: How many middlewares stand in front of them.
        embedding_config: The slots.
        global_config: Capacity and more; None for the defaults.
        private: A folder only its owner can read, with a short path: sockets, the token, NATS's configuration.
        state: Where servers keep their generations, and checkpoints go.
        env: More for the environment of every part.
        ports: The first server's and the first middleware's port on loopback; None means Unix sockets.
        metrics: Where each of them serves its metrics.
    """

    name: str
    servers: int
    middlewares: int
    embedding_config: Path
    global_config: Path | None
    private: Path
    state: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, int] | None = None
    metrics: str = f"{LOOPBACK}:0"

    @property
    def token_file(self) -> Path:
        """The file with the job's secret: the environment's, else one of its own."""
        given = self.env.get("PERSIA_TOKEN_FILE", "")
        return Path(given) if given else self.private / "token"

    def make_token(self) -> None:
        """Write a new secret, if the token file is the job's own and not there yet."""
        if not self.env.get("PERSIA_TOKEN_FILE") and not self.token_file.exists():
            _write_private(self.token_file, secrets.token_hex(32))

    def nats(self, port: int | None = None) -> Command:
        """Return the command of a NATS server on loopback that asks for the job's password.

        Args:
            port: None takes one that is free; :meth:`nats_url` finds it.

        Raises:
            UsageError: There is no nats-server.
        """
        program = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
        if program is None:
            raise UsageError("nats-server is not on PATH; install it, on Debian and Ubuntu: apt install nats-server")
        for stale in self.private.glob("nats-server_*.ports"):
            stale.unlink()
        path = self.private / "nats.conf"
        password = tokens.role_token(tokens.secret(self.token_file), "nats")
        _write_private(
            path,
            f'listen: "{LOOPBACK}:{-1 if port is None else port}"\n'
            f"ports_file_dir: {json.dumps(str(self.private))}\n"
            f'authorization {{ user: persia, password: "{password}" }}\n'
            f"max_payload: {_MAX_PAYLOAD}\nmax_connections: {_MAX_CONNECTIONS}\n",
        )
        return Command("nats", [program, "--config", str(path)], dict(os.environ))

    def nats_url(self, process: Process) -> str:
        """Wait until the NATS server of this process listens, and return its URL.

        Raises:
            UnreachableError: It ended, or does not listen in time.
        """
        deadline = time.monotonic() + _NATS_START
        while time.monotonic() < deadline:
            for path in self.private.glob("nats-server_*.ports"):
                if text := path.read_text():
                    port = urlsplit(json.loads(text)["nats"][0]).port
                    return f"nats://{LOOPBACK}:{port}"
            if not process.running:
                raise UnreachableError(f"nats-server {process.how()} before it listened")
            time.sleep(0.01)
        raise UnreachableError(f"nats-server did not listen within {_NATS_START:.0f} s")

    def address(self, kind: Kind, index: int) -> str:
        """Return where a server or a middleware listens."""
        if self.ports is None:
            return f"unix:{self.private / f'{kind}-{index}.sock'}"
        return f"{LOOPBACK}:{self.ports[kind == 'middleware'] + index}"

    def part(self, kind: Kind, index: int, nats_url: str) -> Command:
        """Return the command of one server or middleware.

        Raises:
            UsageError: Its binary is not there.
        """
        env = self.client_env(nats_url)
        if kind == "server":
            data = self.state / "servers" / str(index)
            data.mkdir(parents=True, exist_ok=True)
            env["PERSIA_DATA_DIR"] = str(data)
        size = self.servers if kind == "server" else self.middlewares
        words = [
            *(resolve_binary_execute_path(BINARIES[kind]), "--replica-index", str(index), "--replica-size", str(size)),
            *("--listen", self.address(kind, index), "--metrics-listen", self.metrics),
        ]
        return Command(f"{kind}-{index}", words, env)

    def settings(self, nats_url: str) -> dict[str, str]:
        """Return the variables that make a process part of this job."""
        checkpoints = self.state / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        variables = {
            "PERSIA_NATS_URL": nats_url,
            "PERSIA_JOB": self.name,
            "PERSIA_TOKEN_FILE": str(self.token_file),
            "PERSIA_EMBEDDING_CONFIG": str(self.embedding_config),
            "PERSIA_CKPT_DIR": str(checkpoints),
            "PERSIA_ADVERTISE": LOOPBACK,
        }
        if self.global_config is not None:
            variables["PERSIA_GLOBAL_CONFIG"] = str(self.global_config)
        return variables | dict(self.env)

    def client_env(self, nats_url: str) -> dict[str, str]:
        """Return the whole environment of a process of this job."""
        local = {"GLOO_SOCKET_IFNAME": "lo", "LOG_FORMAT": "text", "PERSIA_STOP_GRACE": _STOP_GRACE}
        inherited = {name: value for name, value in os.environ.items() if name not in _PLACES}
        return local | inherited | self.settings(nats_url)


_PLACES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "REPLICA_INDEX", "REPLICA_SIZE"),
    *("PERSIA_LISTEN", "PERSIA_METRICS_LISTEN", "PERSIA_DATA_DIR", "GPU_NUM"),
}
"""Variables of another process's place, which no part of this job inherits."""


def free_ports(preferred: int | None, count: int) -> int:
    """Return the first of ``count`` neighbouring ports that are free now, ``preferred`` if it can be."""
    first = find_free_port(preferred)
    while any(find_free_port(first + offset) != first + offset for offset in range(1, count)):
        first = find_free_port()
    return first


def _write_private(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
