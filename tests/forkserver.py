"""A process that has imported torch and forks the Python processes that tests start. ``forking.py`` starts it.

A fork behaves like a process that ``python -m NAME`` or ``python FILE`` started. Its session, death signal,
descriptors, environment, ``sys.path``, standard streams and command line are those of a new process. It runs as
``__main__``, and ends through the interpreter's normal exit. Only the state before the first line of a script differs:
the modules in ``PRELOADED`` are loaded, and all forks of one server share the seed of ``hash()``.

A launcher must start its ranks itself. Before its first line runs, the launcher forks spares, which later become the
ranks. The spares are children of the launcher, but have none of its modules, threads, locks or signal handlers.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from forkwork import Work, become, read_at_start, receive, run, send, spares_of, streams, tied_command, with_popen

PRELOADED = ("numpy", "torch", "torch._dynamo", "pytest", "typer", "psutil", "yaml", "pynats")
"""Modules that most ranks import. Constructing the first optimizer imports ``torch._dynamo``, which takes as long as
torch."""
OURS = {"persia", "persia_core", "conftest", "stack"}
"""Modules that each process has to import itself: they read the environment, set up logging, or start threads."""
PADDING = "PERSIA_TEST_FORK_PADDING"
"""A variable that reserves memory for the command line and environment that ``/proc`` shows of a fork."""
_PR_SET_PDEATHSIG = 1


# --- the server


def fork() -> int:
    """Fork. The child is killed when this thread ends. It leads a session before this function returns in the parent.

    Raises:
        RuntimeError: This process has several threads. The child would hold the locks of other threads forever.
    """
    if len(tasks := os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        raise RuntimeError(f"{len(tasks)} threads before a fork: one of {', '.join(PRELOADED)} has started some")
    parent = os.getpid()
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        os.read(read, 1)
        os.close(read)
        return pid
    os.close(read)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os._exit(1)
    os.setsid()
    os.close(write)
    return 0


class Server:
    """Forks the requested processes, and reports how each ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        # Without a handler, the signal would not write its byte into the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> Work:
        """Return the request in each child. The server itself ends in this function when its client ends."""
        while True:
            sources: list[Any] = [self._control, self._woken]
            ready, _, _ = select.select(sources, [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._control not in ready:
                continue
            if (work := receive(self._control)) is None:
                os._exit(0)  # the kernel kills its children
            if (pid := fork()) == 0:
                self._leave()
                return work
            for fd in work.fds:
                os.close(fd)
            self._tell({"number": work.number, "pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, reply: dict[str, int]) -> None:
        try:
            self._control.send(json.dumps(reply).encode())
        except OSError:  # the client is ending too
            os._exit(0)

    def _leave(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._woken)
        os.close(self._wake)
        self._control.close()


# --- a launcher and its ranks


class Spare:
    """A child that waits to become a process of its parent, with the interface that ``persia.launch`` needs."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self.stdout: BinaryIO | None = None
        self._code: int | None = None
        self._reaping = threading.Lock()

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code or minus the signal that ended it."""
        with self._reaping:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._code

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if not self._reaping.acquire(blocking=False):  # another thread is waiting for the process
            return self._code
        try:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code
        finally:
            self._reaping.release()


def fork_spares(work: Work) -> tuple[Work, list[Spare]]:
    """Fork spares, and return the work and the spares. In a spare, wait for work, and return it with its own spares."""
    spares: list[Spare] = []
    for _ in range(work.spares):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if pid := fork():
            theirs.close()
            spares.append(Spare(pid, ours))
            continue
        for control in (ours, *(spare.control for spare in spares)):
            control.close()
        for fd in work.fds:
            os.close(fd)
        own = receive(theirs)
        if own is None:
            os._exit(0)
        theirs.close()
        return fork_spares(own)
    return work, spares


def use_spares(spares: list[Spare]) -> None:
    """Let ``persia.launch`` start Python processes from spares, as long as there are any."""
    process = importlib.import_module("persia.launch.process")
    spares = spares[::-1]

    def popen(words: Sequence[str], **options: Any) -> Any:
        argv = tied_command(words)
        if argv is None or not spares or read_at_start(options["env"]) != read_at_start(os.environ):
            return subprocess.Popen(words, **options)
        fds, opened, output = streams(options["stdin"], options["stdout"], options["stderr"])
        spare = spares.pop()
        with spare.control as control:
            cwd = str(options["cwd"] or Path.cwd())
            send(control, Work(argv, options["env"], cwd, spares_of(argv), fds=tuple(fds)))
        for fd in opened:
            os.close(fd)
        spare.stdout = output
        return spare

    process.subprocess = with_popen(popen)  # type: ignore[attr-defined]


def preload() -> None:
    """Import the modules that forks share, and leave one thread.

    The objects of these modules are frozen: garbage collection of them would copy most of the memory into each fork.
    Objects that a fork creates are collected. Triton would report its frozen objects as a leak, so it is disabled.
    Torch works without Triton.
    """
    sys.modules["triton"] = None  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pynats imports pkg_resources, which is deprecated
        for name in PRELOADED:
            importlib.import_module(name)
    del sys.modules["triton"]
    if found := OURS & sys.modules.keys():
        raise RuntimeError(f"{', '.join(sorted(found))} would be shared by all forks")
    if (pid := os.fork()) == 0:  # OpenBLAS ends its threads at a fork, and starts them again when they are needed
        os._exit(0)
    os.waitpid(pid, 0)
    gc.collect()
    gc.freeze()


def main() -> None:
    """Serve the socket in ``sys.argv[1]``. In a fork, become the requested process."""
    site = sys.path[1:]
    with contextlib.suppress(KeyError):
        del os.environ[PADDING]
    control = socket.socket(fileno=int(sys.argv[1]))
    preload()
    work, spares = fork_spares(Server(control).serve())
    become(work, site)
    if spares:
        use_spares(spares)
    run(work.argv)


if __name__ == "__main__":
    main()
