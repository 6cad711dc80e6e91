"""The storage of checkpoints is tried before training: write, fsync, rename, delete, and the free space."""

import contextlib
import os
import shutil
from pathlib import Path

from persia.runtime.errors import StorageError
from persia.runtime.settings import settings

FAILED = "Checkpoint storage validation failed"
"""How every message about such storage begins."""


def validate(folder: Path) -> int:
    """Try to write where a folder of checkpoints is, or will be, and return the free bytes there.

    A folder that does not exist yet is not made: its nearest parent that exists is tried.

    Raises:
        StorageError: Nothing can be written there; the message names the folder, the user and the reason.
    """
    there = _existing(folder)
    probe = there / f".persia-probe-{os.getpid()}"
    renamed = probe.with_suffix(".renamed")
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, b"persia\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        probe.rename(renamed)
        renamed.unlink()
        return shutil.disk_usage(there).free
    except OSError as error:
        for left in (probe, renamed):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)
        reason = f"user {os.geteuid()} cannot write here: {error.strerror or error}; {_described(there)}"
        refused = StorageError(f"{FAILED}: {there}: {reason}")
        refused.hint = (
            f"give this user the folder, or another one; then try it: persia doctor --only disk --dir {folder}"
        )
        raise refused from error


def check_root() -> None:
    """Check that ``PERSIA_CKPT_DIR`` of a job is an absolute path.

    Raises:
        StorageError: It is relative: each process of the job would use a folder below its own working directory.
    """
    root = settings.checkpoint_root
    if root is None or settings.nats_url is None or Path(root).is_absolute():
        return
    error = StorageError(f"{FAILED}: PERSIA_CKPT_DIR must be an absolute path, found {root!r}")
    error.hint = f"give all processes of the job the same folder: PERSIA_CKPT_DIR={Path(root).absolute()}"
    raise error


def check_parent(folder: Path, key: str) -> None:
    """Check that the parent of a folder that a user has named exists.

    Args:
        folder: The folder.
        key: Where it was named, for the message.

    Raises:
        StorageError: It does not: often a disk that is not mounted, in whose place the root disk would be filled.
    """
    parent = folder.parent
    if folder.exists() or parent.is_dir():
        return
    missing = next(each for each in (parent, *parent.parents) if each.parent.exists())
    error = StorageError(f"{FAILED}: {key}: {missing} does not exist; is a disk not mounted?")
    error.hint = f"mount it, or make the folder: mkdir -p {parent}"
    raise error


def _existing(folder: Path) -> Path:
    whole = folder.absolute()
    return next(each for each in (whole, *whole.parents) if each.exists())


def _described(folder: Path) -> str:
    try:
        found = folder.stat()
    except OSError as error:
        return str(error.strerror)
    if not folder.is_dir():
        return "it is not a directory"
    return f"the directory is of user {found.st_uid}, mode {found.st_mode & 0o7777:o}"
