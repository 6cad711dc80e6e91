"""One child process: its output, its group, its end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_TIED = Path(__file__).with_name("tied.py")
_OUTPUT_DEADLINE = 2.0
"""Seconds to read what is left of the output of a process that ended; a stray child of it may keep the pipe open."""


class Process:
    """A program in a process group of its own, killed by the kernel if this process dies.

    Start it from a thread that lives as long as it does (the main thread): its end is tied to that thread.

    Args:
        name: What messages call it.
        command: Program and arguments.
        env: The whole environment.
        line: Called with each line of its output, from a thread; None: it writes where this process does.
        ended: Called once with this process when it has ended and its output is read, from a thread.
        cwd: Its working directory.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        line: Callable[[str], None] | None,
        ended: Callable[["Process"], None],
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self._line = line
        self._ended = ended
        self._done = threading.Event()
        environment = dict(env) if line is None else {"PYTHONUNBUFFERED": "1", **env}
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_TIED), str(os.getpid()), *command],
            env=environment,
            cwd=cwd,
            stdin=None if line is None else subprocess.DEVNULL,
            stdout=None if line is None else subprocess.PIPE,
            stderr=None if line is None else subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._watch, name=f"watch {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id, also that of its group."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended, or its last output is not read yet."""
        return not self._done.is_set()

    @property
    def code(self) -> int:
        """The exit code, or minus the signal that ended it."""
        code = self._popen.poll()
        if code is None:
            raise RuntimeError(f"{self.name} is still running")
        return code

    def how(self) -> str:
        """Return how it ended, for a message."""
        return f"ended with exit code {self.code}" if self.code >= 0 else f"was killed by {signal_name(-self.code)}"

    def signal(self, number: int) -> None:
        """Send a signal to its group."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def _watch(self) -> None:
        reader = None
        if self._popen.stdout is not None and self._line is not None:
            reader = threading.Thread(
                target=_read, args=(self._popen.stdout, self._line), name=f"output of {self.name}", daemon=True
            )
            reader.start()
        self._popen.wait()
        self.signal(signal.SIGKILL)  # what it left behind in its group
        if reader is not None:
            reader.join(_OUTPUT_DEADLINE)
        self._done.set()
        self._ended(self)


def _read(stream: IO[bytes], write: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            # No place to write it (a full disk, a closed pipe) is no reason to let the program wait or fail for it.
            with contextlib.suppress(OSError, ValueError):
                write(line.decode(errors="replace").rstrip("\r\n"))


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
