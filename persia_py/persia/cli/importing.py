"""Imports that take seconds, and may be interrupted."""

import contextlib
import os
import signal
from collections.abc import Iterator

from persia.runtime.exit_codes import ExitCode


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Enclose imports of large libraries: Ctrl-C and SIGTERM end the process at once.

    An exception in the middle of an import is changed by the libraries: it would be a long traceback of theirs. There
    is nothing to save or to close yet.
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
