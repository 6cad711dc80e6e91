"""The fixed parts of a job as real processes on loopback, for the integration tests.

``stack = make_stack(servers=2)`` starts NATS, two servers and a middleware. All processes end with the test.
``stack.settings`` are the variables that make a process part of the job; ``stack.use(monkeypatch)`` sets them here.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forking import forked_children
from waiting import wait_until

from persia.errors import UnreachableError
from persia.launch.local_job import BINARIES, Command, Kind, LocalJob, free_ports
from persia.launch.process import Process
from persia.runtime.tokens import role_token, secret
from persia.utils import find_free_port, resolve_binary_execute_path

START = 60.0
"""Seconds in which a part must be ready."""
END = 30.0
"""Seconds in which a part must end after SIGTERM."""
LIVE_START = 60.0
"""Seconds in which the stack around the tests must be ready; its containers may have just been started."""

TESTS = str(Path(__file__).parent)
SLOTS = "a: {dim: 4}\nb: {dim: 4}"


def missing(*, nats_only: bool = False) -> str | None:
    """Return the reason why no stack can run here, or None."""
    if shutil.which("nats-server") is None and not Path("/usr/sbin/nats-server").exists():
        return "no nats-server here"
    for binary in () if nats_only else BINARIES.values():
        try:
            resolve_binary_execute_path(binary)
        except RuntimeError:
            return f"no {binary} here (make setup builds it)"
    return None


@dataclass
class Part:
    """A process of the stack, and its output."""

    process: Process
    lines: list[str] = field(default_factory=list)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait(self, timeout: float = 120.0) -> int:
        """Return the exit code of the process, or minus the signal that ended it."""
        wait_until(
            f"{self.process.name} to end", lambda: not self.process.running, timeout, evidence=lambda: self.output
        )
        return self.process.code

    def says(self, text: str, timeout: float = 90.0) -> str:
        """Wait until the process has written a line with ``text``, and return the line."""

        def said() -> str | None:
            ended = not self.process.running
            line = next((line for line in list(self.lines) if text in line), None)
            assert line or not ended, (
                f"{self.process.name} {self.process.outcome()} without saying {text!r}\n{self.output}"
            )
            return line

        return wait_until(f"{self.process.name} to say {text!r}", said, timeout, evidence=lambda: self.output)


def start(command: Command, cwd: Path | None = None) -> Part:
    """Start a process. A Python process is forked from a process that has imported torch."""
    part: list[Part] = []
    ready = threading.Event()

    def line(text: str) -> None:
        ready.wait()
        part[0].lines.append(text)

    with forked_children():
        process = Process(command.name, command.words, env=command.env, line=line, ended=lambda _: None, cwd=cwd)
    part.append(Part(process))
    ready.set()
    return part[0]


class Stack:
    """NATS, servers and middlewares of one job, which can be started, stopped and killed separately or together."""

    def __init__(
        self,
        folder: Path,
        *,
        servers: int = 1,
        middlewares: int = 1,
        slots: str = SLOTS,
        groups: str = "",
        capacity: int = 100_000,
        log: str | None = None,
        job: str = "test",
        tcp: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.private = Path(tempfile.mkdtemp(prefix="persia-"))
        folder.mkdir(parents=True, exist_ok=True)
        embedding, general = folder / "embedding_config.yml", folder / "global_config.yml"
        text = f"slots_config:\n{textwrap.indent(textwrap.dedent(slots).strip(), '  ')}\n"
        if groups:
            text += f"feature_groups:\n{textwrap.indent(textwrap.dedent(groups).strip(), '  ')}\n"
        embedding.write_text(text)
        server = f"capacity: {capacity}" if log is None else f"capacity: {capacity}, durability: log, log_sync: {log}"
        general.write_text(f"embedding_parameter_server_config: {{{server}}}\n")
        first = free_ports(None, servers + middlewares) if tcp else 0
        self.job = LocalJob(
            name=job,
            servers=servers,
            middlewares=middlewares,
            embedding_config=embedding,
            global_config=general,
            private_dir=self.private,
            state_dir=folder,
            env={"PERSIA_RUN_DIR": str(folder / "run"), **(env or {})},
            ports=(first, first + servers) if tcp else None,
        )
        self.job.make_token()
        self.parts: dict[str, Part] = {}
        self.nats_url = ""

    @property
    def settings(self) -> dict[str, str]:
        """The variables that make a process part of this job."""
        return self.job.settings(self.nats_url)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this process part of the job for the rest of the test."""
        for name, value in {"GLOO_SOCKET_IFNAME": "lo", **self.settings}.items():
            monkeypatch.setenv(name, value)

    def start(self) -> "Stack":
        """Start all parts, and wait until they are ready."""
        self.start_nats()
        for index in range(self.job.servers):
            self.start_part("server", index)
        for index in range(self.job.middlewares):
            self.start_part("middleware", index)
        self.wait_ready()
        return self

    def start_nats(self) -> None:
        """Start NATS. A later start uses the same port as the first one."""
        port = int(self.nats_url.rsplit(":", 1)[1]) if self.nats_url else None
        part = self.run(self.job.nats(port))
        self.nats_url = self.job.nats_url(part.process)

    def choose_nats(self) -> None:
        """Choose the port of NATS without starting it."""
        self.nats_url = f"nats://127.0.0.1:{find_free_port()}"

    def start_part(self, kind: Kind, index: int = 0, *, env: Mapping[str, str] | None = None) -> Part:
        """Start one server or middleware, without waiting."""
        command = self.job.part(kind, index, self.nats_url)
        return self.run(Command(command.name, command.words, {**command.env, **(env or {})}))

    def python(
        self, name: str, *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Part:
        """Start ``python ARGUMENTS`` as part of the job. Scripts can import ``conftest``."""
        words = [sys.executable, *map(str, arguments)]
        return self.run(Command(name, words, {**self.python_env, **(env or {})}), cwd=cwd)

    @property
    def python_env(self) -> dict[str, str]:
        """The whole environment of a Python process of this job, which can import the modules of the tests."""
        env = self.job.client_env(self.nats_url)
        return env | {"PYTHONPATH": os.pathsep.join([TESTS, *filter(None, [env.get("PYTHONPATH")])])}

    def trainer(
        self,
        script: Path,
        *arguments: str,
        ranks: int = 1,
        node: int = 0,
        nodes: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> Part:
        """Start ``persia-launcher nn-worker`` with this many ranks."""
        options = ["--nproc-per-node", str(ranks), "--node-rank", str(node), "--nnodes", str(nodes)]
        words = ["-m", "persia.launch.cli", "nn-worker", *options, str(script), "--", *arguments]
        return self.python(f"trainer-{node}", *words, env=env)

    def data(
        self, script: Path, *arguments: str, index: int = 0, size: int = 1, env: Mapping[str, str] | None = None
    ) -> Part:
        """Start ``persia-launcher data-loader`` as one replica."""
        options = ["--replica-index", str(index), "--replica-size", str(size)]
        words = ["-m", "persia.launch.cli", "data-loader", *options, str(script), "--", *arguments]
        return self.python(f"data-{index}", *words, env=env)

    def run(self, command: Command, cwd: Path | None = None) -> Part:
        """Start a process, which ends with the stack."""
        self.parts[command.name] = start(command, cwd)
        return self.parts[command.name]

    def nats_client(self, timeout: float | None = None) -> Any:
        """Return a client of the stack's NATS, which is not connected yet. ``timeout`` applies to each message."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pynats imports pkg_resources, which is deprecated
            from pynats import NATSClient
        password = role_token(secret(self.job.token_file), "nats")
        url = self.nats_url.replace("nats://", f"nats://persia:{password}@")
        return NATSClient(url, socket_timeout=timeout)

    def healthy(self, kind: Kind, index: int = 0) -> bool:
        """Whether a part reports that it is ready to serve."""
        words = [resolve_binary_execute_path(BINARIES[kind]), "--health", "--listen", self.job.address(kind, index)]
        env = self.job.client_env(self.nats_url) | {"REPLICA_INDEX": str(index), "REPLICA_SIZE": str(index + 1)}
        done = subprocess.run(words, env=env, check=False, capture_output=True, timeout=START)
        return done.returncode == 0

    def wait_ready(self) -> None:
        """Wait until every server and middleware is ready to serve."""
        sizes: dict[Kind, int] = {"server": self.job.servers, "middleware": self.job.middlewares}
        for kind, size in sizes.items():
            for index in range(size):
                self._wait_healthy(kind, index)

    def _wait_healthy(self, kind: Kind, index: int) -> None:
        part = self.parts[f"{kind}-{index}"]

        def healthy() -> bool:
            assert part.process.running, f"{part.process.name} {part.process.outcome()}\n{part.output}"
            return self.healthy(kind, index)

        wait_until(f"{part.process.name} to be ready", healthy, START, evidence=lambda: part.output)

    def kill(self, name: str) -> None:
        """Kill a part with SIGKILL, and wait until it has ended."""
        self.parts[name].process.signal(signal.SIGKILL)
        self.parts[name].wait()

    def stop(self, name: str) -> int:
        """End a part by SIGTERM and return its exit code."""
        self.parts[name].process.signal(signal.SIGTERM)
        return self.parts[name].wait(END)

    def close(self) -> None:
        """End all running processes, in the reverse order of their start."""
        for part in reversed(self.parts.values()):
            if part.process.running:
                part.process.signal(signal.SIGKILL)
                part.wait()
        shutil.rmtree(self.private, ignore_errors=True)

    def logs(self) -> str:
        """Return the output of every part, for the report of a failed test."""
        return "\n".join(f"--- {name}\n{part.output}" for name, part in self.parts.items())


class LiveStack:
    """The stack in which this process was started, as described by the environment."""

    nats_url = os.environ.get("PERSIA_NATS_URL", "")
    settings: Mapping[str, str] = {name: value for name, value in os.environ.items() if name.startswith("PERSIA_")}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this process part of the job for the rest of the test."""
        for name, value in self.settings.items():
            monkeypatch.setenv(name, value)

    def wait_ready(self) -> None:
        """Wait until every server and middleware is ready to serve."""
        from persia.doctor import job_status
        from persia.runtime import job

        problems: list[str] = []

        def ready() -> bool:
            try:
                found = job_status.status(self.nats_url, job.job_name())
                problems[:] = [one.text for one in found.problems]
            except UnreachableError as error:
                problems[:] = [str(error)]
            return not problems

        with pytest.MonkeyPatch.context() as monkeypatch:
            self.use(monkeypatch)
            wait_until("the stack around the tests", ready, LIVE_START, evidence=lambda: "\n".join(problems))

    def busy(self) -> str | None:
        """Return the reason why a test may not use the stack now, or None."""
        from persia.discovery import nats

        with pytest.MonkeyPatch.context() as monkeypatch:
            self.use(monkeypatch)
            trainers = nats.services(self.nats_url, "persia-trainer", job=self.settings.get("PERSIA_JOB"))
        return f"{len(trainers)} trainer rank(s) of this job are running" if trainers else None


MakeStack = Callable[..., Stack]


LIVE = os.environ.get("PERSIA_TEST_LIVE", "") == "1"
"""Whether tests marked ``live`` are to use the stack that runs around them."""
