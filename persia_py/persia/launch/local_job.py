"""NATS, servers and middlewares of a job on this host: their commands, environments, ports and private folder."""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from persia.launch.binaries import MIDDLEWARE, SERVER, resolve_binary_execute_path
from persia.launch.process import Process
from persia.runtime import tokens
from persia.runtime.config_files import CONFIG, CONFIG_FOLDER, EMBEDDING_CONFIG, GLOBAL_CONFIG
from persia.runtime.errors import UnreachableError, UsageError

LOOPBACK = "127.0.0.1"
_NATS_START = 10.0
"""Seconds within which NATS must listen."""
_STOP_GRACE = "10"
"""Seconds that a server waits for its connections to close. The time is short because the trainers end first."""
_MAX_PAYLOAD = 65536
_MAX_CONNECTIONS = 256
_FOLDER_PREFIX = "persia-up-"
_LOCK_TIME = 60.0
"""Seconds within which the process that made a new private folder locks it."""

Kind = Literal["server", "middleware"]
BINARIES: dict[Kind, str] = {"server": SERVER, "middleware": MIDDLEWARE}


@dataclass(frozen=True)
class Command:
    """A program with its arguments and its complete environment."""

    name: str
    words: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class LocalJob:
    """A job whose processes all run on this host.

    Attributes:
        name: The name of the job.
        servers: The number of servers.
        middlewares: The number of middlewares.
        embedding_config: The file with the slots; None if ``config`` has them.
        global_config: The file with capacity and other limits; None means the defaults.
        private_dir: A folder that only its owner can read: sockets, the token, NATS's configuration. Its path is short,
            because the path of a socket has at most 107 bytes.
        state_dir: The folder for the data of the servers and the checkpoints.
        env: The variables that are added to the environment of every process.
        ports: The loopback ports of the first server and the first middleware; None means Unix sockets.
        metrics: The address at which every process serves its metrics.
        config: ``persia.yml``, whose features define the slots, instead of ``embedding_config``.
    """

    name: str
    servers: int
    middlewares: int
    embedding_config: Path | None
    global_config: Path | None
    private_dir: Path
    state_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, int] | None = None
    metrics: str = f"{LOOPBACK}:0"
    config: Path | None = None

    @property
    def token_file(self) -> Path:
        """The file with the job's secret: ``PERSIA_TOKEN_FILE`` in :attr:`env`, or a file in the private folder."""
        given = self.env.get("PERSIA_TOKEN_FILE", "")
        return Path(given) if given else self.private_dir / "token"

    def make_token(self) -> None:
        """Write a new secret, unless the file exists or ``PERSIA_TOKEN_FILE`` is set."""
        if not self.env.get("PERSIA_TOKEN_FILE") and not self.token_file.exists():
            _write_private(self.token_file, secrets.token_hex(32))

    def nats(self, port: int | None = None) -> Command:
        """Return the command of a NATS server on loopback that requires the job's password.

        Args:
            port: The port; None lets NATS choose a free one, which :meth:`nats_url` reads.

        Raises:
            UsageError: nats-server was not found.
        """
        program = _nats_server()
        if program is None:
            raise UsageError(
                "nats-server is not on PATH", hint="install it, on Debian and Ubuntu: apt install nats-server"
            )
        for stale in self.private_dir.glob("nats-server_*.ports"):
            stale.unlink()
        path = self.private_dir / "nats.conf"
        password = tokens.role_token(tokens.secret(self.token_file), "nats")
        _write_private(
            path,
            f'listen: "{LOOPBACK}:{-1 if port is None else port}"\n'
            f"ports_file_dir: {json.dumps(str(self.private_dir))}\n"
            f'authorization {{ user: persia, password: "{password}" }}\n'
            f"max_payload: {_MAX_PAYLOAD}\nmax_connections: {_MAX_CONNECTIONS}\n",
        )
        return Command("nats", [program, "--config", str(path)], dict(os.environ))

    def nats_url(self, process: Process) -> str:
        """Wait until the NATS server of this process listens, and return its URL.

        Raises:
            UnreachableError: The server ended, or did not listen in time.
        """
        deadline = time.monotonic() + _NATS_START
        while time.monotonic() < deadline:
            for path in self.private_dir.glob("nats-server_*.ports"):
                if text := path.read_text():
                    port = urlsplit(json.loads(text)["nats"][0]).port
                    return f"nats://{LOOPBACK}:{port}"
            if not process.running:
                raise _no_nats(process, f"{process.outcome()} before it listened")
            time.sleep(0.01)
        raise _no_nats(process, f"did not listen within {_NATS_START:.0f} s")

    def address(self, kind: Kind, index: int) -> str:
        """Return the address at which a server or a middleware listens."""
        if self.ports is None:
            return f"unix:{self.private_dir / f'{kind}-{index}.sock'}"
        return f"{LOOPBACK}:{self.ports[kind == 'middleware'] + index}"

    def part(self, kind: Kind, index: int, nats_url: str) -> Command:
        """Return the command of one server or middleware.

        Raises:
            UsageError: The binary was not found.
        """
        env = self.client_env(nats_url)
        if kind == "server":
            data = self.state_dir / "servers" / str(index)
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
        checkpoints = self.state_dir / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        variables = {
            "PERSIA_NATS_URL": nats_url,
            "PERSIA_JOB": self.name,
            "PERSIA_TOKEN_FILE": str(self.token_file),
            "PERSIA_CKPT_DIR": str(checkpoints),
            "PERSIA_ADVERTISE": LOOPBACK,
            "PERSIA_METRICS_LISTEN": self.metrics,
        }
        files = {CONFIG: self.config, EMBEDDING_CONFIG: self.embedding_config, GLOBAL_CONFIG: self.global_config}
        variables |= {name: str(path) for name, path in files.items() if path is not None}
        return variables | dict(self.env)

    def client_env(self, nats_url: str) -> dict[str, str]:
        """Return the complete environment of a process of this job."""
        local = {"GLOO_SOCKET_IFNAME": "lo", "LOG_FORMAT": "text", "PERSIA_STOP_GRACE": _STOP_GRACE}
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        return local | inherited | self.settings(nats_url)


