"""The running ranks on this host. Each rank registers, and prints the stacks of its threads on request.

A rank registers when a launcher of persia starts it, or at its first breakpoint. A crash (SIGSEGV, SIGABRT, SIGBUS,
SIGFPE, SIGILL) prints the stacks to standard error.

A thread of the rank prints the stacks while it holds the GIL, so no other thread changes them. If a signal handler
printed them, the process could end by SIGSEGV, because other threads run Python code at the same time. Therefore
SIGUSR1 is sent only to a rank whose thread does not respond because native code holds the GIL.
"""

import atexit
import contextlib
import errno
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from persia.runtime.errors import StorageError
from persia.runtime.files import write_whole
from persia.runtime.logging import get_logger, next_step
from persia.runtime.settings import settings, variable

_logger = get_logger("debug")

_ERRORS = 2
_ANSWER_S = 5.0
"""Seconds within which a rank must print its stacks, after a request and again after SIGUSR1."""
_QUIET_S = 0.1
"""Seconds without further output after which the stacks are complete."""
_POLL_S = 0.02
_SILENT = f"the rank did not respond within {_ANSWER_S:g} s"
_SPY_S = 60.0
"""Seconds within which py-spy must print the stacks."""


@dataclass(frozen=True)
class Rank:
    """A running rank.

    Attributes:
        pid: The process id.
        started: The start time of the process, in seconds since 1970, because process ids are reused.
        rank: The number of the rank.
        world_size: The number of ranks of its run.
        job: The name of its job; empty without servers, or if the name is unknown.
        script: Its command line, without the interpreter.
        folder: Its working directory.
        registered: Whether it prints its stacks on request. Otherwise it was found by its environment variables, and
            SIGUSR1 would end it.
        accepts_editors: Whether it serves the requests of ``persia debug attach``.
    """

    pid: int
    started: float
    rank: int
    world_size: int
    job: str
    script: str
    folder: str
    registered: bool = True
    accepts_editors: bool = False

    @property
    def title(self) -> str:
        """A one-line description of the rank."""
        job = f" of job {self.job}" if self.job else ""
        return f"rank {self.rank} of {self.world_size}{job}, pid {self.pid}: {self.script}"


_registered: list[Any] = []


def folder() -> Path:
    """Return the folder in which ranks of this user register. Only this user can read it.

    Raises:
        StorageError: The folder cannot be created, or other users can access it.
    """
    path = Path(tempfile.gettempdir(), f"persia-ranks-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise StorageError(
            f"cannot create {path}, where running ranks register: {error.strerror}",
            hint=f"check the owner and the free space of {path.parent}, and remove a file of this name; or set another "
            "folder for temporary files: TMPDIR=FOLDER",
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or path.is_symlink():
        raise StorageError(
            f"{path}, where running ranks register: expected a folder that only this user can access",
            hint=f"remove {path}, or set another folder for temporary files: TMPDIR=FOLDER",
        )
    return path


def register(rank: int, world_size: int) -> None:
    """Register this process, and print stacks on request, on SIGUSR1 and after a crash.

    A script's own handler of SIGUSR1 is kept; the process is then not registered.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(_ERRORS)
    if _registered or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return
    pid = os.getpid()
    try:
        own = folder()
        _sweep(own)
        stacks = (own / f"{pid}.stacks").open("wb", buffering=0)
        requests = _pipe(own / f"{pid}.request")
    except (OSError, StorageError) as error:
        line = "rank %d cannot register, so persia debug stacks and attach cannot reach it: %s%s"
        _logger.warning(line, rank, error, next_step(error))
        return
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=False)
    threading.Thread(target=_print_stacks, args=(requests, stacks), name="persia-stacks", daemon=True).start()
    _registered.append(stacks)
    job = variable("PERSIA_JOB") or "" if settings.nats_url is not None else ""
    words = " ".join(sys.argv) or sys.executable
    entry = Rank(pid, psutil.Process().create_time(), rank, world_size, job, words, str(Path.cwd()))
    _write(own, entry)
    atexit.register(_remove, own, pid)


def _pipe(path: Path) -> int:
    """Create a named pipe, and open it for reading and writing, so that reads wait for requests."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR)


def _print_stacks(requests: int, stacks: Any) -> None:
    """Print the stacks of all threads for each request."""
    while os.read(requests, 1):
        faulthandler.dump_traceback(stacks, all_threads=True)


def accept_editors() -> None:
    """Record that this process serves the requests of ``persia debug attach``."""
    path = own_path(".json")
    if path is not None:
        entry = Rank(**json.loads(path.read_text(encoding="utf-8")))
        _write(path.parent, replace(entry, accepts_editors=True))


def _write(own: Path, entry: Rank) -> None:
    write_whole(own / f"{entry.pid}.json", json.dumps(asdict(entry)).encode())


def own_path(suffix: str) -> Path | None:
    """Return the file of this process in the folder of the running ranks; None if it has not registered."""
    return Path(_registered[0].name).with_suffix(suffix) if _registered else None


def running() -> list[Rank]:
    """Return the running ranks: registered ones, and those that torchrun started; ordered by run and rank."""
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, psutil.Error):
            entry = Rank(**json.loads(path.read_text(encoding="utf-8")))
            if psutil.Process(entry.pid).create_time() == entry.started:
                found.append(entry)
    known = {entry.pid for entry in found}
    found += [entry for entry in _by_variables() if entry.pid not in known]
    return sorted(found, key=lambda entry: (entry.job, entry.script, entry.rank, entry.pid))


