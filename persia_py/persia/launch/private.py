"""The folder with the secret and the sockets of one ``persia up``, which nobody else may read."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "persia-up-"
_YOUNG = 60.0
"""Seconds a folder may be there before its owner has locked it."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder for the length of the block; what killed ones of this user left behind is removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left) as status:  # an OSError: somebody else's, in use, or gone
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _YOUNG:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, _locked(Path(name)):
        yield Path(name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[os.stat_result]:
    """Hold the folder's lock, which ends with this process, however that ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)
