"""The place at which a debugger looks at an error, before the other ranks learn that this one has failed."""

from collections.abc import Callable

_examiners: list[Callable[[BaseException], None]] = []


def install(examiner: Callable[[BaseException], None]) -> None:
    """Call ``examiner`` with each error that ends training in this process."""
    _examiners.append(examiner)


def examine(error: BaseException) -> None:
    """Let the debugger look at an error that ends training; without one, do nothing."""
    for examiner in _examiners:
        examiner(error)
