"""The exit codes of persia's processes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a process of a job. ``docs/running.md`` lists which of them lead to a restart."""

    OK = 0
    """The work is done."""
    FAILED = 1
    """An error of the script, or an error without a code of its own."""
    CONFIG = 2
    """An error in the configuration, the arguments, or the data, or a peer with another version or configuration."""
    UNREACHABLE = 3
    """A part of the job cannot be reached."""
    CORRUPT = 4
    """A checkpoint or a file cannot be used."""
    REFUSED = 5
    """A token or a certificate was refused."""
    HUNG = 70
    """A training loop made no progress, or a wait exceeded its time limit."""
    AGAIN = 75
    """This attempt has ended, and a restart is requested."""
    INTERRUPTED = 130
    """The user has pressed Ctrl-C."""


AGAIN = ExitCode.AGAIN
