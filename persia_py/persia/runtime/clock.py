"""The clock of time limits. It stands still while a debugger holds a rank of the run.

Every limit on the wait of one rank for another is measured by :func:`now`: a person may think at a breakpoint for as
long as they want, and no rank ends.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from persia.runtime.errors import WaitTimeoutError

Result = TypeVar("Result")


class _State:
    lock = threading.Lock()
    holders: frozenset[str] = frozenset()
    since = 0.0
    """When the clock was stopped last."""
    stood = 0.0
    """Seconds that it has stood still."""


_state = _State()


def now() -> float:
    """Return seconds of a monotonic clock, without those in which a debugger held a rank."""
    with _state.lock:
        return (_state.since if _state.holders else time.monotonic()) - _state.stood


def stop(holder: str) -> None:
    """Stop the clock for ``holder``, until :func:`go`."""
    with _state.lock:
        if not _state.holders:
            _state.since = time.monotonic()
        _state.holders |= {holder}


def go(holder: str) -> None:
    """Let the clock run, unless another holder has stopped it as well."""
    with _state.lock:
        if _state.holders == {holder}:
            _state.stood += time.monotonic() - _state.since
        _state.holders -= {holder}


def patiently(wait: Callable[[], Result], limit_s: float) -> Result:
    """Return the result of ``wait``, which is called again if its time ran out only because the clock stood still.

    Args:
        wait: Raises WaitTimeoutError after ``limit_s`` seconds.
        limit_s: Its limit.

    Raises:
        WaitTimeoutError: The time of this clock ran out, too, or the error came before that time.
    """
    while True:
        began, counted = time.monotonic(), now()
        try:
            return wait()
        except WaitTimeoutError:
            if time.monotonic() - began < limit_s or now() - counted >= limit_s:
                raise
