"""SIGTERM in a run that saves itself: it leaves where it can be saved, on all ranks behind one step.

In a training loop the signal is noted, and the loop ends behind the step. Everywhere else it ends the context at once,
by ``SystemExit``. The context saves the run on its way out (:class:`persia.ctx.TrainCtx`).
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator

AGAIN = 75
"""Exit code: this attempt is over, start again."""
STEP_S = 10.0
"""Seconds that an evaluation in the middle of a step may go on, so that the step comes to its end."""


class _State:
    """What this process is at, and whether it was asked to stop."""

    asked_at: float | None = None
    saves = False
    """It is in a context that saves its run."""
    loops = False
    trained = False
    """That context has done a step."""
    in_step = False
    waits_for_data = False
    leaving = False


_state = _State()


def ask_to_stop() -> bool:
    """Note that this process was sent SIGTERM.

    Returns:
        Whether it leaves by itself, soon; where it does not, the caller raises ``SystemExit(AGAIN)``.
    """
    if _state.leaving:
        return True
    hear()
    return _state.loops and _state.trained and not _state.waits_for_data


def hear(*, gone: bool = False) -> None:
    """Note that another rank was sent SIGTERM, or is ``gone`` from the step it was in; nothing is interrupted here."""
    if _state.saves and (gone or _state.asked_at is None):
        _state.asked_at = -math.inf if gone else time.monotonic()


def stop_asked() -> bool:
    """Whether this process is to leave the context that saves its run."""
    return _state.asked_at is not None


def leave_if_asked() -> None:
    """Leave, where that may be.

    Raises:
        SystemExit: This process was asked to stop, and is between two steps, or in the middle of one that takes long.
    """
    asked_at = _state.asked_at
    if asked_at is None or _state.leaving or (_state.in_step and time.monotonic() - asked_at < STEP_S):
        return
    raise SystemExit(AGAIN)


@contextlib.contextmanager
def saving_run() -> Iterator[None]:
    """Around a context that saves its run."""
    main = threading.current_thread() is threading.main_thread()
    own = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # not where a launcher's rank has its own
    if own:
        signal.signal(signal.SIGTERM, _heard)
    outer = _state.saves, _state.trained
    _state.saves, _state.trained = True, False
    try:
        yield
    finally:
        _state.saves, _state.trained = outer
        _state.asked_at = None
        if own:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _heard(*_: object) -> None:
    if not ask_to_stop():
        raise SystemExit(AGAIN)


@contextlib.contextmanager
def stoppable(active: bool) -> Iterator[None]:
    """Around a training loop: once a step is done, SIGTERM is only noted inside it, if it is ``active``."""
    _state.loops = active
    try:
        yield
    finally:
        _state.loops = _state.in_step = False


def begin_step() -> None:
    """Note that a batch is handed out for training."""
    _state.in_step = True


def end_step() -> None:
    """Note that it was trained on, or will not be."""
    _state.in_step = False


def trained() -> None:
    """Note that a step is done: there is something to save."""
    _state.trained, _state.in_step = True, False


def has_trained() -> bool:
    """Whether the context that saves its run has done a step."""
    return _state.trained


@contextlib.contextmanager
def waiting_for_data() -> Iterator[None]:
    """Around a wait without limit between two steps.

    Raises:
        SystemExit: This process was asked to stop, or is meanwhile.
    """
    leave_if_asked()
    _state.waits_for_data = True
    try:
        yield
    finally:
        _state.waits_for_data = False


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Around what is done on the way out: the signal that asks for it once more changes nothing."""
    outer, _state.leaving = _state.leaving, True
    try:
        yield
    finally:
        _state.leaving = outer
