"""SIGTERM in a training loop that saves its run: the loop ends behind the step it is at, on all ranks."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class _State:
    """What this process is at, and whether it was asked to stop."""

    stoppable = False
    stop_asked = False
    waits_for_data = False


_state = _State()


class StopAsked(BaseException):
    """SIGTERM came while a training loop waited for data."""


def ask_to_stop() -> bool:
    """Note that this process was sent SIGTERM; its training loop saves the run after the current step and leaves.

    Returns:
        Whether a loop that can do so is going on; where there is none, the caller ends the process.

    Raises:
        StopAsked: The loop waits for data; it goes on behind the wait.
    """
    if not _state.stoppable:
        return False
    _state.stop_asked = True
    if _state.waits_for_data:
        raise StopAsked
    return True


def stop_asked() -> bool:
    """Whether :func:`ask_to_stop` was called, and a loop is going on that can do so.

    A loop that was left meanwhile leaves it to the next one.
    """
    return _state.stoppable and _state.stop_asked


def stopped() -> None:
    """Note that what :func:`ask_to_stop` asked for is done."""
    _state.stop_asked = False


@contextlib.contextmanager
def stoppable(active: bool) -> Iterator[None]:
    """Around a training loop: SIGTERM inside it lets the loop end where the run can be saved, if it is ``active``."""
    if not active:
        yield
        return
    main = threading.current_thread() is threading.main_thread()
    own = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # not where a launcher's rank has its own
    if own:
        signal.signal(signal.SIGTERM, lambda *_: ask_to_stop())
    _state.stoppable = True
    try:
        yield
    finally:
        _state.stoppable = False
        if own:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def waiting_for_data() -> Iterator[None]:
    """Around a wait without limit inside a loop that is :func:`stoppable`.

    Raises:
        StopAsked: SIGTERM has come, or comes.
    """
    _state.waits_for_data = True
    try:
        if stop_asked():
            raise StopAsked
        yield
    finally:
        _state.waits_for_data = False