_NOT_INHERITED = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "REPLICA_INDEX", "REPLICA_SIZE"),
    *("PERSIA_LISTEN", "PERSIA_METRICS_LISTEN", "PERSIA_DATA_DIR", "GPU_NUM"),
    *(CONFIG, CONFIG_FOLDER, EMBEDDING_CONFIG, "PERSIA_NN_WORKER_ENTRY", "PERSIA_DATALOADER_ENTRY"),
}
"""Variables of a single process, or of another job, which the processes of this job must not inherit from the
launcher."""


def _no_nats(process: Process, what: str) -> UnreachableError:
    """Return an error with the output of the server, because its log may be in a folder that is removed."""
    lines = list(process.last_lines)
    if lines:
        said, hint = "\n  ".join(["; its last output:", *lines]), "correct the cause, then start again"
    else:
        said, hint = "; it wrote no output", f"check that the program runs: {_nats_server()} --version"
    return UnreachableError(f"nats-server {what}{said}", hint=hint)


def _nats_server() -> str | None:
    return shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create the private folder of a job for the duration of the block.

    Folders of this user that killed processes have left are removed first.
    """
    for found in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        # OSError means that the folder belongs to another user, is in use, or was removed.
        with contextlib.suppress(OSError), _locked(found) as status:
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _LOCK_TIME:
                shutil.rmtree(found)
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as name, _locked(Path(name)):
        yield Path(name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[os.stat_result]:
    """Lock the folder. The kernel releases the lock when this process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def find_free_port(port: int | None = None, interval: int = 1) -> int:
    """Return ``port`` if it can be bound on loopback, or else a free port; ``interval`` is a parameter of PersiaML."""
    del interval
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((LOOPBACK, port or 0))
        except OSError:
            probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def free_ports(preferred: int | None, count: int) -> int:
    """Return the first of ``count`` consecutive free ports; ``preferred`` if that is possible."""
    first = find_free_port(preferred)
    while any(find_free_port(first + offset) != first + offset for offset in range(1, count)):
        first = find_free_port()
    return first


def _write_private(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
