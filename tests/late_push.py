"""A late push of rank 1. It arrives when rank 0 waits for it, or when rank 0 has wrongly not waited."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from waiting import wait_until

from persia.distributed.control_plane import Peers


def _mark(folder: Path, step: int) -> Path:
    return folder / f"rank-0-waits-for-{step}"


@contextlib.contextmanager
def waits(folder: Path, step: int) -> Iterator[None]:
    """On rank 0, let rank 1 push ``step`` when rank 0 waits for another rank in the block, or when the block ends."""
    mark = _mark(folder, step)

    def marked(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            mark.touch()
            return method(*arguments)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("all_gather", "wait_for_notes"):
            stack.enter_context(mock.patch.object(Peers, name, marked(getattr(Peers, name))))
        yield
    mark.touch()


def push_late(folder: Path, step: int) -> None:
    """On rank 1, wait for rank 0 before the push of ``step``."""
    wait_until(f"rank 0 to wait for the push of step {step}", _mark(folder, step).exists, 60)
