"""The context of a shell in the image: a copy of a folder, so that changes do not affect the original files."""

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from persia.doctor import compose
from persia.doctor.disk import size
from persia.launch import foreground
from persia.runtime import signals
from persia.runtime.config_files import EMBEDDING_CONFIG, GLOBAL_CONFIG
from persia.runtime.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

LIMIT = 128 << 20
"""The maximum size of a context, in bytes."""
IGNORE = ".persiaignore"
"""The file that lists the names to omit, in the syntax of ``.gitignore``."""
_ALWAYS = (".git/", "__pycache__/", ".venv/")
"""The names that are omitted from every context."""
_DEFAULTS = {
    EMBEDDING_CONFIG: "/workspace/config/embedding_config.yml",
    GLOBAL_CONFIG: "/workspace/config/global_config.yml",
}
"""The defaults of docker-compose.yaml that do not apply to a context with a ``persia.yml``."""
_LISTED = 5


@dataclass(frozen=True)
class Context:
    """The files of a folder that go into a container.

    Attributes:
        folder: The folder whose files are copied into the container.
        files: The files, and links to them, relative to the folder.
        bytes: The total size of the files.
        skipped: Entries that cannot be copied into a container, as ``NAME: WHY``.
    """

    folder: Path
    files: list[Path]
    bytes: int
    skipped: list[str]


def read(folder: Path) -> Context:
    """Return the files of a context.

    Args:
        folder: The folder.

    Raises:
        UsageError: The path is not a folder, its files are larger than :data:`LIMIT` (the message lists the five
            largest entries), or the package pathspec is not installed.
    """
    if not folder.is_dir():
        raise UsageError(f"--context {folder}: no such folder (working directory: {Path.cwd()})")
    ignored = folder / IGNORE
    lines = [*_ALWAYS, *(ignored.read_text(encoding="utf-8").splitlines() if ignored.is_file() else ())]
    spec = _patterns(lines)
    files: list[Path] = []
    skipped: list[str] = []
    entries, whole = dict[str, int](), 0
    for path in _walk(folder, lambda name: spec.match_file(name), skipped):
        relative = path.relative_to(folder)
        if why := _why_not(path, folder):
            skipped.append(f"{relative}: {why}")
            continue
        length = path.lstat().st_size
        files.append(relative)
        entries[relative.parts[0]] = entries.get(relative.parts[0], 0) + length
        whole += length
    there = {*files, *(parent for file in files for parent in file.parents)}
    for link in [each for each in files if (folder / each).is_symlink()]:
        if (folder / link).resolve().relative_to(folder.resolve()) not in there:
            files.remove(link)
            skipped.append(f"{link}: a link to {(folder / link).readlink()}, which is not in the container")
    if whole > LIMIT:
        largest = sorted(entries.items(), key=lambda entry: -entry[1])[:_LISTED]
        listed = "".join(f"\n  {size(length):>10}  {name}" for name, length in largest)
        raise UsageError(
            f"--context {folder}: {size(whole)}, more than the {size(LIMIT)} allowed; its largest entries:{listed}",
            hint=f"list what is not needed in {ignored}; mount data with DATA_DIR, which is /data in containers",
        )
    return Context(folder, files, whole, skipped)


def _why_not(path: Path, folder: Path) -> str:
    """Return why a file cannot be copied into a container; empty if it can."""
    kind = path.lstat().st_mode
    if stat.S_ISLNK(kind):
        target = path.readlink()
        if not path.exists():
            return f"a link to {target}, which does not exist"
        inside = path.resolve().is_relative_to(folder.resolve())
        return "" if inside and not target.is_absolute() else f"a link to {target}, which is not in the container"
    if not stat.S_ISREG(kind):
        names = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a named pipe"}
        return f"{names.get(stat.S_IFMT(kind), 'a device')}, not a file"
    return "" if os.access(path, os.R_OK) else "it cannot be read"


def _patterns(lines: Sequence[str]) -> "GitIgnoreSpec":
    """Return the patterns of lines in the syntax of ``.gitignore``."""
    try:
        from pathspec import GitIgnoreSpec
    except ImportError as error:
        raise UsageError(
            f"--context: the package pathspec, which reads {IGNORE}, cannot be imported: {error}",
            hint="pip install pathspec; or work on the folder itself: --mount",
        ) from error
    return GitIgnoreSpec.from_lines(lines)


