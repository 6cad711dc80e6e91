"""Allows interrupting long operations at the start: imports of large libraries, loading a bundle."""

import contextlib
import os
import signal
from collections.abc import Iterator

from persia.runtime.exit_codes import ExitCode


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process immediately. Use this only while nothing must be saved or closed.

    Libraries would change an exception that is raised during an import, and show it as a long traceback. Only the main
    thread can enter this block. A handler runs only while that thread executes Python or waits, so call native code
    that takes seconds in another thread.
    """
    codes = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.AGAIN}
    before = {number: signal.signal(number, lambda which, _: _leave(which, codes)) for number in codes}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, codes: dict[signal.Signals, ExitCode]) -> None:
    which = signal.Signals(number)
    os.write(2, f"{'Ctrl-C' if which is signal.SIGINT else which.name}: ending; nothing has begun\n".encode())
    os._exit(codes[which])
