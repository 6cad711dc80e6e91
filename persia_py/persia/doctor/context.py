"""The context of a shell in the image: the files of a folder, copied to where changes do no harm."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from persia.doctor import compose, network
from persia.doctor.disk import size
from persia.runtime.config_files import EMBEDDING_CONFIG, GLOBAL_CONFIG
from persia.runtime.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

LIMIT = 128 << 20
"""The largest context, in bytes."""
IGNORE = ".persiaignore"
"""The file that names what is left out, in the syntax of ``.gitignore``."""
_ALWAYS = (".git/", "__pycache__/", ".venv/")
"""What is left out of each context."""
_DEFAULTS = {
    EMBEDDING_CONFIG: "/workspace/config/embedding_config.yml",
    GLOBAL_CONFIG: "/workspace/config/global_config.yml",
}
"""The defaults of docker-compose.yaml, which a context with a ``persia.yml`` does not have."""
_LISTED = 5
_READY_S = 60.0
"""Seconds in which a notebook has to listen."""


@dataclass(frozen=True)
class Context:
    """The files of a folder that go into a container.

    Attributes:
        folder: The folder.
        files: The files, relative to the folder.
        bytes: Their size.
    """

    folder: Path
    files: list[Path]
    bytes: int


def read(folder: Path) -> Context:
    """Return the files of a context.

    Args:
        folder: The folder.

    Raises:
        UsageError: It is no folder, its files are larger than :data:`LIMIT` (the message has the five largest
            entries), or the package pathspec is not installed.
    """
    if not folder.is_dir():
        raise UsageError(f"--context {folder}: no such folder (seen from {Path.cwd()})")
    ignored = folder / IGNORE
    lines = [*_ALWAYS, *(ignored.read_text(encoding="utf-8").splitlines() if ignored.is_file() else ())]
    spec = _patterns(lines)
    files, entries, whole = [], dict[str, int](), 0
    for path in _walk(folder, lambda name: spec.match_file(name)):
        length = path.lstat().st_size
        relative = path.relative_to(folder)
        files.append(relative)
        entries[relative.parts[0]] = entries.get(relative.parts[0], 0) + length
        whole += length
    if whole > LIMIT:
        largest = sorted(entries.items(), key=lambda entry: -entry[1])[:_LISTED]
        listed = "".join(f"\n  {size(length):>10}  {name}" for name, length in largest)
        error = UsageError(f"--context {folder}: {size(whole)}, more than {size(LIMIT)}; its largest entries:{listed}")
        error.hint = f"name what is not needed in {ignored}; mount data with DATA_DIR, which is /data in containers"
        raise error
    return Context(folder, files, whole)


def _patterns(lines: Sequence[str]) -> "GitIgnoreSpec":
    """Return the patterns of lines in the syntax of ``.gitignore``."""
    try:
        from pathspec import GitIgnoreSpec
    except ImportError as error:
        missing = UsageError(f"--context: the package pathspec, which reads {IGNORE}, cannot be imported: {error}")
        missing.hint = "pip install pathspec; or work on the folder itself: --mount"
        raise missing from error
    return GitIgnoreSpec.from_lines(lines)


def _walk(folder: Path, is_ignored: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files of a folder, in order. Folders that are left out are not entered."""
    for root, folders, names in os.walk(folder):
        below = Path(root).relative_to(folder)
        folders[:] = sorted(each for each in folders if not is_ignored(f"{(below / each).as_posix()}/"))
        for name in sorted(names):
            if not is_ignored((below / name).as_posix()):
                yield Path(root, name)


@contextlib.contextmanager
def prepared(folder: Path, *, mount: bool) -> Iterator[Path]:
    """Give a folder for a container: a copy of the context, which is removed afterwards, or the folder itself.

    Args:
        folder: The folder.
        mount: The folder itself.

    Raises:
        UsageError: As :func:`read`.
    """
    if mount:
        if not folder.is_dir():
            raise UsageError(f"--context {folder}: no such folder (seen from {Path.cwd()})")
        yield folder.absolute()
        return
    context = read(folder)
    with tempfile.TemporaryDirectory(prefix="persia-context-", ignore_cleanup_errors=True) as name:
        copy = Path(name, "workspace")
        for file in context.files:
            target = copy / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / file, target, follow_symlinks=False)
        copy.mkdir(exist_ok=True)
        for each in (copy, *copy.rglob("*")):  # the folder above stays closed to other users
            if not each.is_symlink():
                each.chmod(each.stat().st_mode | (0o777 if each.is_dir() else 0o666))  # the image's user may write
        yield copy


