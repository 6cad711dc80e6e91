"""Where the bundle is: a bundle, a link to one, or a folder of versions, of which the highest number is served."""

from dataclasses import dataclass
from pathlib import Path

from persia.runtime.errors import CheckpointError
from persia.serving.manifest import MANIFEST, new_folder


@dataclass(frozen=True)
class Found:
    """A bundle, as it is at this moment.

    Attributes:
        path: Its folder, without links.
        stamp: Changes if the manifest is another file.
    """

    path: Path
    stamp: tuple[int, int, int]


def find(given: Path) -> Found:
    """Return the bundle that a path names.

    Args:
        given: A bundle, a link to one, or a folder whose subfolders with whole numbers as names are bundles. The
            highest number that has a manifest is taken.

    Raises:
        CheckpointError: There is no bundle.
    """
    found = _bundle(given)
    if found is not None:
        return found
    try:
        versions = sorted((each.name for each in given.iterdir() if each.name.isdecimal()), key=int, reverse=True)
    except OSError as error:
        raise _missing(given, error.strerror or str(error), new_folder(given)) from error
    for version in versions:
        found = _bundle(given / version)
        if found is not None:
            return found
    new = given / str(int(versions[0]) + 1 if versions else 1)
    raise _missing(given, f"the folder has neither {MANIFEST} nor a version such as 1/{MANIFEST}", new)


def _bundle(folder: Path) -> Found | None:
    """Return the bundle in a folder; None if it has no manifest."""
    try:
        path = folder.resolve(strict=True)
        manifest = (path / MANIFEST).stat()
    except (OSError, RuntimeError):
        return None
    return Found(path, (manifest.st_ino, manifest.st_mtime_ns, manifest.st_size))


def _missing(given: Path, why: str, new: Path) -> CheckpointError:
    error = CheckpointError(f"{given}: no bundle: {why}")
    error.hint = f"write one: persia export runs/LATEST -o {new}"
    return error