def _by_variables() -> Iterator[Rank]:
    """Yield processes of this user that torchrun has started as ranks, which are recognized by their variables."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            if process.uids().real != os.getuid() or "python" not in process.name():
                continue
            env = process.environ()
            if "RANK" in env and "LOCAL_RANK" in env and "RANK" not in psutil.Process(process.ppid()).environ():
                words = " ".join(process.cmdline()[1:])
                place = int(env["RANK"]), int(env.get("WORLD_SIZE") or 1)
                yield Rank(process.pid, process.create_time(), *place, "", words, process.cwd(), registered=False)


def stacks_of(entry: Rank) -> str:
    """Return the stacks of all threads of a rank, which continues running, or a text that says why there are none."""
    if not entry.registered:
        return _py_spy(entry, "the rank did not register, so SIGUSR1 would end it")
    try:
        return _printed(entry, _request) or _printed(entry, _signal) or _py_spy(entry, _SILENT)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return "no stacks: the rank has ended\n"


def _request(entry: Rank) -> bool:
    """Ask the thread of a rank for the stacks; return whether the request was sent."""
    try:
        pipe = os.open(folder() / f"{entry.pid}.request", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:  # the rank has ended, and may have removed the pipe
        if error.errno not in (errno.ENOENT, errno.ENXIO):
            raise
        return False
    with os.fdopen(pipe, "wb", buffering=0) as file:
        file.write(b".")
    return True


def _signal(entry: Rank) -> bool:
    """Send SIGUSR1 to a rank; return False if it is stopped, because it would print its stacks when it continues."""
    if psutil.Process(entry.pid).status() == psutil.STATUS_STOPPED:
        return False
    os.kill(entry.pid, signal.SIGUSR1)
    return True


def _printed(entry: Rank, ask: Callable[[Rank], bool]) -> str:
    """Return the stacks that a rank prints when it is asked; an empty string if it prints none in time."""
    path = folder() / f"{entry.pid}.stacks"
    before = path.stat().st_size if path.exists() else 0
    if not ask(entry):
        return ""
    deadline = time.monotonic() + _ANSWER_S
    size, since = before, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = path.stat().st_size if path.exists() else before
        if now != size:
            size, since = now, time.monotonic()
        elif size > before and time.monotonic() - since > _QUIET_S:
            return path.read_bytes()[before:].decode(errors="replace")
    return ""


def _py_spy(entry: Rank, why: str) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return f"no stacks: {why}, and py-spy is not installed; next: pip install py-spy\n"
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(entry.pid)], capture_output=True, text=True, check=False, timeout=_SPY_S
        )
    except subprocess.TimeoutExpired:
        return f"no stacks: {why}, and py-spy did not end within {_SPY_S:g} s\n"
    if done.returncode:
        return f"no stacks: {why}, and py-spy failed: {done.stderr.strip()}\n"
    return done.stdout


def _sweep(own: Path) -> None:
    """Remove the files of ranks that were killed."""
    for path in own.iterdir():
        if path.stem.isdecimal() and not psutil.pid_exists(int(path.stem)):
            path.unlink(missing_ok=True)


def _remove(own: Path, pid: int) -> None:
    if os.getpid() == pid:
        for suffix in ("json", "stacks", "request", "attach", "attached"):
            (own / f"{pid}.{suffix}").unlink(missing_ok=True)
