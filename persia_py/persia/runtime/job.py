"""The name of a job, the folder of its run, and whether the run is finished."""

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia.runtime import files
from persia.runtime.errors import ConfigError, StorageError
from persia.runtime.logging import context, get_logger
from persia.runtime.settings import settings

if TYPE_CHECKING:
    from persia_core.config import GlobalConfig

_logger = get_logger("job")

RUN = "RUN"
"""The file that names the current run; it is removed when the run is finished."""

FINISHED = "FINISHED"
"""The file that marks the checkpoints and replicas of a finished run, from which no later run resumes."""

SUMMARY = "summary.json"
"""The file that rank 0 writes into the run's folder, only at the end of the run."""

MANIFEST = "MANIFEST.json"
"""The file whose presence makes a folder, or the objects below a prefix, a checkpoint."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def job_name() -> str:
    """Return ``PERSIA_JOB``, or the job's name in the global configuration.

    Raises:
        ConfigError: The name is empty, has more than 64 characters, or has characters other than letters, digits,
            ``.``, ``_`` and ``-``; or the global configuration has errors.
    """
    name, origin = settings.job, "PERSIA_JOB"
    if name is None:
        name, origin = _configured_name()
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{origin}: found the job name {name!r}, allowed: 1 to 64 of the characters A-Z a-z 0-9 . _ -",
            hint=f"correct the name in {origin}",
        )
    if settings.nats_url is not None:
        context["run_id"] = name
    return name


def _checked(name: str, origin: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,80}", name) or name.startswith("."):
        raise ConfigError(
            f"{origin}: found {name!r}, expected the name of a run: 1 to 80 of the characters A-Z a-z 0-9 . _ -, with "
            "no dot at the start",
            hint=_without(origin),
        )
    return name


def _without(path: str | Path) -> str:
    """Return the hint for a file that does not name a run."""
    return (
        f"remove the file: rm {shlex.quote(str(path))}; then the newest run that has a checkpoint continues if it is "
        "not finished, and otherwise a new run begins"
    )


def run_dir() -> Path:
    """Return ``PERSIA_RUN_DIR``, else ``runs/JOB`` below the working directory."""
    return Path(settings.run_dir or Path("runs", job_name()))


def run_name(find: Callable[[], str | None] | None = None) -> str:
    """Return the name of the current run in :func:`run_dir`; if there is none, start a run.

    Only rank 0 calls this. A run that is interrupted and restarted keeps its name: ``JOB-`` and its start time in UTC.

    Args:
        find: Called if the file ``RUN`` is missing or empty, as after the loss of a disk or of power. Returns the name
            of an interrupted run, which becomes the current one; None starts a new run. The default is
            :func:`interrupted_run`.

    Raises:
        ConfigError: The file ``RUN`` in the run's folder does not contain a run name.
        StorageError: The name cannot be read or written.
        PersiaError: As raised by ``find``.
    """
    path = run_dir() / RUN
    with _naming(path), contextlib.suppress(FileNotFoundError):
        if name := path.read_text(encoding="utf-8").strip():
            return _checked(name, str(path))
    found = (find or interrupted_run)()
    if found is not None:
        _logger.warning(
            "%s is missing or empty: resuming run %s, which is not finished; to begin a new run, move the checkpoints "
            "and replicas of %s away and remove %s",
            path,
            found,
            found,
            path,
        )
    name = found or f"{job_name()}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    with _naming(path):
        files.make_folders(path.parent)
        files.write_whole(path, f"{name}\n".encode())
    return name


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Enclose access to the file that names the current run.

    Raises:
        ConfigError: The file is not UTF-8.
        StorageError: The operating system refuses the access.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected the name of a run, found bytes that are not UTF-8: {error}", hint=_without(path)
        ) from error
    except OSError as error:
        raise StorageError(f"cannot access the file that names the current run, {path}: {error.strerror}") from error


def target_of(latest: Path) -> Path:
    """Return the path, in the folder of the file ``LATEST``, to which this file points.

    Raises:
        StorageError: The file cannot be read.
    """
    try:
        return latest.parent / latest.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StorageError(f"cannot read {latest}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StorageError(
            f"cannot read {latest}: expected the name of a folder next to it, found bytes that are not UTF-8",
            hint="specify the folder itself instead of this file",
        ) from error


def is_run_of(name: str, job: str) -> bool:
    """Whether this is the name of a run of job ``job``."""
    return re.fullmatch(rf"{re.escape(job)}-\d{{8}}-\d{{6}}", name) is not None


def interrupted_run() -> str | None:
    """Return this job's newest run that has a checkpoint in the folder ``PERSIA_CKPT_DIR``.

    Return None if there is no such run, or if it is finished.
    """
    root, job = settings.checkpoint_root, job_name()
    runs = sorted(path for path in Path(root).glob(f"{job}-*") if is_run_of(path.name, job)) if root else []
    newest = next((run for run in reversed(runs) if next(run.glob(f"*/{MANIFEST}"), None)), None)
    return None if newest is None or (newest / FINISHED).exists() else newest.name


def finish_run() -> None:
    """Mark the current run as finished, so that the next one starts from the beginning.

    Raises:
        OSError: A file cannot be written or removed.
    """
    path, root = run_dir() / RUN, settings.checkpoint_root
    with contextlib.suppress(FileNotFoundError):
        name = path.read_text(encoding="utf-8", errors="replace").strip()
        if root and name and Path(root, name).is_dir():
            files.write_whole(Path(root, name, FINISHED), b"")
    path.unlink(missing_ok=True)


def finished_summary(folder: Path, *, of: str | None = None) -> dict[str, Any] | None:
    """Return the summary of a finished run; None if there is no such summary.

    Args:
        folder: The run's folder; it need not exist.
        of: The name of the job; a summary of another job is ignored. None accepts any job.

    Raises:
        ConfigError: The file exists and cannot be read as a summary.
    """
    return _summary(folder, "finished", of)


def stopped_summary(folder: Path, *, of: str) -> dict[str, Any] | None:
    """Return the summary of a run that stopped early, for example because of its budget; None if there is none.

    Such a run can be resumed.

    Args:
        folder: The run's folder; it need not exist.
        of: The name of the job; a summary of another job is ignored.

    Raises:
        ConfigError: The file exists and cannot be read as a summary.
    """
    return _summary(folder, "stopped", of)


def _summary(folder: Path, status: str, of: str | None) -> dict[str, Any] | None:
    path = folder / SUMMARY
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _no_summary(path, getattr(error, "strerror", None) or str(error)) from error
    if not isinstance(content, dict):
        raise _no_summary(path, "expected a JSON object")
    if content.get("status") != status or of not in (None, content.get("job")):
        return None
    return content


def _no_summary(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot read {path}, the summary of a run: {why}",
        hint=f"to train again, remove the file: rm {shlex.quote(str(path))}",
    )


def serves_metrics() -> bool:
    """Return whether processes of this job serve metrics if no address is set, according to the global configuration.

    Raises:
        ConfigError: The file has errors.
    """
    return _configured()[0].enable_metrics


def _configured_name() -> tuple[str, str]:
    general, origin = _configured()
    return general.job_name, origin


def _configured() -> "tuple[GlobalConfig, str]":
    """Return the global configuration and its source."""
    from persia.runtime.config_files import GLOBAL_CONFIG, find_config, read_config
    from persia_core import config

    path = find_config(GLOBAL_CONFIG, "global_config.yml")
    if path is None:
        return config.GlobalConfig(), "the default"
    return config.parse_global_config(*read_config(path)), str(path)
