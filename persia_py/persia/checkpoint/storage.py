"""Tests the storage of checkpoints before training: write, fsync, rename, delete, free space."""

import contextlib
import os
import shlex
import shutil
from pathlib import Path

from persia.checkpoint.retention import is_full
from persia.runtime.errors import StorageError
from persia.runtime.files import is_url
from persia.runtime.places import Url
from persia.runtime.settings import settings
from persia_core import checkpoint as _core

FAILED = "Checkpoint storage validation failed"
"""The beginning of every message about unusable storage."""


def validate(folder: Path) -> int:
    """Check that a folder of checkpoints can be written to, or created, and return the free bytes of its disk.

    A missing folder is not created: its nearest existing parent is tested.

    Raises:
        StorageError: The folder is not writable; the message names the folder, the user and the reason.
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
        change = "make the folder writable for this user"
        if is_full(error):
            change = "free space on its disk"
        elif not there.is_dir():
            change = f"rename the file {there}"
        raise StorageError(
            f"{FAILED}: {there}: {reason}",
            hint=(
                f"{change}, or choose another folder; then check it: "
                f"persia doctor --only disk --dir {shlex.quote(str(folder))}"
            ),
        ) from error


def validate_url(url: Url) -> None:
    """Try to write an object below the URL of checkpoints, and to delete it.

    Raises:
        StorageError: The object cannot be written or deleted; the message names the URL and the reason.
    """
    try:
        _core.probe(url)
    except StorageError as error:
        raise StorageError(
            f"{FAILED}: {error}",
            hint=f"remove the cause, then check the store: persia doctor --only disk --dir {shlex.quote(url.text)}",
        ) from error


def check_root() -> None:
    """Check that ``PERSIA_CKPT_DIR`` of a job is a URL or an absolute path.

    Raises:
        StorageError: The path is relative: each process of the job would use a folder below its own working directory.
    """
    root = settings.checkpoint_root
    if root is None or settings.nats_url is None or is_url(root) or Path(root).is_absolute():
        return
    raise StorageError(
        f"{FAILED}: PERSIA_CKPT_DIR must be an absolute path or a URL, found {root!r}",
        hint=f"set the same folder for all processes of the job: PERSIA_CKPT_DIR={Path(root).absolute()}",
    )


def check_parent(folder: Path, key: str) -> None:
    """Check that the parent of a folder that the user has specified exists.

    Args:
        folder: The folder.
        key: The setting that specifies the folder, for the message.

    Raises:
        StorageError: The parent does not exist, or is not a folder. A frequent cause is a disk that is not mounted; the
            checkpoints would then fill the root disk.
    """
    parent = folder.parent
    if folder.exists() or parent.is_dir():
        return
    existing = next(each for each in (parent, *parent.parents) if each.exists())
    if not existing.is_dir():
        raise StorageError(
            f"{FAILED}: {key}: {existing} is not a folder",
            hint=f"choose another folder, or rename the file: {shlex.quote(str(existing))}",
        )
    missing = next(each for each in (parent, *parent.parents) if each.parent == existing)
    raise StorageError(
        f"{FAILED}: {key}: {missing} does not exist; its disk may not be mounted",
        hint=f"mount the disk, or create the folder: mkdir -p {shlex.quote(str(parent))}",
    )


def _existing(folder: Path) -> Path:
    whole = folder.absolute()
    return next(each for each in (whole, *whole.parents) if each.exists())


def _described(folder: Path) -> str:
    try:
        found = folder.stat()
    except OSError as error:
        return str(error.strerror)
    if not folder.is_dir():
        return "it is not a folder"
    return f"the folder belongs to user {found.st_uid}, mode {found.st_mode & 0o7777:o}"
