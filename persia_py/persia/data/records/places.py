"""Messages about rows with their locations, and Arrow errors with file names."""

import re
from collections.abc import Callable

import pyarrow as pa

from persia.runtime.errors import DataError, UsageError

_ROW = re.compile(r", row (\d+):")
"""Matches a row in a message of a transform or a split, which count rows from 0."""


def with_places(message: str, place: Callable[[int], str]) -> str:
    """Return a message about rows, ``…, row N: …``, with the locations of the rows.

    Args:
        message: A line for each error; rows are counted from 0.
        place: Returns the location of a row.
    """
    lines = (_ROW.sub(lambda found: f", {place(int(found[1]))}:", line, count=1) for line in message.split("\n"))
    return "\n".join(lines)


class naming:  # noqa: N801  # a context manager
    """Converts errors of Arrow and of the operating system to errors that name the file.

    A file that is missing or may not be read gives a :class:`UsageError`, any other error a :class:`DataError`.

    Args:
        path: The file.
        mistake: Returns the error for a message of Arrow about this file, or None.
    """

    def __init__(self, path: str, mistake: Callable[[str, str], DataError | None] | None = None) -> None:
        self._path, self._mistake = path, mistake

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise UsageError(f"cannot read {self._path}: {error.strerror or error}") from error
        if isinstance(error, pa.ArrowException | OSError):
            known = None if self._mistake is None else self._mistake(self._path, str(error))
            raise known or DataError(f"cannot read {self._path}: {error}") from error
