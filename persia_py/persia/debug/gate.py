"""The state of breakpoints that the ranks of a run share: small records, in files on one host or in torch's store.

The debugged rank writes ``rank-R``: how many calls of ``breakpoint_`` it has passed, and where it is stopped. The other
ranks read this record. While a breakpoint is open, there is also the record ``N``. On one host, it is the file
``debug_counter_RUN_N.txt`` in :func:`folder`. The user may remove this file to let the other ranks continue.
"""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from persia.runtime.errors import StorageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

RUN = "PERSIA_DEBUG_RUN"
"""The variable in which the launcher passes the name of the run to its ranks."""
RANK = "RANK_TO_DEBUG"
"""The variable that selects the rank that stops at breakpoints."""
POST_MORTEM = "PERSIA_DEBUG_POST_MORTEM"
"""The variable that makes a failing rank prompt at its error."""
PREFIX = "debug_counter_"
_MOST = 1 << 16
"""The maximum size of a record, in bytes."""
_OLD_S = 86_400.0
"""The age in seconds from which a file of an ended process is removed. Younger files may belong to another
container."""

Record = dict[str, Any]


class Gate(Protocol):
    """Records that all ranks of a run can read."""

    def put(self, key: str, record: Record) -> None:
        """Write a record."""

    def get(self, key: str) -> Record | None:
        """Return a record; None if it does not exist."""

    def remove(self, key: str) -> None:
        """Remove a record, if it exists."""

    def name(self, key: str) -> str:
        """Return the location of a record, for a message."""

    def is_alive(self, record: Record) -> bool:
        """Whether the rank that wrote the record is still running, as far as this rank can determine."""


def folder() -> Path:
    """Return the folder of the files: ``BREAKPOINT_TMP_FILE_PATH``, as in MindSpeed, else ``TMPDIR`` or ``/tmp``."""
    return Path(os.environ.get("BREAKPOINT_TMP_FILE_PATH") or tempfile.gettempdir())


def run_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return a name that all ranks of a run on this host share, and no other run has.

    The launcher sets the name. Otherwise it is derived from the process that started the ranks, and its number of
    restarts. A process without a launcher is a separate run.
    """
    if name := environment.get(RUN):
        return name
    alone = int(environment.get("WORLD_SIZE") or 1) == 1
    process = psutil.Process() if alone else psutil.Process(os.getppid())
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    told = f"{process.pid} {process.create_time()} {restarts}"
    return hashlib.sha256(told.encode()).hexdigest()[:8]


class RankSession(Protocol):
    """The part of a rank's debugging session that other threads of its process use.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        gate: The records that the ranks share.
    """

    rank: int
    world_size: int
    gate: Gate

    def edited(self, attached: bool) -> None:
        """Record whether an editor is attached."""


class FileGate:
    """Records in files on this host. Files of other users, and links, are ignored."""

    def __init__(self, run: str) -> None:
        self._run = run

    def name(self, key: str) -> str:
        """Return the path of the file."""
        return str(self._path(key))

    def put(self, key: str, record: Record) -> None:
        """Write the file, atomically.

        Raises:
            StorageError: The file cannot be written.
        """
        path = self._path(key)
        own = path.with_name(f".{path.name}.{os.getpid()}")
        content = json.dumps({**record, "pid": os.getpid()}).encode()
        try:
            own.unlink(missing_ok=True)
            with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(content)
            own.replace(path)
        except OSError as error:
            raise StorageError(
                f"cannot write {path}, through which ranks share breakpoints: {error.strerror}",
                hint="specify a writable folder of this host: BREAKPOINT_TMP_FILE_PATH=FOLDER",
            ) from error

    def get(self, key: str) -> Record | None:
        """Return the content of the file; None in the cases of :meth:`read`."""
        return self.read(self._path(key))

    @staticmethod
    def read(path: Path) -> Record | None:
        """Return the record in a file; None if it does not exist, cannot be read, or is not a record of this user."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                return None
            try:
                record = json.loads(file.read(_MOST))
            except ValueError:
                return None
        return record if isinstance(record, dict) else None

    def remove(self, key: str) -> None:
        """Remove the file, if this is possible."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def is_alive(self, record: Record) -> bool:
        """Whether the process that wrote the record is running."""
        return psutil.pid_exists(int(record.get("pid", 0)))

    def remove_all(self) -> None:
        """Remove all files of the run."""
        remove_files(f"{PREFIX}{self._run}_*")

    def _path(self, key: str) -> Path:
        return folder() / f"{PREFIX}{self._run}_{key}.txt"


class StoreGate:
    """Records in the store of torch's process group, which ranks on several hosts share."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def name(self, key: str) -> str:
        """Return the key."""
        return f"{self._key(key)} in the store of the process group"

    def put(self, key: str, record: Record) -> None:
        """Set the key."""
        self._store.set(self._key(key), json.dumps(record))

    def get(self, key: str) -> Record | None:
        """Return the value of the key, without waiting for it."""
        own = self._key(key)
        if not self._store.check([own]):
            return None
        value: bytes = self._store.get(own)
        record: Record = json.loads(value)
        return record or None

    def remove(self, key: str) -> None:
        """Set the key to an empty value, because not every store can delete keys."""
        self._store.set(self._key(key), "{}")

    def is_alive(self, record: Record) -> bool:
        """Return True, because the process group detects ranks that have ended."""
        del record
        return True

    def _key(self, key: str) -> str:
        return f"{PREFIX}{key}"


def sweep() -> None:
    """Remove old files of processes that ended without removing them, as after SIGKILL."""
    gate = FileGate("")
    for path in folder().glob(f"{PREFIX}*.txt"):
        with contextlib.suppress(OSError):
            record = gate.read(path)
            old = time.time() - path.lstat().st_mtime > _OLD_S
            if old and record is not None and not gate.is_alive(record):
                path.unlink()


def remove_files(pattern: str) -> list[Path]:
    """Remove the files of this user in the folder whose names match ``pattern``, and return their paths."""
    removed = []
    for path in sorted(folder().glob(pattern)):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                path.unlink()
                removed.append(path)
    return removed
