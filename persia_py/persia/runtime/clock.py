"""The clock for time limits, which stops while a debugger holds a rank of the run.

The limits on the wait of one rank for another are measured by :func:`now`. Therefore no rank ends while a user stays at
a breakpoint. The exception is torch's own limit of a collective, which is one day and does not stop.
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
    elsewhere: frozenset[str] = frozenset()
    """The holders that stop the clock because a debugger holds another rank."""
    observers: tuple[Callable[[bool], None], ...] = ()
    since = 0.0
    """The time at which the clock was last stopped."""
    stood = 0.0
    """The number of seconds for which the clock has been stopped."""


_state = _State()


def now() -> float:
    """Return the seconds of a monotonic clock, without the time in which a debugger held a rank."""
    with _state.lock:
        return (_state.since if _state.holders else time.monotonic()) - _state.stood


def stop(holder: str, *, elsewhere: bool = False) -> None:
    """Stop the clock for ``holder``, until :func:`go`; ``elsewhere`` means that another rank is held."""
    with _state.lock:
        before = is_held_here()
        if not _state.holders:
            _state.since = time.monotonic()
        _state.holders |= {holder}
        _state.elsewhere |= {holder} if elsewhere else set()
        changed = is_held_here() != before
    _tell(changed)


def go(holder: str) -> None:
    """Let the clock run again, unless another holder has also stopped it."""
    with _state.lock:
        before = is_held_here()
        if _state.holders == {holder}:
            _state.stood += time.monotonic() - _state.since
        _state.holders -= {holder}
        _state.elsewhere -= {holder}
        changed = is_held_here() != before
    _tell(changed)


def is_held_here() -> bool:
    """Whether a debugger holds this rank itself."""
    return bool(_state.holders - _state.elsewhere)


def observe(observer: Callable[[bool], None]) -> None:
    """Call ``observer`` with :func:`is_held_here` whenever its value changes, in the thread that changes it."""
    _state.observers = (*_state.observers, observer)


def unobserve(observer: Callable[[bool], None]) -> None:
    """Stop calling ``observer``."""
    _state.observers = tuple(each for each in _state.observers if each != observer)


def _tell(changed: bool) -> None:
    for observer in _state.observers if changed else ():
        observer(is_held_here())


def patiently(wait: Callable[[], Result], limit_s: float) -> Result:
    """Return the result of ``wait``. Call it again if its time ran out only because the clock was stopped.

    Args:
        wait: Raises WaitTimeoutError after ``limit_s`` seconds.
        limit_s: The time limit of ``wait``.

    Raises:
        WaitTimeoutError: The limit has also passed on this clock, or the error occurred before the limit.
    """
    while True:
        began, counted = time.monotonic(), now()
        try:
            return wait()
        except WaitTimeoutError:
            if time.monotonic() - began < limit_s or now() - counted >= limit_s:
                raise
