"""A process that has imported torch and forks the Python processes that tests start. ``forking.py`` starts it.

A process forked here behaves as one that ``python -m NAME`` or ``python FILE`` started: its session, death signal,
descriptors, environment, ``sys.path``, standard streams and command line are those of a new process, it runs as
``__main__``, and it leaves through the interpreter's normal end. It differs in what is decided before the first line
of a script: the modules in ``PRELOADED`` are loaded, and all forks of one server share the seed of ``hash()``.

A launcher starts its ranks itself. Its spares, forked before its first line ran, become the ranks; they are its own
children, and they have never seen its modules, threads, locks or signal handlers.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

PRELOADED = ("numpy", "torch", "torch._dynamo", "pytest", "typer")
"""What most ranks import. Constructing the first optimizer imports ``torch._dynamo``, which takes as long as torch."""
OURS = {"persia", "persia_core", "conftest", "stack"}
"""What each process has to import itself: it reads the environment, sets up logging, or starts threads."""
PADDING = "PERSIA_TEST_FORK_PADDING"
"""A variable that reserves memory for the command line and environment that ``/proc`` shows of a fork."""
REQUEST_BYTES = 1 << 20
_STREAMS = 3
_PR_SET_PDEATHSIG = 1
_READ_AT_START = (
    *("LD_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_", "NUMPY_", "TORCH", "PYTORCH_"),
    *("ATEN_", "TRITON_", "CUDA_", "KINETO_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ", "GRPC_"),
)
_READ_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED"}


@dataclass
class Work:
    """What a fork becomes.

    Attributes:
        argv: The command line behind the interpreter.
        env: The whole environment.
        cwd: The working directory.
        spares: Processes to fork for the ones it starts itself.
        number: The request's.
        fds: What becomes its standard input, output and error.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    spares: int = 0
    number: int = 0
    fds: tuple[int, ...] = ()


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the loader, the interpreter and the preloaded modules read; a fork cannot change them."""
    return {name: env[name] for name in env if name.startswith(_READ_AT_START) and name not in _READ_LATER}


def send(control: socket.socket, work: Work) -> None:
    """Send a request with its descriptors."""
    message = json.dumps({**asdict(work), "fds": ()}).encode()
    socket.send_fds(control, [message], list(work.fds))


def receive(control: socket.socket) -> Work | None:
    """Return the next request, or None where the sender has gone."""
    message, fds, flags, _ = socket.recv_fds(control, REQUEST_BYTES, _STREAMS)
    if not message:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise RuntimeError("a request was cut off")
    return Work(**{**json.loads(message), "fds": tuple(fds)})


def streams(stdin: int | None, stdout: int | None, stderr: int | None) -> tuple[list[int], list[int], BinaryIO | None]:
    """Return the descriptors for a child, those of them to close here, and the other end of a pipe.

    The arguments are those of ``subprocess.Popen`` that ``persia.launch.process`` uses.
    """
    opened: list[int] = []
    output: BinaryIO | None = None
    fds = [0, 1, 2]
    if stdin == subprocess.DEVNULL:
        fds[0] = os.open(os.devnull, os.O_RDONLY)
        opened.append(fds[0])
    if stdout == subprocess.PIPE:
        read, fds[1] = os.pipe()
        opened.append(fds[1])
        output = os.fdopen(read, "rb")
    if stderr == subprocess.STDOUT:
        fds[2] = fds[1]
    return fds, opened, output


def tied_command(words: Sequence[str]) -> list[str] | None:
    """Return what ``persia/launch/tied.py`` would have Python run, or None where that is another program."""
    tied = len(words) > _STREAMS and list(words[1:3]) == ["-I", "-S"] and Path(words[3]).name == "tied.py"
    if not tied or words[5] != sys.executable or (words[6].startswith("-") and words[6] not in {"-m", "-c"}):
        return None
    return list(words[6:])


# --- the server


def fork() -> int:
    """Fork. The child is killed when this thread dies, and leads a session before this returns here.

    Raises:
        RuntimeError: This process has several threads; what they hold would be held in the child for ever.
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
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
    os.setsid()
    os.close(write)
    return 0


