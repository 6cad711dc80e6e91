"""Checks that the files that a configuration names are visible here and in containers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from persia.config import Config
from persia.doctor.check import Check
from persia.runtime.errors import PersiaError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.files import is_url
from persia.runtime.settings import in_container

_LISTED = 5
"""The number of files that a check lists."""
_WRITTEN = ("run.", "checkpoint.")
"""Keys of folders that training creates; the disk checks cover them."""


def checks(config: Config) -> Iterator[Check]:
    """Yield checks of files that are not visible here, of the rows, and of files that containers lack.

    Args:
        config: The configuration.
    """
    missing = {key: path for key, path in paths(config) if not path.exists() and not _is_glob(path)}
    for key, path in missing.items():
        yield hidden(key, path, in_image=in_container())
    if any(key.startswith("data.") for key in missing):
        yield Check("rows", "skip", "not read", "files are missing")
    else:
        yield rows(config)
    outside = [f"{key}: {path}" for key, path in paths(config) if path.exists() and not _is_below(path, config.folder)]
    if outside:
        why = "containers see the folder of persia.yml as /workspace (CUR_DIR), and DATA_DIR as /data"
        more = f"; and {len(outside) - _LISTED} more" if len(outside) > _LISTED else ""
        found = f"outside the folder of persia.yml: {'; '.join(outside[:_LISTED])}{more}"
        yield Check("files outside", "ok", found, why)


def paths(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield key and path of each file that a configuration names.

    Paths of ``data`` and ``train.start_from`` are relative to the folder of ``persia.yml``. In other places, such as
    the arguments of the user's model, a text that begins with ``/``, ``~/``, ``./`` or ``../`` is a path.

    Args:
        config: The configuration.
    """
    for key, text in _texts("", config.model_dump(by_alias=True, exclude={"features", "labels"})):
        is_file_key = key in ("data.train", "data.valid", "data.test", "train.start_from")
        if is_url(text) or key.startswith(_WRITTEN):
            continue
        if is_file_key or text.startswith(("/", "~/", "./", "../")):
            yield key, config.folder / Path(text).expanduser()


def _texts(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(prefix, inner)


def _is_glob(path: Path) -> bool:
    return any(sign in str(path) for sign in "*?[")


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def hidden(key: str, path: Path, *, in_image: bool) -> Check:
    """Return the check for a missing file.

    Args:
        key: The key that names the file.
        path: The file.
        in_image: Whether this process is in a container.
    """
    if in_image:
        found = f"{key}: {path} is not visible in the container"
        why = "containers see CUR_DIR as /workspace, and DATA_DIR as /data"
        command = f"mount its folder: DATA_DIR={path.parent} docker compose up; then set {key}: /data/{path.name}"
        return Check("files", "fail", found, why, command)
    parent = next(each for each in path.parents if each.exists())
    return Check("files", "fail", f"{key}: {path} does not exist", f"{parent} exists", f"ls {parent}")


def rows(config: Config) -> Check:
    """Check that each part of the data has a row that can be read.

    Args:
        config: The configuration.
    """
    from persia.trainer.parts import Parts

    try:
        parts = Parts(config)
        parts.check_not_empty()
    except PersiaError as error:
        return Check(
            "rows", "fail", str(error), "", error.hint or "persia data inspect FILE", ExitCode(error.exit_code)
        )
    there = [part.name for part in (parts.train, parts.valid, parts.test) if part is not None]
    count = len(parts.train.files.paths)
    return Check("rows", "ok", f"{count} file{'' if count == 1 else 's'} of train; parts with rows: {', '.join(there)}")
