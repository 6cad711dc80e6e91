"""Finds the logs of a job: in the folder of its run, or in the Docker engine."""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from persia.doctor import compose, containers
from persia.doctor.log_lines import Source, is_of, stamp
from persia.runtime import job, log_files
from persia.runtime.errors import UnreachableError, UsageError
from persia.runtime.settings import settings

_LATEST = "LATEST"
_PREFIX = re.compile(r"(\S+)\s+\| ?(.*)", re.DOTALL)
"""Matches a line of ``docker compose logs``: the container, and its output."""
_ENDED = re.compile(r"(\S+) exited with code \d+.*")
"""Matches the line of ``docker compose logs --follow`` about a container that has ended."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Matches a control sequence of terminals, which compose writes even with ``--no-color``."""
_TRAINER = re.compile(r"^trainer-(\d+)$")
_OF_ONE = ("train", "trainer")
"""Logs in the folder of a run that belong to rank 0, unless a line names another rank."""
_NO_FILE = re.compile(r"(?i)(no|suitable) configuration file")
"""Matches the error of ``docker compose`` in a folder without a compose file."""
_LISTED = 5
"""The number of runs that a message lists."""
_READ_S = 120.0
"""Seconds within which the Docker engine must return all logs."""


def of_run(folder: Path, *, last: int | None = None) -> list[Source]:
    """Return the logs of a run, from ``logs/`` in its folder.

    Args:
        folder: The folder of the run.
        last: The number of bytes to read at the end of each log.

    Raises:
        UsageError: The folder has no logs.
    """
    found = log_files.files(folder)
    if not found:
        runs = sorted({str(each.parent.parent) for each in Path("runs").glob("*/logs/*.log")})
        others = ", ".join(runs[:_LISTED]) + (f", and {len(runs) - _LISTED} more" if len(runs) > _LISTED else "")
        hint = f"specify a run with logs: {others}" if runs else "no run below runs/ has logs: specify another folder"
        raise UsageError(f"{folder}: no logs; expected the folder of a run with logs/NAME.log", hint=hint)
    return [Source(name, _lines(paths, last), 0 if name in _OF_ONE else None) for name, paths in found.items()]


def _lines(paths: Sequence[Path], last: int | None) -> Iterator[str]:
    """Yield the lines of the files of a log, oldest file first."""
    with ExitStack() as stack:
        for file in _opened(stack, paths, last):
            for line in file:
                yield from pieces(line.decode(errors="replace"))


def _opened(stack: ExitStack, paths: Sequence[Path], last: int | None) -> list[BinaryIO]:
    """Open all files of a log before the first file is read, because the files may be rotated in the meantime."""
    found: dict[tuple[int, int], BinaryIO] = {}
    left = last
    for path in reversed(paths):  # newest first: a file that is renamed in the meantime is found again
        if left is not None and left <= 0:
            break
        try:
            file = stack.enter_context(path.open("rb"))
        except FileNotFoundError:  # the oldest file has been removed
            continue
        facts = os.fstat(file.fileno())
        if (facts.st_dev, facts.st_ino) in found:
            continue
        found[facts.st_dev, facts.st_ino] = file
        if left is not None:
            if facts.st_size > left:
                file.seek(facts.st_size - left)
                file.readline()  # start at the beginning of a line
            left -= facts.st_size
    return [*found.values()][::-1]


def pieces(line: str) -> list[str]:
    """Return the pieces of a line that a terminal shows one after another, as in a progress bar; usually one."""
    line = line.rstrip("\r\n")
    return [each for each in line.split("\r") if each] if "\r" in line else [line]


def run_folder(given: Path | None) -> Path | None:
    """Return the folder of a run: ``given``, which may be ``LATEST``, or else the newest run below ``runs`` with logs.

    Return None if there is none.
    """
    if given is not None:
        if given.name == _LATEST and given.is_file():
            return job.target_of(given)
        return given
    files = [*Path("runs").glob("*/logs/*.log")]
    return max(files, key=lambda path: path.stat().st_mtime).parent.parent if files else None


