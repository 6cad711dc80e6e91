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
    elsewhere: frozenset[str] = frozenset()
    """The holders that stand for another rank, which is held itself."""
    observers: tuple[Callable[[bool], None], ...] = ()
    since = 0.0
    """When the clock was stopped last."""
    stood = 0.0
    """Seconds that it has stood still."""


_state = _State()


def now() -> float:
    """Return seconds of a monotonic clock, without those in which a debugger held a rank."""
    with _state.lock:
        return (_state.since if _state.holders else time.monotonic()) - _state.stood


def stop(holder: str, *, elsewhere: bool = False) -> None:
    """Stop the clock for ``holder``, until :func:`go`; ``elsewhere`` if it holds another rank than this one."""
    with _state.lock:
        before = is_held_here()
        if not _state.holders:
            _state.since = time.monotonic()
        _state.holders |= {holder}
        _state.elsewhere |= {holder} if elsewhere else set()
        changed = is_held_here() != before
    _tell(changed)


def go(holder: str) -> None:
    """Let the clock run, unless another holder has stopped it as well."""
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
    """Call ``observer`` with :func:`is_held_here` whenever that changes, in the thread that changes it."""
    _state.observers = (*_state.observers, observer)


def unobserve(observer: Callable[[bool], None]) -> None:
    """Call it no more."""
    _state.observers = tuple(each for each in _state.observers if each != observer)


def _tell(changed: bool) -> None:
    for observer in _state.observers if changed else ():
        observer(is_held_here())


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