class Server:
    """Forks what is asked for, and tells how each fork ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only its byte in the pipe is of use
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> Work:
        """Return in each child what it is to become. The server itself ends here with its client."""
        while True:
            ready, _, _ = select.select([self._control, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._control not in ready:
                continue
            if (work := receive(self._control)) is None:
                os._exit(0)  # its children are killed by the kernel
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
        except OSError:  # the client is dying, too
            os._exit(0)

    def _leave(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._woken)
        os.close(self._wake)
        self._control.close()


# --- a launcher and its ranks


class Spare:
    """A child that waits to become a process that this one starts; then what ``persia.launch`` needs of a Popen."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self.stdout: BinaryIO | None = None
        self._code: int | None = None
        self._reaping = threading.Lock()

    def wait(self) -> int:
        """Wait for its end and return its exit code, or minus a signal."""
        with self._reaping:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._code

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if not self._reaping.acquire(blocking=False):  # a thread waits for it
            return self._code
        try:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code
        finally:
            self._reaping.release()


def fork_spares(work: Work) -> tuple[Work, list[Spare]]:
    """Return the launcher's work and its spares; in a spare, which waits for it, its own work and none."""
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
        return own, []
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
            send(control, Work(argv, options["env"], str(options["cwd"] or Path.cwd()), fds=tuple(fds)))
        for fd in opened:
            os.close(fd)
        spare.stdout = output
        return spare

    process.subprocess = with_popen(popen)  # type: ignore[attr-defined]


def with_popen(popen: Any) -> types.ModuleType:
    """Return the module ``subprocess`` with another ``Popen``."""
    module = types.ModuleType("subprocess")
    module.__dict__.update(subprocess.__dict__, Popen=popen)
    return module


# --- becoming another process


def become(work: Work, site: Sequence[str]) -> None:
    """Make this process what its work says, as far as a new interpreter has it before it runs anything.

    Args:
        work: Its descriptors are taken over.
        site: The end of ``sys.path``, which is that of every process of this interpreter.
    """
    for number, fd in enumerate(work.fds):
        os.dup2(fd, number)
    for fd in work.fds:
        os.close(fd)
    os.chdir(work.cwd)
    os.environ.clear()
    os.environ.update(work.env)
    _show([sys.executable, *work.argv], work.env)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open_stream(name, number, unbuffered=bool(work.env.get("PYTHONUNBUFFERED")))
    given = work.env.get("PYTHONPATH")
    path = [str(Path(entry).absolute()) for entry in given.split(os.pathsep)] if given else []
    sys.path[:] = dict.fromkeys([*path, *site])
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    sys.orig_argv[:] = [sys.executable, *work.argv]
    sys.modules["numpy"].random.seed()  # each process has its own; random and torch do so by themselves


def _open_stream(name: str, fd: int, *, unbuffered: bool) -> None:
    """Open a standard stream as the interpreter does at its start, without what the server's has of its own."""
    writes = name != "stdin"
    before = getattr(sys, name)
    binary: Any = open(fd, "wb" if writes else "rb", 0 if unbuffered and writes else -1, closefd=False)  # noqa: PTH123, SIM115
    getattr(binary, "raw", binary).name = f"<{name}>"
    stream = type(before)(
        binary,
        before.encoding,
        before.errors,
        newline="\n",
        line_buffering=not unbuffered and (name == "stderr" or binary.isatty()),
        write_through=unbuffered,
    )
    stream.mode = "w" if writes else "r"
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Let ``/proc`` show this command line and environment: write them where the kernel put the server's.

    Nothing else points there any more: ``os.environ`` has copies of its own since it was cleared.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    bounds = [int(field) for field in fields[45:49]]
    variables = [f"{name}={value}" for name, value in env.items()]
    for start, end, words in ((*bounds[:2], argv), (*bounds[2:], variables)):
        content = b"".join(os.fsencode(word) + b"\0" for word in words)
        if len(content) > end - start:
            raise RuntimeError(f"{len(content)} bytes of a command line or an environment, of at most {end - start}")
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))


def run(argv: Sequence[str]) -> None:
    """Run a module, a command or a file as ``__main__``."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if argv[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = ["-m", *argv[2:]]
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
    elif argv[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        sys.argv = list(argv)
        main.__dict__.update(__file__=argv[0], __loader__=SourceFileLoader("__main__", argv[0]))
        exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), main.__dict__)  # noqa: S102


def preload() -> None:
    """Import what forks share, and leave one thread."""
    for name in PRELOADED:
        importlib.import_module(name)
    if found := OURS & sys.modules.keys():
        raise RuntimeError(f"{', '.join(sorted(found))} would be shared by all forks")
    if (pid := os.fork()) == 0:  # OpenBLAS ends its threads at a fork, and starts them again when they are needed
        os._exit(0)
    os.waitpid(pid, 0)


def main() -> NoReturn | None:
    """Serve the socket in ``sys.argv[1]``; behind that, be a process that was asked for."""
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
    return None


if __name__ == "__main__":
    main()
