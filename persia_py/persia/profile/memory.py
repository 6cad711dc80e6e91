"""Measures the host memory of a training process with memray."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from persia.runtime.errors import PersiaError, StorageError, UsageError
from persia.runtime.files import make_folders

RECORD, PAGE = "memray.bin", "memray.html"
"""memray's record of allocations, and its flame graph of the moment of peak memory."""


def check() -> None:
    """Check that memray is installed.

    Raises:
        UsageError: memray is not installed.
    """
    if find_spec("memray") is None:
        raise UsageError(
            "persia profile memory needs the package memray, which is not installed", hint="pip install memray"
        )


def record(arguments: Sequence[str], folder: Path, *, native: bool = False) -> int:
    """Run ``persia ARGUMENTS`` under memray, then write the flame graph and print the largest allocations.

    Args:
        arguments: The arguments of the command.
        folder: The folder for :data:`RECORD` and :data:`PAGE`, which is created if missing.
        native: Whether to also record the frames of compiled code, such as the tables, which takes more time.

    Returns:
        The exit code of the command.

    Raises:
        UsageError: memray is not installed, or the folder already has a record.
        StorageError: The folder cannot be created.
        PersiaError: memray cannot evaluate the record.
    """
    check()
    made = folder / RECORD
    if made.exists():
        raise UsageError(
            f"cannot write the memory record: {made} already exists", hint="choose another folder: -o FOLDER"
        )
    try:
        make_folders(folder.absolute())
    except OSError as error:
        raise StorageError(f"cannot write the memory record to {folder}: {error.strerror}") from error
    memray = [sys.executable, "-m", "memray"]
    options = ["--native"] if native else []
    code = subprocess.run(
        [*memray, "run", "-q", *options, "-o", str(made), "-m", "persia", *arguments], check=False
    ).returncode
    if made.exists():
        for words in (["flamegraph", "-f", "-o", str(folder / PAGE)], ["stats", "-n", "10"]):
            failed = subprocess.run([*memray, *words, str(made)], check=False).returncode
            if failed:
                raise PersiaError(f"memray {words[0]} ended with exit code {failed} for {made}; its output is above")
    return code
