"""Starts the Python processes of tests as forks of a process that has imported torch: see ``forkserver.py``.

Inside ``forked_children()``, ``persia.launch.process.Process`` starts forks. With the fixture ``forks``, everything
that uses ``subprocess`` starts forks. Other programs start as usual, and so do Python processes whose environment
differs in variables that are read before a script runs. ``PERSIA_TEST_FORK=0`` disables forks.
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
from forkwork import Work, python_command, read_at_start, receive, send, spares_of, streams, tied_command, with_popen

from persia.launch import process

WANTED = os.environ.get("PERSIA_TEST_FORK", "") != "0"
"""Whether processes are forked at all."""
PADDING_BYTES = 100_000
_ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The server's environment, without later changes of tests, so that most of their processes can be forks."""


class Forked:
    """A child of the fork server, with the part of the Popen interface that ``Process`` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: BinaryIO | None = None
        self.code: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended the process; None while it runs."""
        return self.code

    def wait(self) -> int:
        """Wait for the end of the process, and return the exit code or minus the signal."""
        self.ended.wait()
        assert self.code is not None
        return self.code

    def end(self, code: int) -> None:
        """Record how the process ended."""
        self.code = code
        self.ended.set()


class ForkServer:
    """The process that forks. The kernel kills it and all its children when this process ends."""

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

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended. Its forks have ended with it."""
        with self._lock:
            return self._gone

    def can(self, env: dict[str, str]) -> bool:
        """Whether a process with this environment can be a fork."""
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
        """End the server and all its forks."""
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
            child.end(-signal.SIGKILL)  # the kernel kills the fork together with its parent

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
    """Return the fork server of this process. Start the server at the first call."""
    global _server
    if _server is None or _server.has_ended:
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


def _popen(words: Sequence[str], **options: Any) -> Any:
    argv = tied_command(words)
    if not WANTED or argv is None or not (server := fork_server()).can(options["env"]):
        return subprocess.Popen(words, **options)
    fds, opened, output = streams(options["stdin"], options["stdout"], options["stderr"])
    try:
        child = server.start(argv, options["env"], str(options["cwd"] or Path.cwd()), fds, spares=spares_of(argv))
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


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen``, whose Python processes are forks. A fork always leads a session."""

    _fork: Forked | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        """Start the process. The arguments are those of the method of ``subprocess.Popen``."""
        pass_fds, cwd, env, _, _, shell, *pipes = rest[:12]
        env = dict(os.environ if env is None else env)
        listed = isinstance(args, list | tuple) and not (shell or executable or preexec_fn or pass_fds)
        argv = python_command([os.fspath(word) for word in args], env) if listed and WANTED else None
        if argv is None or not (server := fork_server()).can(env):
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        given = (pipes[0], pipes[3], pipes[5])
        fds = [number if fd == -1 else fd for number, fd in enumerate(given)]
        try:
            self._fork = server.start(argv, env, str(cwd or Path.cwd()), fds, spares=spares_of(argv))
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = self._fork.pid
        self._child_created = True

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self._fork is None:
            return super()._internal_poll(*args, **options)  # type: ignore[misc, no-any-return]
        self.returncode = self._fork.code
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._fork is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if not self._fork.ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.returncode = self._fork.wait()
        return self.returncode


class Commands:
    """A folder for ``PATH``, whose ``python``, ``persia`` and ``persia-launcher`` run as forks in shell scripts.

    Args:
        folder: The folder for the commands and their socket.
    """

    def __init__(self, folder: Path) -> None:
        address = str(folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen()
        here, installed = str(Path(__file__).parent), Path(sys.executable).parent
        for name in ("python", "persia", "persia-launcher"):
            command = [] if name == "python" else [str(installed / name)]
            (folder / name).write_text(
                f"#!{sys.executable} -IS\nimport sys\nsys.path.append({here!r})\n"
                f"from forkclient import main\nmain({address!r}, {command!r})\n"
            )
            (folder / name).chmod(0o755)
        self._running: list[Forked] = []
        threading.Thread(target=self._accept, name="commands", daemon=True).start()

    def close(self) -> None:
        """Stop accepting commands, and kill the running ones."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for fork in [*self._running]:
            _kill(fork)
            fork.wait()

    def _accept(self) -> None:
        while True:
            try:
                control, _ = self._listener.accept()
            except OSError:  # the socket is closed
                return
            threading.Thread(target=self._run, args=(control,), name="command", daemon=True).start()

    def _run(self, control: socket.socket) -> None:
        """Run one command. The client gets the process id (0: it must run the command itself) and the exit code."""
        with control, contextlib.suppress(OSError):
            work = receive(control)
            if work is None:
                return
            words = [sys.executable, *work.argv]
            try:
                server = fork_server()
                argv = python_command(words, work.env) if server.can(work.env) else None
                if argv is None:
                    control.send(b"0")
                    return
                fork = server.start(argv, work.env, work.cwd, work.fds, spares=spares_of(argv))
            finally:
                for fd in work.fds:
                    os.close(fd)
            self._running.append(fork)
            threading.Thread(target=_kill_with, args=(control, fork), name="client", daemon=True).start()
            control.send(str(fork.pid).encode())
            code = fork.wait()
            self._running.remove(fork)
            control.send(str(code).encode())
            control.shutdown(socket.SHUT_RDWR)


def _kill_with(control: socket.socket, fork: Forked) -> None:
    """Kill a fork when its client ends."""
    with contextlib.suppress(OSError):
        control.recv(1)
    _kill(fork)


def _kill(fork: Forked) -> None:
    if fork.code is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork.pid, signal.SIGKILL)
