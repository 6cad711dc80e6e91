"""Yields log lines as they are written, from a run's folder or from the containers of the stack."""

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from persia.doctor import compose, logs
from persia.doctor.log_lines import Line, Source, merged, stamp
from persia.runtime import log_files
from persia.runtime.errors import UnreachableError

POLL_S = 0.2
"""Seconds between two checks of the files of a run."""
_QUIET_S = 0.3
"""Collected lines of containers are sorted and shown when no line has arrived for this number of seconds."""
_ROUND_S = 1.0
"""Collected lines are sorted and shown at the latest after this number of seconds, even if further lines arrive."""
_FIRST_S = 15.0
"""Lines that exist at the start, which may be many, are sorted and shown at the latest after this number of seconds."""
_END_S = 5.0
"""Seconds within which docker must end after SIGTERM, and then after SIGKILL."""


@dataclass
class _Opened:
    """An open log file: its identity on the disk, and the read position."""

    file: BinaryIO
    identity: tuple[int, int]


class FollowedLog:
    """A log in the folder of a run, with its rotated files.

    Args:
        folder: The folder of the run.
        name: The process, such as ``server-0``.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._open: _Opened | None = None
        self._rest = b""  # an incomplete line

    def read(self) -> list[str]:
        """Return the lines that have become complete since the last call; the first call returns all lines."""
        newer = self._newer()
        lines = [] if self._open is None else self._lines(self._open.file, ends=bool(newer))
        for place, each in enumerate(newer, 1):
            self.close()
            self._open = each
            lines += self._lines(each.file, ends=place < len(newer))
        return lines

    def _newer(self) -> list[_Opened]:
        """Open the files that are newer than the current one, oldest first."""
        found: list[_Opened] = []
        for path in reversed(log_files.files(self._folder).get(self._name, [])):
            try:
                file = path.open("rb")
            except FileNotFoundError:  # it has been rotated in the meantime, and is found again later
                continue
            facts = os.fstat(file.fileno())
            identity = (facts.st_dev, facts.st_ino)
            if self._open is not None and identity == self._open.identity:
                file.close()
                break
            if identity in [each.identity for each in found]:
                file.close()
            else:
                found.append(_Opened(file, identity))
        return found[::-1]

    def _lines(self, file: BinaryIO, *, ends: bool) -> list[str]:
        """Return the new complete lines of a file; the last line counts as complete if the file ``ends``."""
        *whole, self._rest = (self._rest + file.read()).split(b"\n")
        if ends and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [piece for line in whole for piece in logs.pieces(line.decode(errors="replace"))]

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            self._open.file.close()


def run(folder: Path) -> Generator[Iterator[Line], None, None]:
    """Yield the existing lines of a run, then repeatedly the new ones, in chronological order.

    Args:
        folder: The folder of the run.

    Raises:
        UsageError: The folder has no logs.
    """
    logs.of_run(folder)  # raises an error if the folder has no logs
    followed: dict[str, FollowedLog] = {}
    times: dict[str, float] = {}
    unknown = 0.0  # the time for lines that precede the first line with a time
    with ExitStack() as stack:
        while True:
            sources = []
            for name in log_files.files(folder):
                if name not in followed:
                    followed[name] = FollowedLog(folder, name)
                    stack.callback(followed[name].close)
                sources.append(Source(name, followed[name].read(), logs.rank_of(name), times.get(name, unknown)))
            yield _noted(sources, times)
            time.sleep(POLL_S)
            unknown = time.time()


def stack(since: float | None = None) -> Generator[Iterator[Line], None, None]:
    """Yield the existing lines of the stack's containers, then new ones, until all containers have ended.

    Args:
        since: The time from which lines are yielded, in seconds since 1970.

    Raises:
        UnreachableError: The Docker engine does not respond.
    """
    words = ["docker", "compose", "logs", "--follow", "--no-color", "--timestamps"]
    words += ["--since", stamp(since)] if since else []
    times: dict[str, float] = {}
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except FileNotFoundError as error:
            raise UnreachableError("docker is not on PATH", hint=compose.INSTALL) from error
        arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process, arrived), name="persia-logs", daemon=True)
        reader.start()
        try:
            parser, within, goes_on = logs.ComposeLines(), _FIRST_S, True
            while goes_on:
                lines, goes_on = _round(arrived, within)
                found = parser.by_container(lines)
                sources = [Source(name, each, logs.rank_of(name), times.get(name, 0.0)) for name, each in found.items()]
                yield _noted(sources, times)
                within = _ROUND_S
            if process.wait() != 0:
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                reason = said[-1] if said else f"exit code {process.returncode}"
                raise UnreachableError(f"docker compose logs: {reason}", hint=compose.FOLDER_OR_ENGINE)
        finally:
            _end(process, reader)


def _end(process: "subprocess.Popen[bytes]", reader: threading.Thread) -> None:
    """End docker and its child processes, and read the rest of their output for a limited time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None and not reader.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):  # all processes have ended
            os.killpg(process.pid, number)
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(subprocess.TimeoutExpired):  # the next signal may end the processes
            process.wait(_END_S)
        reader.join(max(0.0, deadline - time.monotonic()))


def _read(process: "subprocess.Popen[bytes]", arrived: "queue.SimpleQueue[str | None]") -> None:
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    with process.stdout as output:
        for line in output:
            arrived.put(line.decode(errors="replace").removesuffix("\n"))
    arrived.put(None)


def _round(arrived: "queue.SimpleQueue[str | None]", within: float) -> tuple[list[str], bool]:
    """Wait for lines. Return those that arrived together, and whether more may follow."""
    lines: list[str] = []
    line = arrived.get()
    end = time.monotonic() + within
    while line is not None:
        lines.append(line)
        left = min(_QUIET_S, end - time.monotonic())
        try:
            line = arrived.get(timeout=max(0.0, left))
        except queue.Empty:
            return lines, True
    return lines, False


def _noted(sources: list[Source], times: dict[str, float]) -> Iterator[Line]:
    """Yield lines in chronological order, and record the time of the last line of each log."""
    for line in merged(sources):
        times[line.source] = line.time
        yield line
