"""The contexts that are entered in this process, innermost last."""

from typing import Any, Protocol


class Context(Protocol):
    """The part of a context that this module uses.

    Attributes:
        common_context: The backend that nested contexts share; None before entry.
    """

    common_context: Any


stack: list[Any] = []
"""The entered contexts, which append and remove themselves."""


def current() -> Context | None:
    """Return the innermost entered context, or None."""
    return stack[-1] if stack else None


def ends_well(left_by: BaseException) -> bool:
    """Whether a block that this exception leaves has ended normally, and not failed.

    GeneratorExit counts as a normal end: the caller of the enclosing generator stopped iterating.
    """
    return isinstance(left_by, GeneratorExit) or (isinstance(left_by, SystemExit) and not left_by.code)
