"""The terminal of the debugger: during a prompt, descriptors 0 and 1 are the terminal, even if they are redirected.

Python's line editing, with arrow keys and history, requires these two descriptors.
"""

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "PERSIA_DEBUG_TTY"
"""The variable in which the launcher passes the path of its terminal to its ranks, which lead their own sessions."""


def find() -> int | None:
    """Return a descriptor of the terminal of this process; None if it has no terminal.

    A process that its shell runs in the background counts as one without a terminal, because reading from the terminal
    would stop it.
    """
    for path in (os.environ.get(VARIABLE), "/dev/tty"):
        if path:
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY)
                if _usable(descriptor):
                    return descriptor
                os.close(descriptor)
    return os.dup(0) if _usable(0) else None


def _usable(descriptor: int) -> bool:
    if not os.isatty(descriptor):
        return False
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # reading from a terminal of another session does not stop a process
        return True


class Terminal:
    """The terminal, which one rank uses at a time.

    Args:
        descriptor: A descriptor of the terminal, which this object owns.
        lock: The file that a rank locks while it uses the terminal.
    """

    def __init__(self, descriptor: int, lock: Path) -> None:
        self._descriptor = descriptor
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Let another rank use the terminal."""
        os.close(self._lock)
        os.close(self._descriptor)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Connect standard input and output to the terminal inside the block."""
        before = sys.stdin, sys.stdout
        sys.stdout.flush()
        saved = [os.dup(number) for number in (0, 1)]
        os.dup2(self._descriptor, 0)
        os.dup2(self._descriptor, 1)
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115  # closed below
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the terminal was closed
                sys.stdout.flush()
            sys.stdin, sys.stdout = before
            for number, descriptor in enumerate(saved):
                os.dup2(descriptor, number)
                os.close(descriptor)
