"""A hook with which a debugger inspects an error, before the failure of this rank is reported to the other ranks."""

from collections.abc import Callable

_examiners: list[Callable[[BaseException], None]] = []


def install(examiner: Callable[[BaseException], None]) -> None:
    """Call ``examiner`` with each error that ends training in this process."""
    _examiners.append(examiner)


def examine(error: BaseException) -> None:
    """Let the debugger inspect an error that ends training; does nothing without a debugger."""
    for examiner in _examiners:
        examiner(error)