def words_of(words: list[str], *, stack: bool = False, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs words in a container, with ``/workspace`` as its working directory.

    Args:
        words: The command.
        stack: Join the running stack; else the container has no servers.
        options: More options of ``docker compose run``.
    """
    alone = [] if stack else ["--env", "PERSIA_NATS_URL="]
    chosen = compose.settings().get("environment", {})
    for name, default in _DEFAULTS.items():
        if chosen.get(name) == default:  # the same file is found where it is there, and not asked for where it is not
            alone += ["--env", f"{name}="]
    tty = [] if sys.stdin.isatty() and sys.stdout.isatty() else ["--no-TTY"]
    return compose.run_words(*words, options=[*tty, "--workdir", "/workspace", *alone, *options])


def _variables(workspace: Path) -> dict[str, str]:
    """Return the environment in which ``docker compose`` mounts a folder as ``/workspace``."""
    return {**os.environ, "CUR_DIR": str(workspace)}


def run(folder: Path, words: list[str], *, mount: bool, stack: bool) -> int:
    """Run a command in the trainer's image on a context, and return its exit code.

    Args:
        folder: The context.
        words: The command.
        mount: Work on the folder itself.
        stack: Join the running stack.

    Raises:
        UsageError: As :func:`read`.
        UnreachableError: Nothing can be run in containers here.
    """
    with prepared(folder, mount=mount) as workspace:
        _check_stack()
        _say(workspace, mount=mount)
        return subprocess.run(words_of(words, stack=stack), env=_variables(workspace), check=False).returncode


def notebook(folder: Path, port: int, token: str, *, mount: bool, ready: Callable[[], None]) -> int:
    """Run a notebook server in the trainer's image, until it ends or Ctrl-C.

    Args:
        folder: The context.
        port: The port on this host; the container publishes it on loopback only.
        token: What a browser has to send.
        mount: Work on the folder itself.
        ready: Called when the server listens.

    Raises:
        UsageError: As :func:`read`, or the port is in use.
        UnreachableError: Nothing can be run in containers here.
    """
    if (used := network.free_port("port", port, "--port")).status == "fail":
        error = UsageError(f"--port {port}: {used.found}")
        error.hint = f"give another one: --port {port + 1}"
        raise error
    options = ["--publish", f"127.0.0.1:{port}:8888", "--env", "JUPYTER_TOKEN", "--env", "HOME=/tmp"]
    server = ["python", "-m", "jupyterlab", "--ip=0.0.0.0", "--port=8888", "--no-browser"]
    with prepared(folder, mount=mount) as workspace:
        _check_stack()
        _check_jupyter(workspace)
        _say(workspace, mount=mount)
        process = subprocess.Popen(
            words_of(server, options=options), env=_variables(workspace) | {"JUPYTER_TOKEN": token}
        )  # not on the command line, which every user can read
        waiter = threading.Thread(target=_wait, args=(process, port, ready), daemon=True)
        waiter.start()
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            return process.wait()


def _check_jupyter(workspace: Path) -> None:
    """Refuse an image without a notebook server."""
    words = words_of(["python", "-c", "import jupyterlab"])
    if subprocess.run(words, env=_variables(workspace), capture_output=True, check=False).returncode != 0:
        error = UsageError(f"the image {compose.image()} has no notebook server")
        error.hint = "add it to the image: FROM IMAGE, then RUN pip install jupyterlab; or use: persia debug shell"
        raise error


def _wait(process: "subprocess.Popen[bytes]", port: int, ready: Callable[[], None]) -> None:
    deadline = threading.Event()
    for _ in range(int(_READY_S * 5)):
        if process.poll() is not None or network.reach("127.0.0.1", port, 1.0).outcome == "reached":
            break
        deadline.wait(0.2)
    if process.poll() is None:
        ready()


def _check_stack() -> None:
    if (reason := compose.unavailable()) is not None:
        error = UnreachableError(f"persia debug: {reason}")
        error.hint = "run it in the folder of docker-compose.yaml, with the images built: docker compose build"
        raise error


def _say(workspace: Path, *, mount: bool) -> None:
    if mount:
        told = f"/workspace is {workspace} itself: changes in the container are changes here"
    else:
        told = "/workspace is a copy: changes in it are lost at the end; to keep them, give --mount"
    sys.stderr.write(f"{told}\n")
