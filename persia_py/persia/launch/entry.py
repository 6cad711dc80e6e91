"""Which script to run, with which arguments."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from persia.runtime.errors import UsageError


def entry(given: str | None, arguments: Sequence[str], *, variable: str) -> tuple[Path, list[str]]:
    """Return script and arguments.

    Args:
        given: A path, or a path and arguments as a shell would write them; None means the variable's.
        arguments: More arguments, behind those.
        variable: ``PERSIA_NN_WORKER_ENTRY`` or ``PERSIA_DATALOADER_ENTRY``.

    Raises:
        UsageError: Nothing is given, or the script is not there.
    """
    text = (given or os.environ.get(variable, "")).strip()
    if not text:
        raise UsageError(f"no script: give FILE, or set {variable}")
    if Path(text).is_file():
        return Path(text).resolve(), list(arguments)
    try:
        name, *own = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{'FILE' if given else variable}={text!r}: {error}") from error
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"{'FILE' if given else variable}: {path}: no such file (seen from {Path.cwd()})")
    return path.resolve(), [*own, *arguments]


def number(variable: str, default: int, *, least: int = 0) -> int:
    """Return the whole number in an environment variable, or the default.

    Raises:
        UsageError: It is no whole number, or below ``least``.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"environment variable {variable}={text!r}: want a whole number of at least {least}")
    return int(text)


def check_replica(index: int, size: int) -> None:
    """Refuse an index that the number of replicas does not have.

    Raises:
        UsageError: Of both numbers.
    """
    if size < 1:
        raise UsageError(f"replica size {size}: want at least 1")
    if not 0 <= index < size:
        raise UsageError(f"replica index {index}: want 0 to {size - 1}, as the replica size is {size}")
