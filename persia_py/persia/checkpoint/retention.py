"""Decides which checkpoints in a folder are kept, by number and age; reports the space that a full disk needs."""

import contextlib
import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from persia.runtime import files
from persia.runtime.errors import CheckpointError, StorageError
from persia.runtime.places import Place, Url, place
from persia_core import checkpoint as _core

MAX_DAYS = 36_500
"""The maximum checkpoint age that can be specified, in days."""
_MANIFEST, _REMOVED = "MANIFEST.json", ".REMOVED.json"
"""The file that makes a folder a checkpoint, and the name of this file while the checkpoint is being deleted."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint in a folder.

    Attributes:
        path: The folder of the checkpoint.
        step: The step of its cut.
        size: The size of all files, in bytes.
        created_at: The time at which it was written.
    """

    path: Place
    step: int
    size: int
    created_at: datetime


def checkpoints_in(folder: Place) -> list[Saved]:
    """Return the checkpoints in a folder or below a URL, newest first.

    The result has the checkpoints that :func:`persia_core.checkpoint.prune` counts. Only manifests are read. A
    checkpoint whose manifest cannot be used is omitted; a checkpoint with a damaged file is included.

    Raises:
        StorageError: The folder, or a manifest, cannot be read.
    """
    if isinstance(folder, Url):
        return [
            Saved(Url(each["path"]), each["step"], each["bytes"], _time(each["created_at"]))
            for each in _core.listing(folder, verify=False)
            if each["problem"] is None
        ]
    found = []
    try:
        with os.scandir(folder) as entries:
            folders = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise StorageError(
            f"cannot list the checkpoints in {folder}: {error.strerror}", hint="check the path and its owner"
        ) from error
    for path in map(Path, folders):
        if not _has_manifest(path):
            continue
        with contextlib.suppress(CheckpointError):
            opened = _core.Checkpoint(path)
            head, size = json.loads(opened.manifest)["head"], sum(int(each["bytes"]) for each in opened.files)
            found.append(((opened.generation, opened.step), Saved(path, opened.step, size, _time(head["created_at"]))))
    found.sort(key=lambda each: each[0], reverse=True)  # checkpoints of equal age stay in the order of their names
    return [saved for _, saved in found]


def _has_manifest(path: Path) -> bool:
    try:
        (path / _MANIFEST).lstat()
    except OSError:  # a folder that cannot be read, such as lost+found, does not count as a checkpoint
        return False
    return True


def kept(found: Sequence[Saved], age: timedelta, *, least: int = 1) -> int:
    """Return how many of the newest checkpoints are kept if those older than ``age`` are deleted.

    "Newest" means by step: a checkpoint older than ``age`` is kept if one of an earlier step is kept. Damaged
    checkpoints count.

    Args:
        found: The checkpoints of :func:`checkpoints_in`.
        age: The maximum age.
        least: The number of newest checkpoints that are kept regardless of their age; at least 1.
    """
    limit = _now() - age
    young = [index for index, each in enumerate(found) if each.created_at >= limit]
    return max(1, least, *(index + 1 for index in young))


def to_delete(found: Sequence[Saved], keep: int) -> list[Saved]:
    """Return the checkpoints that :func:`prune` deletes: all after the first ``keep``, except the newest intact one.

    If no checkpoint is intact, none is deleted.

    Args:
        found: The checkpoints of :func:`checkpoints_in`.
        keep: The number of newest checkpoints that are kept.
    """
    if len(found) <= keep:
        return []
    newest = next((index for index, each in enumerate(found) if _is_intact(each.path)), None)
    return [] if newest is None else [each for index, each in enumerate(found) if index >= keep and index != newest]


def prune(folder: Place, keep: Callable[[Sequence[Saved]], int]) -> list[Saved]:
    """Delete old checkpoints and return them. The newest intact checkpoint is kept.

    The checkpoints are listed immediately before the deletion, so recently written checkpoints are counted.

    Args:
        folder: The folder.
        keep: Takes the checkpoints of :func:`checkpoints_in`, and returns how many of the newest are kept.

    Raises:
        StorageError: The folder cannot be read, or a checkpoint cannot be deleted.
    """
    found = checkpoints_in(folder)
    deleted = {place(each) for each in _core.prune(folder, keep(found))}
    return [each for each in found if each.path in deleted]


def _is_intact(path: Place) -> bool:
    try:
        _core.Checkpoint(path).verify()
    except CheckpointError:
        return False
    return True


def remove(path: Place) -> None:
    """Delete one checkpoint.

    First the manifest is renamed, which commits the deletion. Then the files are deleted. In an object store, the
    manifest is deleted first.

    Raises:
        StorageError: The checkpoint cannot be deleted.
    """
    if isinstance(path, Url):
        _core.remove_object(path)
        return
    try:
        (path / _MANIFEST).replace(path / _REMOVED)
        files.sync(path)
    except OSError as error:
        raise StorageError(
            f"cannot delete checkpoint {path}: {error.strerror}", hint="check the path and its owner"
        ) from error
    _core.prune(path.parent, sys.maxsize)  # this deletes no checkpoint, and completes interrupted removals


def with_space(error: Exception, folder: Place) -> str:
    """Return the text of an error. For a full disk, add the required and the available space, and the next step.

    Args:
        error: The error.
        folder: The folder of the checkpoints.
    """
    text = str(error)
    if not is_full(error) or isinstance(folder, Url):
        return text
    try:
        free = shutil.disk_usage(folder).free
        newest = next(iter(checkpoints_in(folder)), None)
    except (OSError, StorageError):
        return text
    need = "this checkpoint's size is unknown" if newest is None else f"the last checkpoint has {newest.size:,} bytes"
    return (
        f"{text}; {folder} has {free:,} bytes free, {need}. Enlarge the volume, or delete old checkpoints: "
        f"persia ckpt prune {shlex.quote(str(folder))} --older 7d (--dry-run only lists them)"
    )


def is_full(error: Exception) -> bool:
    """Whether an error, or its cause, reports a full disk."""
    causes = [each for each in (error, error.__cause__) if isinstance(each, OSError)]
    return any(each.errno in (errno.ENOSPC, errno.EDQUOT) for each in causes) or any(
        os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)
    )


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)
