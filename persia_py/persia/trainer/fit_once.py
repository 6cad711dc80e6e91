"""One fit for all processes of a job that share a folder: one process fits, and the others read the result."""

import contextlib
import fcntl
import json
import os
import shlex
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from persia.config import Config
from persia.runtime.errors import CheckpointError, StorageError
from persia.runtime.files import make_folders, write_whole
from persia.runtime.logging import get_logger
from persia.trainer import fitting
from persia.trainer.fitting import Fitted
from persia.trainer.parts import Parts

_logger = get_logger("trainer")

_LOCK = "lock"


def fit_once(config: Config, parts: Parts, folder: Path) -> Fitted:
    """Return the transform of the training rows, which is fitted at most once for all processes that share a folder.

    The name of the result's file depends on the features, the training files (their names, sizes and times) and their
    split, so a fit of other rows is never used. Processes that share no folder each fit, with the same result.

    Args:
        config: The configuration.
        parts: The data of the configuration.
        folder: The folder for the result, which is created if missing.

    Raises:
        DataError: As in :func:`persia.trainer.fitting.fit`.
        StorageError: The folder cannot be used, or the result of another process cannot be read.
    """
    train = parts.train
    split = None if train.split is None else train.split.identity()
    # files in s3:// have no times
    times = [Path(each).stat().st_mtime_ns for each in train.files.paths if Path(each).exists()]
    determined_by = json.dumps([config.described, train.files.digest, times, train.files.schema.to_string(), split])
    path = folder / f"{sha256(determined_by.encode()).hexdigest()[:16]}.json"
    with _locked(folder / _LOCK):
        if path.exists():
            return _read(path, config)
        fitted = fitting.fit(config, parts)
        with _naming(path):
            for other in folder.glob("*.json"):
                other.unlink()
            kept = {"rows": fitted.rows, "transform": fitted.transform.to_json()}
            write_whole(path, json.dumps(kept).encode())
        return fitted


def _read(path: Path, config: Config) -> Fitted:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Fitted(config.compiled.load(content["transform"]), int(content["rows"]))
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        raise StorageError(
            f"cannot read the fitted features from {path}: {type(error).__name__}: {error}",
            hint=f"remove the file to fit again: rm {shlex.quote(str(path))}",
        ) from error


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {error.filename or path}: {error.strerror or error}") from error


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _logger.info("waiting for another process of the job, which fits the features")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file, creating its folder. The kernel releases the lock when the process ends."""
    with _naming(path):
        make_folders(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            _lock(descriptor)
        except OSError as error:
            raise StorageError(
                f"cannot lock {path}: {error.strerror or error}",
                hint="set PERSIA_RUN_DIR to a folder on a file system with file locks (flock)",
            ) from error
        yield
    finally:
        os.close(descriptor)
