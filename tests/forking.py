"""Starting the Python processes of tests as forks of a process that has imported torch: see ``forkserver.py``.

``with forked_children():`` lets ``persia.launch.process.Process`` start them so. Other processes start as usual: other
programs, and those whose environment differs in variables that are read before a script runs. ``PERSIA_TEST_FORK=0``
starts all of them in the usual way.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO
from unittest import mock

from forkserver import PADDING
from forkwork import Work, read_at_start, send, streams, tied_command, with_popen

from persia.launch import process

WANTED = os.environ.get("PERSIA_TEST_FORK", "") != "0"
"""Whether processes are forked at all."""
PADDING_BYTES = 100_000
_ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The server's environment, without later changes of tests, so that most of their processes can be forks."""
_DATA_SPARES = 2
"""The number of runs of its script that a data-compose starts from a fork: the first, and one after a restart."""


class Forked:
    """A child of the fork server, with the part of the Popen interface that ``Process`` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: BinaryIO | None = None
        self.code: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal that ended it; None while it runs."""
        return self.code

    def wait(self) -> int:
        """Wait for its end and return the same."""
        self.ended.wait()
        assert self.code is not None
        return self.code

    def end(self, code: int) -> None:
        """Record how it ended."""
        self.code = code
        self.ended.set()


class ForkServer:
    """The process that forks. It and all its children die with this process."""

    def __init__(self) -> None:
        self._read_at_start = read_at_start(_ENVIRON)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        server = str(Path(__file__).with_name("forkserver.py"))
        words = [sys.executable, "-I", "-S", str(process._DIE_WITH_PARENT), str(os.getpid()), sys.executable, server]
        with theirs:
            self._process = subprocess.Popen(
                [*words, str(theirs.fileno()), "-" * PADDING_BYTES],
                env={**_ENVIRON, PADDING: "-" * PADDING_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._numbers = count()
        self._lock = threading.Lock()
        self._starting: dict[int, SimpleQueue[Forked | None]] = {}
        self._running: dict[int, Forked] = {}
        self._gone = False
        threading.Thread(target=self._listen, name="fork server", daemon=True).start()

    def can(self, env: dict[str, str]) -> bool:
        """Whether a process of this environment can be a fork."""
        return read_at_start(env) == self._read_at_start

    def start(self, argv: list[str], env: dict[str, str], cwd: str, fds: Sequence[int], *, spares: int = 0) -> Forked:
        """Fork a process that runs ``python ARGV``."""
        reply: SimpleQueue[Forked | None] = SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._starting[number] = reply
            if self._gone:
                reply.put(None)
            else:
                send(self._control, Work(argv, env, cwd, spares, number, tuple(fds)))
        if (child := reply.get()) is None:
            self._errors.seek(0)
            raise RuntimeError(f"the fork server has ended: {self._errors.read().decode(errors='replace')}")
        return child

    def close(self) -> None:
        """End the server, and everything it forked."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._errors.close()

    def _listen(self) -> None:
        with self._control as control, contextlib.suppress(OSError):
            while message := control.recv(4096):
                self._heard(**json.loads(message))
        with self._lock:
            self._gone = True
            for reply in self._starting.values():
                reply.put(None)
        for child in self._running.values():
            child.end(-signal.SIGKILL)  # by the kernel, with its parent

    def _heard(self, pid: int, number: int | None = None, code: int | None = None) -> None:
        if number is None:
            assert code is not None
            self._running.pop(pid).end(code)
        else:
            child = self._running[pid] = Forked(pid)
            with self._lock:
                self._starting.pop(number).put(child)


_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """Return the fork server of this process, started when it is first needed."""
    global _server
    if _server is None:
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


def _spares(argv: Sequence[str]) -> int:
    """Return how many processes a launcher will start."""
    if list(argv[:2]) != ["-m", "persia.launch.cli"]:
        return 0
    if "data-loader" in argv:
        return _DATA_SPARES
    return int(argv[argv.index("--nproc-per-node") + 1]) if "--nproc-per-node" in argv else 1


def _popen(words: Sequence[str], **options: Any) -> Any:
    argv = tied_command(words)
    if not WANTED or argv is None or not (server := fork_server()).can(options["env"]):
        return subprocess.Popen(words, **options)
    fds, opened, output = streams(options["stdin"], options["stdout"], options["stderr"])
    try:
        child = server.start(argv, options["env"], str(options["cwd"] or Path.cwd()), fds, spares=_spares(argv))
    finally:
        for fd in opened:
            os.close(fd)
    child.stdout = output
    return child


@contextlib.contextmanager
def forked_children() -> Iterator[None]:
    """Let ``Process`` fork Python processes inside the block."""
    with mock.patch.object(process, "subprocess", with_popen(_popen)):
        yield
