"""The request for a fork of ``forkserver.py``, and its execution."""

import ctypes
import importlib
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, BinaryIO

_REQUEST_BYTES = 1 << 20
_STREAMS = 3
_READ_AT_START = (
    *("LD_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_", "NUMPY_", "TORCH", "PYTORCH_"),
    *("ATEN_", "TRITON_", "CUDA_", "KINETO_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ", "GRPC_"),
)
_CONSOLE_SCRIPTS = {"persia", "persia-launcher"}
_DATA_SPARES = 2
"""The number of runs of its script that a data-compose starts from a fork: the first, and one after a restart."""
_JOB_SPARES = 9
"""The number of launchers that a job starts from a fork: two data-composes, a trainer, and each after two restarts."""
_OF_JOBS = {"--nproc", "--ranks", "--servers"}
_READ_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR"}


@dataclass
class Work:
    """The process that a fork becomes.

    Attributes:
        argv: The command line after the interpreter.
        env: The whole environment.
        cwd: The working directory.
        spares: The number of processes to fork for those that the process starts itself.
        number: The number of the request.
        fds: The descriptors for standard input, output and error.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    spares: int = 0
    number: int = 0
    fds: tuple[int, ...] = ()


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the loader, the interpreter or a preloaded module has read before a fork."""
    return {name: env[name] for name in env if name.startswith(_READ_AT_START) and name not in _READ_LATER}


def send(control: socket.socket, work: Work) -> None:
    """Send a request with its descriptors."""
    message = json.dumps({**asdict(work), "fds": ()}).encode()
    socket.send_fds(control, [message], list(work.fds))


def receive(control: socket.socket) -> Work | None:
    """Return the next request, or None if the sender has closed the connection."""
    message, fds, flags, _ = socket.recv_fds(control, _REQUEST_BYTES, _STREAMS)
    if not message:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise RuntimeError("a request was cut off")
    return Work(**{**json.loads(message), "fds": tuple(fds)})


def streams(stdin: int | None, stdout: int | None, stderr: int | None) -> tuple[list[int], list[int], BinaryIO | None]:
    """Return the descriptors for a child, those that this process must close, and the other end of a pipe.

    The arguments are the arguments of ``subprocess.Popen`` that ``persia.launch.process`` uses.
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
    """Return the Python arguments of a ``persia/launch/die_with_parent.py`` command; None for another program."""
    tied = len(words) > _STREAMS and list(words[1:3]) == ["-I", "-S"] and Path(words[3]).name == "die_with_parent.py"
    if not tied or words[5] != sys.executable or (words[6].startswith("-") and words[6] not in {"-m", "-c"}):
        return None
    return list(words[6:])


def python_command(words: Sequence[str], env: Mapping[str, str]) -> list[str] | None:
    """Return the Python arguments of a command; None for another program, or if the interpreter has options.

    A console script such as ``persia`` is a Python command if its first line names this interpreter.
    """
    if words[0] == sys.executable:
        if (argv := tied_command(words)) is not None:
            return argv
        argv = list(words[1:])
        return argv if argv and (not argv[0].startswith("-") or argv[0] in {"-m", "-c"}) else None
    if Path(words[0]).name not in _CONSOLE_SCRIPTS:
        return None
    script = shutil.which(words[0], path=env.get("PATH"))
    if script is None or Path(script).read_bytes().partition(b"\n")[0] != b"#!" + os.fsencode(sys.executable):
        return None
    return [script, *words[1:]]


def spares_of(argv: Sequence[str]) -> int:
    """Return how many Python processes a command starts: the ranks of a launcher, the launchers of a job."""
    if list(argv[:2]) == ["-m", "persia.launch.cli"] or Path(argv[0]).name == "persia-launcher":
        if "data-loader" in argv:
            return _DATA_SPARES
        return int(argv[argv.index("--nproc-per-node") + 1]) if "--nproc-per-node" in argv else 1
    verb = python_verb(argv)
    return _JOB_SPARES if verb == "up" or (verb == "train" and _OF_JOBS & {*argv}) else 0


def python_verb(argv: Sequence[str]) -> str:
    """Return the verb of a ``persia`` command; an empty string for another one."""
    words = list(argv[1:] if argv[0] == "-m" else argv)
    return words[1] if len(words) > 1 and Path(words[0]).name == "persia" else ""


def with_popen(popen: Any) -> types.ModuleType:
    """Return the module ``subprocess`` with another ``Popen``."""
    module = types.ModuleType("subprocess")
    module.__dict__.update(subprocess.__dict__, Popen=popen)
    return module


# --- becoming another process


def become(work: Work, site: Sequence[str]) -> None:
    """Turn this process into the requested one, in the state of a new interpreter before it runs anything.

    Args:
        work: The process to become. This process takes over its descriptors.
        site: The end of ``sys.path``, which is equal in all processes of this interpreter.
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
    tempfile.tempdir = None  # cached from the TMPDIR of the server
    sys.modules["numpy"].random.seed()  # each process has its own state; random and torch reseed themselves


def _open_stream(name: str, fd: int, *, unbuffered: bool) -> None:
    """Open a standard stream as the interpreter does at its start, without the server's changes to it."""
    writes = name != "stdin"
    before = getattr(sys, name)
    binary: Any = open(fd, "wb" if writes else "rb", 0 if unbuffered and writes else -1, closefd=False)  # noqa: SIM115
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
    """Let ``/proc`` show this command line and environment: write them to the memory that has those of the server.

    Nothing else uses this memory, because ``os.environ`` has copies after it was cleared.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    bounds = [int(field) for field in fields[45:49]]
    if not all(bounds):  # kernels other than Linux do not report the bounds
        return
    variables = [f"{name}={value}" for name, value in env.items()]
    for start, end, words in ((bounds[0], bounds[1], argv), (bounds[2], bounds[3], variables)):
        content = b"".join(os.fsencode(word) + b"\0" for word in words)
        if len(content) > end - start:
            raise RuntimeError(f"{len(content)} bytes of a command line or an environment, of at most {end - start}")
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))


def run(argv: Sequence[str]) -> None:
    """Run a module, a command or a file as ``__main__``."""
    main = types.ModuleType("__main__")
    if "__annotations__" in sys.modules["__main__"].__dict__:  # the server is a script too: keep this Python's value
        main.__annotations__ = {}
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
        file = str(Path(argv[0]).absolute())
        main.__dict__.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
        exec(compile(Path(file).read_bytes(), file, "exec"), main.__dict__)  # noqa: S102
