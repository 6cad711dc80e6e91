"""Handles signals that end a process: its temporary files and containers are removed first."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from persia.runtime.exit_codes import AGAIN


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit inside the block, so that enclosing blocks clean up.

    Signals that have a handler or are ignored are not changed. Outside the main thread, no signal is changed.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise SystemExit(AGAIN)
