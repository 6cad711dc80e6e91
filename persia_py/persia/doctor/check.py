"""The result of one check."""

from dataclasses import dataclass
from typing import Literal

from persia.runtime.exit_codes import ExitCode

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: The subject of the check, in two or three words.
        status: ``ok``; ``warn``: the finding may be intended; ``fail``: training will not work; ``skip``: not checked.
        found: The finding.
        why: The reason why the finding is a problem, or the check was skipped.
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
    """Return the exit code for some checks: that of the first failure, or 0."""
    return next((check.code for check in checks if check.status == "fail"), ExitCode.OK)
