"""The hook that ends a training loop which makes no progress."""

import os
import threading
from collections.abc import Callable

from persia.loop.hooks import Loop
from persia.runtime import watchdog
from persia.runtime.settings import settings

_SLICES = 20
"""The number of checks during the time that a loop may make no progress."""


class Watchdog:
    """Ends this process if a training loop makes no progress for ``PERSIA_HANG_TIMEOUT`` seconds. A hook of the loop.

    Args:
        report: Sends the reason to the other ranks.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._timeout_s = settings.hang_timeout
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, loop: Loop) -> None:
        """Start watching."""
        watchdog.progress()
        if self._timeout_s:
            self._thread = threading.Thread(target=self._watch, args=(loop,), name="persia-watchdog", daemon=True)
            self._thread.start()

    def before_step(self) -> None:
        """Note the progress."""
        watchdog.progress()

    def on_end(self, complete: bool) -> None:
        """Stop watching."""
        del complete
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, loop: Loop) -> None:
        while not self._ended.wait(self._timeout_s / _SLICES):
            if (silent := watchdog.stalled(self._timeout_s)) is not None:
                reason = (
                    f"rank {settings.rank} (pid {os.getpid()}) has made no progress after step {loop.step} for "
                    f"{silent:.0f} s (PERSIA_HANG_TIMEOUT={self._timeout_s:g})"
                )
                watchdog.end(reason, self._report)
