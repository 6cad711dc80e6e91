"""The result of one check."""

from dataclasses import dataclass
from typing import Literal

from persia.runtime.exit_codes import ExitCode

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was checked: two or three words.
        status: ``ok``; ``warn``: it may be intended; ``fail``: training will not work; ``skip``: not checked.
        found: What was found.
        why: Why this is a problem, or why it was not checked.
        next: The next command, or what to change.
        code: The exit code of a failure.
    """

    name: str
    status: Status
    found: str
    why: str = ""
    next: str = ""
    code: ExitCode = ExitCode.CONFIG


def worst(checks: list[Check]) -> ExitCode:
    """Return the exit code of some checks: that of the first failure, else 0."""
    return next((check.code for check in checks if check.status == "fail"), ExitCode.OK)