def newest_run(given: Path | None) -> Path | None:
    """Like :func:`run_folder`, but also accept ``PERSIA_RUN_DIR``, or the newest run without logs."""
    if given is not None:
        return run_folder(given)
    if settings.run_dir is not None:
        return Path(settings.run_dir)
    names = ("summary.json", "metrics.jsonl", "logs/*.log")
    files = [each for name in names for each in Path("runs").glob(f"*/{name}")]
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    return newest.parent.parent if newest.parent.name == log_files.FOLDER else newest.parent


def of_stack(since: float | None = None) -> list[Source]:
    """Return the logs of all containers of the stack in this folder, including ended ones.

    Args:
        since: The time from which lines are returned, in seconds since 1970.

    Raises:
        UnreachableError: No stack exists, or the Docker engine does not respond.
    """
    words = ["compose", "logs", "--no-color", "--timestamps", *(["--since", stamp(since)] if since else [])]
    done = compose.ask(*words, seconds=_READ_S)
    if done.returncode != 0:
        raise UnreachableError(
            f"docker compose logs: {compose.last_line(done)}",
            hint=f"{compose.FOLDER_OR_ENGINE}; or specify the folder of a run: persia logs runs/NAME",
        )
    lines = ComposeLines().by_container(done.stdout.removesuffix("\n").split("\n"))
    return [Source(name, each, rank_of(name)) for name, each in sorted(lines.items())]


class ComposeLines:
    """Assigns the lines of ``docker compose logs`` to containers.

    A line without a prefix belongs to the previous container.
    """

    def __init__(self) -> None:
        self._name: str | None = None

    def by_container(self, lines: Iterable[str]) -> dict[str, list[str]]:
        """Return the lines of each container, without their prefixes."""
        found: dict[str, list[str]] = {}
        for line in lines:
            text = _ESCAPE.sub("", line)
            if (prefixed := _PREFIX.fullmatch(text)) is not None:
                self._name, text = prefixed[1], prefixed[2]
            elif (ended := _ENDED.fullmatch(text)) is not None:
                self._name = ended[1]
            if self._name is not None:
                found.setdefault(self._name, []).extend(pieces(text))
        return found


def rank_of(name: str) -> int | None:
    """Return the rank of a log whose lines do not name it; None if the log belongs to several ranks, or to none.

    A log belongs to one rank if it is the log of a trainer in the folder of a run, or of a trainer container with one
    rank. With several ranks, the launcher adds the rank to each line.
    """
    found = _TRAINER.match(name)
    return 0 if name in _OF_ONE else None if found is None else int(found[1]) - 1


def has_stack(say: Callable[[str], None]) -> bool:
    """Whether this folder has a stack with a trainer whose containers exist.

    Args:
        say: Called with the reason if docker fails.
    """
    if shutil.which("docker") is None:
        return False
    try:
        listed = compose.ask("compose", "config", "--services")
        if listed.returncode != 0 and _NO_FILE.search(listed.stderr) is not None:
            return False
        if listed.returncode == 0 and compose.SERVICE not in listed.stdout.split():  # not a project of Persia
            return False
        done = listed if listed.returncode else compose.ask("compose", "ps", "--all", "--quiet")
        problem = f"docker compose: {compose.last_line(done)}" if done.returncode else ""
    except UnreachableError as error:
        problem = str(error)
    if problem:
        say(f"cannot determine whether this folder has a stack: {problem}")
        return False
    return bool(done.stdout.strip())


def check_service(service: str, sources: Sequence[Source], *, in_stack: bool) -> None:
    """Check that a service has processes. Containers with empty logs count.

    Raises:
        UsageError: No process matches.
    """
    names = {each.name for each in sources}
    if in_stack and not any(is_of(each, service) for each in names):
        names |= {each.name for each in containers.containers()}
    if not any(is_of(each, service) for each in names):
        listed = ", ".join(sorted(names)) or "none"
        raise UsageError(
            f"--service {service}: no process name begins with this; processes: {listed}",
            hint="specify the beginning of a name, such as: persia logs --service server",
        )
