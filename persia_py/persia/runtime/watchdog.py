"""Ends a training loop that makes no progress: every rank prints its position and its stacks, and exits with 70.

Progress is a step, a look-up or an evaluated batch. A wait without limit (for other ranks, or the files of a
checkpoint) is never a hang. A wait for data counts as a hang only after ``PERSIA_DATA_TIMEOUT`` seconds, if this
variable is set. The time in which a debugger holds a rank does not count.
"""

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable, Iterator

from persia.runtime import clock, flight
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import settings

_HINT = (
    "the stacks below show where each thread is; PERSIA_HANG_TIMEOUT limits a step of a training loop, "
    "PERSIA_DATA_TIMEOUT the wait for a batch, in seconds; 0 means no limit"
)
_LAST_S = 15.0
"""Seconds that the report may take, because a pipe or a connection without a reader must not block the exit."""
_ERRORS = 2
"""The descriptor of standard error, because ``sys.stderr`` may have no file, or a lock that a hanging thread holds."""


class _State:
    last = 0.0
    waits = 0
    data_waits = 0
    collectives = 0
    ending = threading.Lock()
    """A lock that is held from the first :func:`end` on."""


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
def waiting_for_data() -> Iterator[None]:
    """Enclose a wait for a batch, which may take ``PERSIA_DATA_TIMEOUT`` seconds."""
    progress()
    _state.data_waits += 1
    try:
        with waiting():
            yield
    finally:
        _state.data_waits -= 1


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """Enclose a collective of torch. Its limit is doubled, because the rank that blocks others must report first."""
    _state.collectives += 1
    try:
        yield
    finally:
        progress()
        _state.collectives -= 1


def stalled(timeout_s: float, data_timeout_s: float = 0.0) -> tuple[float, str] | None:
    """Return the seconds without progress, and the limit that they exceed; None if they exceed none.

    Args:
        timeout_s: The limit of a step, doubled in a collective; 0 means no limit. The limit does not apply during a
            wait.
        data_timeout_s: The limit of a wait for data; 0 means no limit.
    """
    silent = clock.now() - _state.last
    if _state.waits:
        waits_for_data = _state.waits == _state.data_waits
        over = waits_for_data and 0 < data_timeout_s < silent
        return (silent, f"PERSIA_DATA_TIMEOUT={data_timeout_s:g}") if over else None
    limit, shown = timeout_s, f"PERSIA_HANG_TIMEOUT={timeout_s:g}"
    if _state.collectives:
        limit *= 2
        shown += f", doubled in a collective: {limit:g} s"
    return (silent, shown) if 0 < limit < silent else None


def end(reason: str, report: Callable[[str], None], verdict: Callable[[], str] = str) -> None:
    """Print the stacks of all threads, and end this process from another thread, even if one of these actions fails.

    A second call in another thread returns immediately. Such a call occurs because the other ranks send the report of
    this rank back to this rank.

    Args:
        reason: The reason for the end.
        report: Sends the reason to the other ranks.
        verdict: Returns which rank lags, and where each one is; it may wait for the other ranks.
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
            reason += f"; the other ranks could not be notified: {type(error).__name__}: {error}"
        os.write(_ERRORS, f"error: {reason}\nnext:  {_HINT}\nthreads of rank {settings.rank}:\n".encode())
        faulthandler.dump_traceback(_ERRORS, all_threads=True)
        os.write(_ERRORS, f"{flight.keep(reason)}\n".encode())
        if text := verdict():
            os.write(_ERRORS, f"{text}\n".encode())
    finally:
        os._exit(ExitCode.HUNG)
