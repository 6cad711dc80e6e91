"""The host memory of a training process, by memray."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from persia.runtime.errors import StorageError, UsageError
from persia.runtime.files import make_folders

RECORD, PAGE = "memray.bin", "memray.html"
"""The allocations as memray has recorded them, and its flame graph of the moment with most memory."""


def check() -> None:
    """Check that memray is installed.

    Raises:
        UsageError: It is not.
    """
    if find_spec("memray") is None:
        error = UsageError("persia profile memory needs the package memray, which is not installed")
        error.hint = "pip install memray"
        raise error


def record(arguments: Sequence[str], folder: Path, *, native: bool = False) -> int:
    """Run ``persia ARGUMENTS`` under memray, then write the flame graph and print the largest allocations.

    Args:
        arguments: Those of the command.
        folder: Gets :data:`RECORD` and :data:`PAGE`; made if missing.
        native: Record the frames of compiled code too, such as those of the tables; it takes more time.

    Returns:
        The exit code of the command.

    Raises:
        UsageError: memray is not installed, or the folder has a record already.
        StorageError: The folder cannot be made.
    """
    check()
    made = folder / RECORD
    if made.exists():
        error = UsageError(f"{made}: there is a record already")
        error.hint = "give another folder: -o FOLDER"
        raise error
    try:
        make_folders(folder.absolute())
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}; it is to get the record of the memory") from error
    memray = [sys.executable, "-m", "memray"]
    options = ["--native"] if native else []
    code = subprocess.run(
        [*memray, "run", "-q", *options, "-o", str(made), "-m", "persia", *arguments], check=False
    ).returncode
    if made.exists():
        subprocess.run([*memray, "flamegraph", "-f", "-o", str(folder / PAGE), str(made)], check=True)
        subprocess.run([*memray, "stats", "-n", "10", str(made)], check=True)
    return code
