"""The exit codes of persia's processes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a process of a job. Launchers and containers restart after :attr:`AGAIN` and :attr:`HUNG`."""

    OK = 0
    """The work is done."""
    FAILED = 1
    """An error of the script, or one without a separate code."""
    CONFIG = 2
    """A mistake in the configuration, the arguments, or the data."""
    UNREACHABLE = 3
    """A part of the job cannot be reached."""
    CORRUPT = 4
    """A checkpoint or a file cannot be used."""
    REFUSED = 5
    """A token, a version or a configuration was refused."""
    HUNG = 70
    """A training loop made no progress."""
    AGAIN = 75
    """This attempt is over: start again."""
    INTERRUPTED = 130
    """Ctrl-C."""


AGAIN = ExitCode.AGAIN