def _walk(folder: Path, is_ignored: Callable[[str], bool], skipped: list[str]) -> Iterator[Path]:
    """Yield the files of a folder and all links, in order. Ignored folders are not entered.

    Folders that cannot be read are added to ``skipped``.
    """

    def note(error: OSError) -> None:
        skipped.append(f"{Path(error.filename).relative_to(folder)}/: {error.strerror}")

    for root, folders, names in os.walk(folder, onerror=note):
        below = Path(root).relative_to(folder)
        links = [each for each in folders if Path(root, each).is_symlink()]
        kept = [each for each in folders if each not in links]
        folders[:] = sorted(each for each in kept if not is_ignored(f"{(below / each).as_posix()}/"))
        for name in sorted([*names, *links]):
            path = (below / name).as_posix()
            if not is_ignored(path) and not (name in links and is_ignored(f"{path}/")):
                yield Path(root, name)


@contextlib.contextmanager
def prepared(folder: Path, *, mount: bool) -> Iterator[Path]:
    """Provide a folder for a container: a copy of the context, or the folder itself.

    The copy is removed at the end of the block, including an end by SIGTERM or SIGHUP.

    Args:
        folder: The folder.
        mount: Whether to use the folder itself.

    Raises:
        UsageError: As in :func:`read`.
    """
    if mount:
        if not folder.is_dir():
            raise UsageError(f"--context {folder}: no such folder (working directory: {Path.cwd()})")
        yield folder.absolute()
        return
    context = read(folder)
    _warn(context)
    with (
        signals.cleaned_up(),
        tempfile.TemporaryDirectory(prefix="persia-context-", ignore_cleanup_errors=True) as name,
    ):
        copy = Path(name, "workspace")
        for file in context.files:
            target = copy / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / file, target, follow_symlinks=False)
        copy.mkdir(exist_ok=True)
        # The user of the image must be able to write. The parent folder protects the copy from other users.
        for each in (copy, *copy.rglob("*")):
            if not each.is_symlink():
                each.chmod(each.stat().st_mode | (0o777 if each.is_dir() else 0o666))
        yield copy


def words_of(words: list[str], *, stack: bool = False, options: Sequence[str] = ()) -> list[str]:
    """Return the ``docker compose`` command that runs ``words`` in a container, with working directory ``/workspace``.

    Args:
        words: The command.
        stack: Whether to join the running stack; otherwise the container has no servers.
        options: Additional options of ``docker compose run``.
    """
    alone = [] if stack else ["--env", "PERSIA_NATS_URL="]
    chosen = compose.settings().get("environment", {})
    for name, default in _DEFAULTS.items():
        if chosen.get(name) == default:  # without the variable, Persia uses the file only if it exists
            alone += ["--env", f"{name}="]
    tty = [] if sys.stdin.isatty() and sys.stdout.isatty() else ["--no-TTY"]
    return compose.run_words(*words, options=[*tty, "--workdir", "/workspace", *alone, *options])


def variables(workspace: Path) -> dict[str, str]:
    """Return the environment variables with which ``docker compose`` mounts a folder as ``/workspace``."""
    return {**os.environ, "CUR_DIR": str(workspace)}


def run(folder: Path, words: list[str], *, mount: bool, stack: bool) -> int:
    """Run a command in the trainer's image on a context, and return its exit code.

    Args:
        folder: The context.
        words: The words of the command.
        mount: Whether to work on the folder itself.
        stack: Whether to join the running stack.

    Raises:
        UsageError: As in :func:`read`.
        UnreachableError: Nothing can run in containers here.
    """
    with prepared(folder, mount=mount) as workspace:
        check_stack()
        say(workspace, mount=mount)
        return foreground.run(words_of(words, stack=stack), env=variables(workspace))


def check_stack() -> None:
    """Check that a stack exists.

    Raises:
        UnreachableError: Nothing can run in containers here.
    """
    if (reason := compose.unavailable()) is not None:
        raise UnreachableError(f"persia debug: {reason}", hint=compose.next_step())


def _warn(context: Context) -> None:
    """Print a warning about files of a folder that are not in its copy."""
    if not context.skipped:
        return
    more = len(context.skipped) - _LISTED
    listed = [*context.skipped[:_LISTED], *([f"and {more} more"] if more > 0 else [])]
    sys.stderr.write(
        "".join([f"warning: left out of the copy of {context.folder}:\n", *(f"  {each}\n" for each in listed)])
        + f"next: copy what is needed into the folder, or mount it with DATA_DIR; list the rest in {IGNORE}\n"
    )


def say(workspace: Path, *, mount: bool) -> None:
    """Print whether changes in the container are kept."""
    if mount:
        told = f"/workspace is {workspace} itself: changes in the container change this folder"
    else:
        told = "/workspace is a copy: changes in it are lost at the end; to keep them, use --mount"
    sys.stderr.write(f"{told}\n")
