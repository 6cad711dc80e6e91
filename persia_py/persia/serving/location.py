"""Finds the bundle to serve: a bundle, a link to one, or the highest version in a folder of versions."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from persia.runtime.errors import CheckpointError
from persia.serving.manifest import MANIFEST, new_folder


@dataclass(frozen=True)
class Found:
    """The current state of a bundle.

    Attributes:
        path: The folder of the bundle, with links resolved.
        stamp: A value that changes when the manifest is replaced.
    """

    path: Path
    stamp: tuple[int, int, int]


def find(given: Path) -> Found:
    """Return the bundle that a path names.

    Args:
        given: A bundle, a link to one, or a folder whose subfolders with integer names are bundles. The highest version
            with a manifest is used.

    Raises:
        CheckpointError: The path has no bundle, or it cannot be read.
    """
    found = _bundle(given)
    if found is not None:
        return found
    try:
        versions = sorted((each.name for each in given.iterdir() if each.name.isdecimal()), key=int, reverse=True)
    except PermissionError as error:
        hint = f"make the folder readable for the user of this process: ls -ld {shlex.quote(str(given))}"
        raise CheckpointError(f"cannot read {given}: {error.strerror}", hint=hint) from error
    except OSError as error:
        raise _missing(given, error.strerror or str(error), new_folder(given)) from error
    for version in versions:
        found = _bundle(given / version)
        if found is not None:
            return found
    for folder in (given, *(given / version for version in versions[:1])):
        try:
            (folder / MANIFEST).stat()
        except PermissionError as error:
            hint = f"make the folder readable for the user of this process: ls -ld {shlex.quote(str(folder))}"
            raise CheckpointError(f"cannot read {folder / MANIFEST}: {error.strerror}", hint=hint) from error
        except OSError:  # a missing manifest is reported below
            continue
    new = given / str(int(versions[0]) + 1 if versions else 1)
    raise _missing(given, f"the folder has neither {MANIFEST} nor a version such as 1/{MANIFEST}", new)


def _bundle(folder: Path) -> Found | None:
    """Return the bundle in a folder; None if it has no manifest, or it cannot be read."""
    try:
        path = folder.resolve(strict=True)
        manifest = (path / MANIFEST).stat()
    except (OSError, RuntimeError):
        return None
    return Found(path, (manifest.st_ino, manifest.st_mtime_ns, manifest.st_size))


def _missing(given: Path, why: str, new: Path) -> CheckpointError:
    hint = f"write a bundle: persia export runs/LATEST -o {shlex.quote(str(new))}"
    return CheckpointError(f"{given}: no bundle: {why}", hint=hint)
