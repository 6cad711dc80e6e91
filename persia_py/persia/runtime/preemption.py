"""Handles SIGTERM, Ctrl-C and spot notices: all ranks leave after the same step, and the run is saved.

In a training loop the signal is recorded, and the loop ends after the step. Everywhere else it ends the context
immediately, with ``SystemExit``. The context saves the run at its exit (:class:`persia.ctx.TrainCtx`).
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from persia.runtime.exit_codes import ExitCode

STEP_S = 10.0
"""Seconds that an evaluation in the middle of a step may continue, to complete the step."""


class _State:
    """The state of this process, and whether it was asked to stop."""

    asked_at: float | None = None
    code = ExitCode.AGAIN
    """The exit code with which this process leaves."""
    because = ""
    """The reason for stopping, if it is not a signal from outside."""
    interrupted = False
    """Whether Ctrl-C was pressed."""
    saves = False
    """Whether the process is in a context that saves its run."""
    loops = False
    trained = False
    """Whether the context that saves its run has completed a step."""
    in_step = False
    waits_for_data = False
    leaving = False


_state = _State()


def request_stop(code: ExitCode = ExitCode.AGAIN) -> bool:
    """Record that SIGTERM or Ctrl-C was sent to this process.

    Args:
        code: The exit code of this signal.

    Returns:
        Whether the process will leave by itself soon; if not, the caller raises ``SystemExit(code)``.
    """
    if _state.leaving:
        return True
    if _state.asked_at is None:
        _state.code = code
    note_remote_stop()
    return _state.loops and _state.trained and not _state.waits_for_data


def note_remote_stop(*, gone: bool = False) -> None:
    """Record that this rank must stop because another rank was asked to.

    ``gone`` means that the other rank has left its step. This rank then does not get STEP_S to finish its own step.
    """
    if _state.saves and (gone or _state.asked_at is None):
        _state.asked_at = -math.inf if gone else time.monotonic()


def stop_asked() -> bool:
    """Whether this process must leave the context that saves its run."""
    return _state.asked_at is not None


def exit_code() -> ExitCode:
    """Return the exit code of this process, if it was asked to stop."""
    return _state.code


def stop_this_process(because: str) -> bool:
    """Ask this process to stop, from any thread, like SIGTERM from outside.

    Args:
        because: The reason, for the log.

    Returns:
        Whether the process will leave. If not, no context saves its run yet, and the caller must ask again later.
    """
    _state.because = because
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN, None):
        request_stop()  # without a handler, the signal would end the process without a checkpoint
        return stop_asked()
    os.kill(os.getpid(), signal.SIGTERM)
    return True


def reason() -> str:
    """Return the signal or notice that asked this process to stop; SIGTERM if another rank was asked."""
    if _state.because:
        return _state.because
    return "Ctrl-C" if _state.code is ExitCode.INTERRUPTED else "SIGTERM"


def exit_if_requested() -> None:
    """Exit if a stop was requested, unless a step is in progress and the request is less than STEP_S old.

    Raises:
        SystemExit: A stop was requested.
    """
    asked_at = _state.asked_at
    if asked_at is None or _state.leaving or (_state.in_step and time.monotonic() - asked_at < STEP_S):
        return
    raise SystemExit(_state.code)


@contextlib.contextmanager
def saving_run() -> Iterator[None]:
    """Enclose a context that saves its run."""
    outer = _state.saves, _state.trained
    _state.saves, _state.trained = True, False
    try:
        with _own_handlers():
            yield
    finally:
        _state.saves, _state.trained = outer
        _state.asked_at, _state.code, _state.interrupted, _state.because = None, ExitCode.AGAIN, False, ""


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Handle the signals that have Python's default handler, in the main thread.

    Ranks of a launcher have their own handlers.
    """
    handlers: dict[signal.Signals, tuple[Any, Callable[..., None]]] = {
        signal.SIGTERM: (signal.SIG_DFL, _terminated),
        signal.SIGINT: (signal.default_int_handler, _interrupted),
    }
    main = threading.current_thread() is threading.main_thread()
    owned = [number for number, (default, _) in handlers.items() if main and signal.getsignal(number) is default]
    for number in owned:
        signal.signal(number, handlers[number][1])
    try:
        yield
    finally:
        for number in owned:
            signal.signal(number, handlers[number][0])


def _terminated(*_: object) -> None:
    if not request_stop():
        raise SystemExit(ExitCode.AGAIN)


def _interrupted(*_: object) -> None:
    """Save the run and leave; the second time, end immediately."""
    if _state.interrupted:
        os.write(2, b"Ctrl-C again: ending without saving the run\n")
        os._exit(ExitCode.INTERRUPTED)
    _state.interrupted = True
    continues = request_stop(ExitCode.INTERRUPTED)
    saving = "saving the run after this step" if continues and not _state.leaving else "saving the run"
    if not _state.trained:
        saving = "ending; no step has been trained since the start, so there is nothing to save"
    os.write(2, f"Ctrl-C: {saving}; press Ctrl-C again to end immediately\n".encode())
    if not continues:
        raise SystemExit(ExitCode.INTERRUPTED)


def begin_loop() -> None:
    """Record that a training loop is running. After the first step, a signal is only recorded."""
    _state.loops = True


def end_loop() -> None:
    """Record that the training loop has ended, so that a signal acts immediately again."""
    _state.loops = _state.in_step = False


def set_in_step(in_step: bool) -> None:
    """Record whether the script has a batch to train on."""
    _state.in_step = in_step


def step_done() -> None:
    """Record that a step is complete and can be saved."""
    _state.trained, _state.in_step = True, False


def has_trained() -> bool:
    """Whether the context that saves its run has completed a step."""
    return _state.trained


@contextlib.contextmanager
def waiting_for_data() -> Iterator[None]:
    """Enclose a wait without time limit between two steps, which a signal may interrupt.

    Raises:
        SystemExit: This process was asked to stop before or during the wait.
    """
    exit_if_requested()
    _state.waits_for_data = True
    try:
        yield
    finally:
        _state.waits_for_data = False


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Enclose the work on exit, during which another SIGTERM has no effect."""
    outer, _state.leaving = _state.leaving, True
    try:
        yield
    finally:
        _state.leaving = outer
