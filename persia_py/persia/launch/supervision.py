"""Supervises several processes: waits for their ends and for signals, and stops them together."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType

from persia.launch.process import Process
from persia.runtime.exit_codes import AGAIN, ExitCode

GRACE = 20.0
"""Seconds between SIGTERM and SIGKILL."""
SAVING_GRACE = 45.0
"""Seconds between SIGTERM and SIGKILL for trainers, which may save their run in this time."""
ONE_SIGNAL = 2.0
"""Seconds within which two signals count as one. Some tools signal both a launcher and its ranks, or a process and its
group."""


class Events:
    """A queue of events: processes that ended, and numbers of signals that this process received."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Process | int] = SimpleQueue()

    def ended(self, process: Process) -> None:
        """Add the end of a process."""
        self._queue.put(process)

    def next(self, timeout: float | None = None) -> "Process | int | None":
        """Wait for the next event; return None after ``timeout`` seconds without one."""
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None

    @contextmanager
    def signals(
        self, numbers: Iterable[int] = (signal.SIGTERM, signal.SIGINT), *, last: bool = False
    ) -> Iterator[None]:
        """Turn these signals into events inside the block. Call this only in the main thread.

        Args:
            numbers: The numbers of the signals.
            last: Whether the process ends after the block with a code that is already decided. Later signals are then
                ignored.
        """

        def note(number: int, frame: FrameType | None) -> None:
            del frame
            self._queue.put(number)

        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if last else handler)


def stopped_by(number: int) -> ExitCode:
    """Return the exit code of a launcher that a signal stopped before the run was finished.

    SIGINT is Ctrl-C, after which no restart must follow. Other signals come from a supervisor, which restarts the
    launcher.
    """
    return ExitCode.INTERRUPTED if number == signal.SIGINT else AGAIN


def stop(
    processes: Iterable[Process],
    events: Events,
    *,
    grace: float = GRACE,
    say: Callable[[str], None],
) -> None:
    """Send SIGTERM to processes, and SIGKILL after ``grace`` seconds. Return when all have ended.

    The ends of processes are read from ``events``. A second signal to this process ends the grace period.
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
