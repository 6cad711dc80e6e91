"""One child process: its output, its process group, its end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")
_OUTPUT_DEADLINE = 2.0
"""Seconds to read the remaining output of an ended process. A child of the process may keep the pipe open."""
_LAST_LINES = 5


class Process:
    """A program in its own process group, which the kernel kills if this process dies.

    The kernel ties the program to the thread that starts it, so start it from the main thread.

    Args:
        name: The name of the process in messages.
        command: The program and its arguments.
        env: The complete environment.
        line: Called from a thread with each line of output. None sends the output to that of this process.
        ended: Called once from a thread, after the process has ended and its output has been read.
        cwd: The working directory of the program.

    Attributes:
        last_lines: The last lines of output, for a message; empty if ``line`` is None.
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
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._ended = ended
        self._done = threading.Event()
        environment = dict(env) if line is None else {"PYTHONUNBUFFERED": "1", **env}
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_DIE_WITH_PARENT), str(os.getpid()), *command],
            env=environment,
            cwd=cwd,
            stdin=None if line is None else subprocess.DEVNULL,
            stdout=None if line is None else subprocess.PIPE,
            stderr=None if line is None else subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._wait, name=f"wait for {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the process is running, or its output has not been fully read."""
        return not self._done.is_set()

    @property
    def code(self) -> int:
        """The exit code, or minus the number of the signal that killed the process."""
        code = self._popen.poll()
        if code is None:
            raise RuntimeError(f"{self.name} is still running")
        return code

    def outcome(self) -> str:
        """Return how the process ended, for a message."""
        return f"ended with exit code {self.code}" if self.code >= 0 else f"was killed by {signal_name(-self.code)}"

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def _write(self, line: str) -> None:
        self.last_lines.append(line)
        if self._line is not None:
            self._line(line)

    def _wait(self) -> None:
        reader = None
        if self._popen.stdout is not None and self._line is not None:
            reader = threading.Thread(
                target=_read, args=(self._popen.stdout, self._write), name=f"output of {self.name}", daemon=True
            )
            reader.start()
        self._popen.wait()
        self.signal(signal.SIGKILL)  # kills child processes that remain in the group
        if reader is not None:
            reader.join(_OUTPUT_DEADLINE)
        self._done.set()
        self._ended(self)


def _read(stream: IO[bytes], write: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            # A full disk or a closed pipe of this process must neither block nor end the program.
            with contextlib.suppress(OSError, ValueError):
                write(line.decode(errors="replace").rstrip("\r\n"))


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run_command(cmd: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run ``cmd`` until it ends, with ``env`` added to the environment of this process.

    Raises:
        subprocess.CalledProcessError: The exit status is not 0.
    """
    return subprocess.run([str(part) for part in cmd], env={**os.environ, **(env or {})}, check=True)
