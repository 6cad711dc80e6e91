"""The log files of a run: ``logs/NAME.log`` in its folder, one for each process, with rotation."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

from persia.runtime.errors import StorageError
from persia.runtime.logging import REPORTS, JsonFormatter, context, get_default_logger

FOLDER = "logs"
"""The folder of the log files, in the folder of a run."""
MAX_BYTES = 10 << 20
"""The size at which ``NAME.log`` is rotated to ``NAME.log.1``, and so on. Equal to the value in docker-compose.yaml."""
BACKUPS = 2
"""The number of rotated files that are kept."""


class LineFile(RotatingFileHandler):
    """A file of log lines. Each line is written immediately. A full disk does not end the process.

    Args:
        path: The file; existing lines are kept.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=BACKUPS, encoding="utf-8")
        self._failed = False

    def write_line(self, line: str) -> None:
        """Append a line."""
        self.emit(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Close the file. Lines for which there is no space are lost."""
        try:
            super().close()
        except OSError:
            self.handleError(logging.makeLogRecord({}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - a name of logging
        """Report once that lines are lost."""
        del record
        if not self._failed:
            self._failed = True
            with contextlib.suppress(OSError, ValueError):
                problem = f"cannot write to the log file {self.baseFilename}: {sys.exc_info()[1]}"
                sys.stderr.write(f"{problem}; lines of this log are lost\n")


@contextlib.contextmanager
def kept(folder: Path, name: str = "train") -> Iterator[Path]:
    """Append the log of this process to ``logs/NAME.log`` in a run's folder, as JSON, and yield the file.

    The file has lines of level info and above, even if standard error gets only warnings. It has lines of lower levels
    only if ``LOG_LEVEL`` requests them.

    Args:
        folder: The folder of the run. Its name becomes the ``run_id`` of the lines.
        name: The name of the file.

    Raises:
        StorageError: The file cannot be opened.
    """
    path = folder / FOLDER / f"{name}.log"
    try:
        path.parent.mkdir(exist_ok=True)
        handler = LineFile(path)
    except OSError as error:
        raise StorageError(f"cannot write to the log file {path}: {error.strerror or error}") from error
    handler.setFormatter(JsonFormatter())
    logger = get_default_logger()
    level, others = logger.level, [(each, each.level) for each in logger.handlers]
    run_id = context.get("run_id")
    for each, own in others:
        each.setLevel(max(own, level))
    logger.addHandler(handler)
    logger.setLevel(min(level, logging.INFO))
    context["run_id"] = folder.name
    try:
        yield path
    except BaseException as error:
        logging.getLogger(REPORTS).error("ended with an error", extra={"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(level)
        for each, own in others:
            each.setLevel(own)
        context.pop("run_id")
        context.pop("step", None)
        if run_id is not None:
            context["run_id"] = run_id


def files(folder: Path) -> dict[str, list[Path]]:
    """Return the log files in a run's folder by name, each with its rotated files, oldest first."""
    found: dict[str, list[Path]] = {}
    for path in sorted((folder / FOLDER).glob("*.log")):
        older = [path.with_name(f"{path.name}.{number}") for number in range(BACKUPS, 0, -1)]
        found[path.stem] = [each for each in (*older, path) if os.access(each, os.R_OK)]
    return found
