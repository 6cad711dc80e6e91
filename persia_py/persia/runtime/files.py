"""Durable writes, and URLs."""

import contextlib
import os
import re
from pathlib import Path


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether this is the URL of an object store, and not a folder."""
    return re.match("[a-zA-Z][a-zA-Z0-9+.-]*://", os.fspath(place)) is not None


def shown_url(url: str) -> str:
    """Return a URL in a form that may be logged: without user, password, query and fragment."""
    return re.split("[?#]", _without_user(url), maxsplit=1)[0]


def _without_user(url: str) -> str:
    """Return a URL without user and password. An ``@`` in the path or the query stays."""
    start = re.match("([a-zA-Z][a-zA-Z0-9+.-]*:)?//", url)
    scheme = start[0] if start else ""
    rest = url[len(scheme) :]
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    host = authority.rpartition("@")[2]
    if not re.fullmatch(r"(\[.*\]|[^:]+)(:\d+)?", host):  # the password has an unescaped /, ? or #
        return scheme + rest.rpartition("@")[2]
    return scheme + host + rest[len(authority) :]


def make_folders(folder: Path) -> None:
    """Create a folder and its missing parents durably.

    Raises:
        OSError: A folder cannot be created.
    """
    if folder.is_dir():
        return
    make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file durably and atomically.

    Raises:
        OSError: The file cannot be written; the previous content remains, unless only the folder cannot be synced.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def publish(temporary: Path, path: Path) -> None:
    """Rename ``temporary`` to ``path``.

    The file is synced before the rename, and the folder after it. A crash leaves either the old file or the new file.
    """
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the content of a file, or the entries of a folder, durable.

    Raises:
        OSError: The file or folder cannot be synced.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
