"""A training loop that makes no progress: every rank shows what each of its threads is at, and ends with exit code 70.

Progress is a step, a look-up, an evaluated batch. What a rank waits for on purpose (data, other ranks, files of a save)
is no hang, however long it takes.
"""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator

from persia.runtime import settings

HUNG = 70
"""Exit code of a rank that makes no progress, and of all others with it."""
_HINT = (
    "the threads below show where it stands; PERSIA_HANG_TIMEOUT is how many seconds a step of a training loop may "
    "take, and 0 is without limit"
)
_SLICES = 20
"""Looks during the time that a loop may make no progress."""
_LAST_S = 10.0
"""Seconds that telling and showing may take: a pipe or a connection that nobody reads must not keep the process."""
_ERRORS = 2
"""Standard error itself; what stands in ``sys.stderr`` may have no file, or a lock that a hanging thread holds."""


class _State:
    last = 0.0
    waits = 0
    collectives = 0


_state = _State()


def progress() -> None:
    """Note that the training loop goes on."""
    _state.last = time.monotonic()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Around a wait without limit."""
    _state.waits += 1
    try:
        yield
    finally:
        progress()
        _state.waits -= 1


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """Around what torch does on all ranks together: the rank that is waited for shall be the first to be named."""
    _state.collectives += 1
    try:
        yield
    finally:
        progress()
        _state.collectives -= 1


@contextlib.contextmanager
def watching(step: Callable[[], int], tell: Callable[[str], None]) -> Iterator[None]:
    """Around a training loop: end this process if there is no progress for ``PERSIA_HANG_TIMEOUT`` seconds.

    Args:
        step: Returns the last step that was trained.
        tell: Lets the other ranks know why.
    """
    timeout_s = settings.hang_timeout()
    if timeout_s == 0:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(timeout_s / _SLICES):
            silent = time.monotonic() - _state.last
            if silent > timeout_s * (2 if _state.collectives else 1) and not _state.waits:
                reason = (
                    f"rank {settings.get_rank()} (pid {os.getpid()}) makes no progress behind step {step()} since "
                    f"{silent:.0f} s (PERSIA_HANG_TIMEOUT={timeout_s:g})"
                )
                end(reason, tell)

    progress()
    watcher = threading.Thread(target=watch, name="persia-watchdog", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def end(reason: str, tell: Callable[[str], None]) -> None:
    """Show the stacks of all threads of this process, and end it from outside its main thread, whatever fails.

    Args:
        reason: Why.
        tell: Lets the other ranks know.
    """
    limit = threading.Timer(_LAST_S, os._exit, [HUNG])
    limit.daemon = True
    limit.start()
    try:
        try:
            tell(reason)
        except Exception as error:
            reason += f"; the other ranks were not told: {type(error).__name__}: {error}"
        os.write(_ERRORS, f"error: {reason}\nnext:  {_HINT}\nthreads of rank {settings.get_rank()}:\n".encode())
        faulthandler.dump_traceback(_ERRORS, all_threads=True)
    finally:
        os._exit(HUNG)
