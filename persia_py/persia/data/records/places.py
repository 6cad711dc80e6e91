"""Messages about rows, with the places of these, and errors of Arrow with the names of files."""

import re
from collections.abc import Callable

import pyarrow as pa

from persia.runtime.errors import DataError, UsageError

_ROW = re.compile(r", row (\d+):")
"""A row in a message of a transform or a split, which count from 0."""


def with_places(message: str, place: Callable[[int], str]) -> str:
    """Return a message about rows, ``…, row N: …``, with their places.

    Args:
        message: A line for each mistake; rows are counted from 0.
        place: Returns the place of a row.
    """
    lines = (_ROW.sub(lambda found: f", {place(int(found[1]))}:", line, count=1) for line in message.split("\n"))
    return "\n".join(lines)


class naming:  # noqa: N801  # a context manager
    """Turn Arrow's errors into a :class:`DataError` that names the file.

    Args:
        path: The file.
        mistake: Returns the error of a message of Arrow about this file, or None.
    """

    def __init__(self, path: str, mistake: Callable[[str, str], DataError | None] | None = None) -> None:
        self._path, self._mistake = path, mistake

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise UsageError(f"{self._path}: {error.strerror or error}") from error
        if isinstance(error, pa.ArrowException | OSError):
            known = None if self._mistake is None else self._mistake(self._path, str(error))
            raise known or DataError(f"{self._path}: {error}") from error
