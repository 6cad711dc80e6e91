"""A folder that appears when it is complete."""

import contextlib
import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from persia.runtime.errors import StorageError, UsageError
from persia.runtime.files import sync


def check_free(folder: Path) -> None:
    """Check that a folder can be written, before any work is done.

    Raises:
        UsageError: The folder exists, or its parent does not.
    """
    if folder.exists() or folder.is_symlink():
        other, given = (shlex.quote(str(each)) for each in (folder.with_name(folder.name + "-2"), folder))
        hint = f"choose another folder: -o {other}; or remove this one: rm -r {given}"
        raise UsageError(f"{folder} already exists", hint=hint)
    if not folder.absolute().parent.is_dir():
        hint = f"create it: mkdir -p {shlex.quote(str(folder.parent))}"
        raise UsageError(f"{folder}: there is no folder {folder.parent}", hint=hint)


class Staging:
    """Collects files in a temporary folder, which :meth:`publish` renames to ``folder``.

    The temporary folder is ``.NAME.partial`` next to ``folder``. If the process is killed, this folder remains, and the
    next export to ``folder`` empties it. Use the class as a context manager. A block that does not publish leaves no
    files.

    Args:
        folder: The new folder, which does not exist yet.

    Attributes:
        path: The temporary folder.

    Raises:
        UsageError: The folder exists, or another process writes it.
        StorageError: The temporary folder cannot be created or locked.
    """

    def __init__(self, folder: Path) -> None:
        check_free(folder)
        self._folder = folder.absolute()
        self.path = self._folder.with_name(f".{folder.name}.partial")
        self._lock = -1

    def __enter__(self) -> Self:
        with self._naming():
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise UsageError(
                f"{self._folder}: another process is exporting to this folder",
                hint="wait until the other export ends, or choose another folder",
            ) from error
        except OSError as error:  # the file system does not support locks
            self.__exit__(None, None, None)
            raise StorageError(
                f"cannot lock {self.path}: {error.strerror or error}",
                hint="export to a folder on a file system that supports locks, such as a local disk",
            ) from error
        try:
            with self._naming():
                for left in self.path.iterdir():  # files of a process that was killed
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except StorageError:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)  # does not exist if it was published

    def write(self, name: str, content: bytes) -> Path:
        """Write a file durably, and return its path.

        Raises:
            StorageError: The file cannot be written.
        """
        path = self.path / name
        with self._naming(), path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return path

    def publish(self, name: str, content: bytes) -> None:
        """Write the last file, and rename the folder to its final name.

        Raises:
            StorageError: The file cannot be written.
            UsageError: Another process has created a folder of this name.
        """
        self.write(name, content)
        check_free(self._folder)
        with self._naming():
            sync(self.path)
            self.path.rename(self._folder)
            sync(self._folder.parent)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot write {error.filename or self.path}: {error.strerror or error}") from error
