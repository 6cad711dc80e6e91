"""The facts from which the summary of a dump is written."""

from dataclasses import dataclass, field

from persia.doctor.check import Check
from persia.doctor.collectives import Failed
from persia.doctor.log_lines import Line

_ERRORS = 12
"""The number of last warnings and errors that the summary contains."""
_ENDED = (" ended with exit code ", " was killed by ", "ended with an error", "error: ")
"""Texts that occur in lines that report how a process has ended."""


@dataclass
class Facts:
    """The facts from which the summary is written.

    Attributes:
        subject: The subject of the dump.
        status: The state of the run, in one line.
        ends: How processes have ended.
        errors: The last warnings and errors of all logs.
        failed: Collectives that have failed.
        problems: The checks of the doctor that fail or warn.
        versions: Names and versions.
        newest: The newest checkpoint, in one line.
    """

    subject: str = "this machine"
    status: str = ""
    ends: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    failed: Failed = field(default_factory=Failed)
    problems: list[Check] = field(default_factory=list)
    versions: list[tuple[str, str]] = field(default_factory=list)
    newest: str = ""

    def read(self, line: Line) -> None:
        """Collect facts from a line of a log."""
        self.failed.note(line)
        if any(each in line.text for each in _ENDED):
            self.ends = [*self.ends[-_ERRORS + 1 :], line.as_text()]
        elif line.level in ("error", "warn"):
            self.errors = [*self.errors[-_ERRORS + 1 :], line.as_text()]
