"""A hook that ends a training loop without progress, and reports each step to the flight recorder."""

import os
import threading
from collections.abc import Callable

from persia.loop.hooks import Loop
from persia.runtime import flight, watchdog
from persia.runtime.settings import settings

_SLICES = 20
"""The number of checks within the time that a loop may spend without progress."""


class Watchdog:
    """A hook that ends this process if the training loop makes no progress for ``PERSIA_HANG_TIMEOUT`` seconds.

    A wait for data has its own limit, ``PERSIA_DATA_TIMEOUT``.

    Args:
        report: Sends the reason to the other ranks.
        verdict: Returns which rank lags, and where each one is.
    """

    def __init__(self, report: Callable[[str], None], verdict: Callable[[], str] = str) -> None:
        self._report, self._verdict = report, verdict
        self._timeout_s, self._data_timeout_s = settings.hang_timeout, settings.data_timeout
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, loop: Loop) -> None:
        """Start watching."""
        flight.begin_loop(loop.step)
        watchdog.progress()
        if self._timeout_s or self._data_timeout_s:
            self._thread = threading.Thread(target=self._watch, args=(loop,), name="persia-watchdog", daemon=True)
            self._thread.start()

    def before_step(self) -> None:
        """Record progress."""
        watchdog.progress()

    def after_step(self, step: int) -> None:
        """Report the step to the flight recorder."""
        flight.stepped(step)

    def on_end(self, complete: bool) -> None:
        """Stop watching."""
        del complete
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, loop: Loop) -> None:
        least = min(limit for limit in (self._timeout_s, self._data_timeout_s) if limit)
        while not self._ended.wait(least / _SLICES):
            if (stalled := watchdog.stalled(self._timeout_s, self._data_timeout_s)) is not None:
                silent, limit = stalled
                reason = (
                    f"rank {settings.rank} (pid {os.getpid()}) has made no progress after step {loop.step} for "
                    f"{silent:.0f} s ({limit})"
                )
                watchdog.end(reason, self._report, self._verdict)
