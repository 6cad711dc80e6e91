"""Waiting for what happens to several processes, and for signals to this one."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType

from persia.launch.process import Process

GRACE = 20.0
"""Seconds a process has between SIGTERM and SIGKILL."""
SAVING_GRACE = 45.0
"""As ``GRACE``, for a trainer, which may save its run meanwhile."""
ONE_SIGNAL = 2.0
"""Seconds in which two signals count as one: some senders signal a launcher and its ranks, a process and its group."""


class Events:
    """What happened, in order: processes that ended, and numbers of signals this process was sent."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Process | int] = SimpleQueue()

    def ended(self, process: Process) -> None:
        """Note that a process ended."""
        self._queue.put(process)

    def next(self, timeout: float | None = None) -> "Process | int | None":
        """Wait for the next event; None after ``timeout`` seconds without one."""
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None

    @contextmanager
    def signals(self, numbers: Iterable[int] = (signal.SIGTERM, signal.SIGINT)) -> Iterator[None]:
        """Turn these signals into events inside the block. Only in the main thread."""

        def note(number: int, frame: FrameType | None) -> None:
            del frame
            self._queue.put(number)

        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def stop(
    processes: Iterable[Process],
    events: Events,
    *,
    grace: float = GRACE,
    say: Callable[[str], None],
) -> None:
    """End processes together: SIGTERM, ``grace`` seconds, SIGKILL.

    Returns when all have ended. Their ends are taken from ``events``; another signal to us cuts the grace short.
    """
    began = time.monotonic()
    left = {process for process in processes if process.running}
    for process in left:
        process.signal(signal.SIGTERM)
    deadline = began + grace
    while left:
        event = events.next(max(0.0, deadline - time.monotonic()))
        if isinstance(event, Process):
            left.discard(event)
        left = {process for process in left if process.running}
        impatient = isinstance(event, int) and time.monotonic() > began + ONE_SIGNAL
        if left and (impatient or time.monotonic() >= deadline):
            say(f"killing {', '.join(sorted(process.name for process in left))}: still running after SIGTERM")
            for process in left:
                process.signal(signal.SIGKILL)
            deadline = time.monotonic() + grace
