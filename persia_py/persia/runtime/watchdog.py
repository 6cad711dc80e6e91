"""If a training loop makes no progress, every rank prints the stacks of its threads, and exits with 70.

Progress is a step, a look-up, an evaluated batch. A wait without limit (for data, other ranks, or the files of a
checkpoint) is never a hang. The time in which a debugger holds a rank does not count.
"""

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable, Iterator

from persia.runtime import clock
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import settings

_HINT = (
    "the threads below show where it is; PERSIA_HANG_TIMEOUT is how many seconds a step of a training loop may "
    "take, and 0 is without limit"
)
_LAST_S = 10.0
"""Seconds that the report may take: a pipe or a connection without a reader must not keep the process."""
_ERRORS = 2
"""Standard error itself: ``sys.stderr`` may have no file, or a lock that a hanging thread holds."""


class _State:
    last = 0.0
    waits = 0
    collectives = 0
    ending = threading.Lock()
    """Held from the first :func:`end` on."""


_state = _State()


def progress() -> None:
    """Record progress of the training loop."""
    _state.last = clock.now()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Enclose a wait without limit."""
    _state.waits += 1
    try:
        yield
    finally:
        progress()
        _state.waits -= 1


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """Enclose a collective of torch. It gets twice the time, so that the rank that blocks the others reports first."""
    _state.collectives += 1
    try:
        yield
    finally:
        progress()
        _state.collectives -= 1


def stalled(timeout_s: float) -> float | None:
    """Return the seconds without progress if they exceed ``timeout_s``, or twice that in a collective.

    None otherwise, and in a wait without limit.
    """
    silent = clock.now() - _state.last
    limit = timeout_s * (2 if _state.collectives else 1)
    return silent if silent > limit and not _state.waits else None


def end(reason: str, report: Callable[[str], None]) -> None:
    """Print the stacks of all threads, and end this process from outside its main thread, even if a part of this fails.

    A second call, in another thread, returns immediately: the report of this rank comes back to it from the others.

    Args:
        reason: The reason for the end.
        report: Sends the reason to the other ranks.
    """
    if not _state.ending.acquire(blocking=False):
        return
    limit = threading.Timer(_LAST_S, os._exit, [int(ExitCode.HUNG)])
    limit.daemon = True
    limit.start()
    try:
        try:
            report(reason)
        except Exception as error:
            reason += f"; the other ranks do not know: {type(error).__name__}: {error}"
        os.write(_ERRORS, f"error: {reason}\nnext:  {_HINT}\nthreads of rank {settings.rank}:\n".encode())
        faulthandler.dump_traceback(_ERRORS, all_threads=True)
    finally:
        os._exit(ExitCode.HUNG)
