"""The name of a job, the folder of its run, and whether that run is finished."""

import contextlib
import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from persia.runtime import files
from persia.runtime.errors import ConfigError
from persia.runtime.settings import settings

RUN = "RUN"
"""Names the current run; removed when it is finished."""

SUMMARY = "summary.json"
"""Written into the run's folder by rank 0, at the end and only then."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def job_name() -> str:
    """Return ``PERSIA_JOB``, else the job's name in the global configuration.

    Raises:
        ConfigError: The name has other characters than letters, digits, ``.``, ``_`` and ``-``, or more than 64.
    """
    name, origin = settings.job, "PERSIA_JOB"
    if name is None:
        name, origin = _configured_name()
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{origin}: job name {name!r}, allowed: 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return name


def _checked(name: str, origin: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,80}", name) or name.startswith("."):
        raise ConfigError(f"{origin}: run name {name!r}; remove the file to begin a new run")
    return name


def run_dir() -> Path:
    """Return ``PERSIA_RUN_DIR``, else ``runs/JOB`` below the working directory."""
    return Path(settings.run_dir or Path("runs", job_name()))


def run_name() -> str:
    """Return the name of the current run in :func:`run_dir`; if there is none, start a new run.

    For rank 0. A run that is interrupted and restarted keeps its name: ``JOB-`` and the time of its start, in UTC.

    Raises:
        ConfigError: The file ``RUN`` in the run's folder cannot be read or written.
    """
    path = run_dir() / RUN
    try:
        with contextlib.suppress(FileNotFoundError):
            return _checked(path.read_text(encoding="utf-8").strip(), str(path))
        name = f"{job_name()}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, f"{name}\n".encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; it names the current run") from error
    return name


def finished_summary(folder: Path, *, of: str | None = None) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None.

    Args:
        folder: The run's folder; it need not exist.
        of: The job's name: a summary of another one does not count. None takes any.

    Raises:
        ConfigError: The file exists and cannot be read as a summary.
    """
    path = folder / SUMMARY
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; remove the file to train again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a summary; remove the file to train again")
    if content.get("status") != "finished" or of not in (None, content.get("job")):
        return None
    return content


def _configured_name() -> tuple[str, str]:
    from persia.runtime.config_files import find_config, read_config
    from persia_core import config

    path = find_config("PERSIA_GLOBAL_CONFIG", "global_config.yml")
    if path is None:
        return config.GlobalConfig().job_name, "the default"
    return config.parse_global_config(*read_config(path)).job_name, str(path)
