"""Waiting for observable conditions."""

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

Found = TypeVar("Found")


def wait_until(
    what: str,
    condition: Callable[[], Found | None],
    timeout: float,
    *,
    evidence: Callable[[], str] = str,
    interval: float = 0.02,
) -> Found:
    """Wait until ``condition`` returns a true value, and return it. A failure names the wait and shows the evidence."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}\n{evidence()}"
        time.sleep(interval)
    return found


def is_running(pid: int) -> bool:
    """Whether a process has not ended. A zombie counts as ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
