"""The loggers of persia.

Loggers write to standard error. ``LOG_LEVEL`` sets the level (default info), and ``LOG_FORMAT`` the format (text, the
default, or json).

A JSON line has the keys ``ts``, ``level``, ``event``, ``run_id``, ``service``, ``replica``, ``rank``, ``step``,
``node`` and ``target``, as far as known, and the ``extra`` of the caller. Servers write the same keys.

``PERSIA_LOG`` sets levels by name: ``persia.wire=debug,persia.loop=info``. A level without a name applies to all other
loggers, instead of ``LOG_LEVEL``. Servers and the engine read the same variable. Each process ignores the names that
belong to other processes.
"""

import json
import logging
import os
import socket
import sys
from datetime import datetime, timezone
from typing import Any, TextIO

from persia.runtime.errors import ConfigError
from persia.runtime.settings import SERVED

_ROOT = "persia"
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_LEVELS = {"WARNING": "warn", "CRITICAL": "error"}
"""Levels for which the servers use another name."""


REPORTS = f"{_ROOT}.report"
"""The logger for the reports of a run. They appear only as JSON lines, because the text output of a run already shows
them."""

context: dict[str, Any] = {}
"""The state of this process, as keys of lines: ``run_id``, the name of its run or job, and ``step``, the last step."""

_OF_RECORDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""The attributes of every log record; other attributes are ``extra``."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the keys of the servers' logs, and ``exception`` if one was logged."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds")
        line = {
            "ts": time.replace("+00:00", "Z"),
            "level": _LEVELS.get(record.levelname, record.levelname.lower()),
            "event": record.getMessage(),
            **_place(),
            **context,
            "node": socket.gethostname(),
            "target": record.name,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OF_RECORDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes each record to the current ``sys.stderr``, which a progress line may replace temporarily."""

    def __init__(self) -> None:
        """Create the handler without a stream of its own."""
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """The current standard error."""
        return sys.stderr


def _place() -> dict[str, Any]:
    """Return the job, service and index of this process, and its rank if it is one."""
    job = os.environ.get("PERSIA_JOB", "").strip()
    named = {"run_id": job} if job else {}
    rank = os.environ.get("RANK", "").strip()
    if rank:
        number = int(rank) if rank.isdecimal() else 0
        return {**named, "service": "persia-trainer", "replica": number, "rank": number}
    index = os.environ.get("REPLICA_INDEX", "").strip()
    service = "persia-data" if SERVED in os.environ else "persia"
    return {**named, "service": service, "replica": int(index) if index.isdecimal() else 0}


def _formatter() -> logging.Formatter:
    return JsonFormatter() if _writes_json() else logging.Formatter(_FORMAT)


def _writes_json() -> bool:
    name = os.environ.get("LOG_FORMAT", "").strip() or "text"
    if name not in {"json", "text"}:
        raise ConfigError(f"LOG_FORMAT={name!r}: expected json or text", hint="correct or unset LOG_FORMAT")
    return name == "json"


def _is_no_report(record: logging.LogRecord) -> bool:
    return record.name != REPORTS


def setLogger(
    name: str = _ROOT,
    log_level: int | str | None = None,
    log_filename: str | os.PathLike[str] = "train.log",
    enable_file_logger: bool = False,
    err_redirect_filepath: str | os.PathLike[str] = "error.log",
    enable_err_redirect: bool = False,
    err_redirect_level: int = logging.INFO,
) -> logging.Logger:
    """Configure and return the logger called ``name``.

    Args:
        name: The logger; its handler for standard error is attached once.
        log_level: A level of :mod:`logging`, by number or name, or ``trace``, which means debug; None means the level
            without a name in ``PERSIA_LOG``, then ``LOG_LEVEL``, then INFO.
        log_filename: The file for all records, if ``enable_file_logger`` is set.
        enable_file_logger: Whether to append to ``log_filename``.
        err_redirect_filepath: The file for records above ``err_redirect_level``, if ``enable_err_redirect`` is set.
        enable_err_redirect: Whether to append to ``err_redirect_filepath``.
        err_redirect_level: The highest level that is not written to that file.

    Raises:
        ConfigError: A level is unknown, ``LOG_FORMAT`` is neither json nor text, or a file cannot be opened.
    """
    levels = named_levels()
    level = log_level if log_level is not None else os.environ.get("LOG_LEVEL", "").strip() or "INFO"
    if isinstance(level, str):
        level = _level(level, f"{'LOG_LEVEL' if log_level is None else 'log_level'}={level!r}")
    if log_level is None:
        level = levels.get("", level)
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = StderrHandler()
        handler.setFormatter(_formatter())
        if not _writes_json():
            handler.addFilter(_is_no_report)
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)
    for each, own in levels.items():
        if each:
            logging.getLogger(each).setLevel(own)
    if enable_file_logger:
        _append_to(logger, log_filename, logging.NOTSET)
    if enable_err_redirect:
        _append_to(logger, err_redirect_filepath, err_redirect_level + 1)
    return logger


def named_levels() -> dict[str, int]:
    """Return the levels in ``PERSIA_LOG`` by logger name; the empty name means all other loggers.

    Raises:
        ConfigError: A level is unknown, or a name is not one of persia's.
    """
    text = os.environ.get("PERSIA_LOG", "")
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, level = part.rpartition("=")
        name = name.strip()
        if name and name != _ROOT and not name.startswith(f"{_ROOT}."):
            raise ConfigError(
                f"PERSIA_LOG={text!r}: found {name!r}, expected names such as {_ROOT}.wire or {_ROOT}.loop",
                hint="correct or unset PERSIA_LOG",
            )
        found[name] = _level(level.strip(), f"PERSIA_LOG={text!r}: {part!r}")
    return found


def _level(text: str, place: str) -> int:
    names = logging.getLevelNamesMapping() if hasattr(logging, "getLevelNamesMapping") else logging._nameToLevel
    known: dict[str, int] = {**names, "TRACE": logging.DEBUG}
    if text.upper() not in known:
        raise ConfigError(f"{place}: expected one of {', '.join(sorted(known))}", hint="correct the level")
    return known[text.upper()]


def _append_to(logger: logging.Logger, path: str | os.PathLike[str], level: int) -> None:
    """Append the records of ``level`` and above to a file, without duplicates."""
    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write to the log file {os.fspath(path)}: {error.strerror or error}",
            hint="check the path, its owner and the free space",
        ) from error
    whole = handler.baseFilename
    if any(isinstance(each, logging.FileHandler) and each.baseFilename == whole for each in logger.handlers):
        handler.close()
        return
    handler.setLevel(level)
    handler.setFormatter(_formatter())
    logger.addHandler(handler)


def get_default_logger(name: str | None = None, **options: Any) -> logging.Logger:
    """Return persia's root logger, or with ``name`` one below it: ``get_default_logger("train")`` is ``persia.train``.

    Args:
        name: The name below ``persia``; None means the root logger of persia.
        **options: Arguments of :func:`setLogger` for the logger.
    """
    logger = logging.getLogger(_ROOT)
    if not logger.handlers:
        setLogger()
    if name is not None:
        logger = logging.getLogger(_below_root(name))
    return setLogger(logger.name, **options) if options else logger


def get_logger(name: str) -> logging.Logger:
    """Return a logger below persia's root logger: ``get_logger("data")`` is ``persia.data``."""
    return get_default_logger(name)


def next_step(error: BaseException) -> str:
    """Return the hint of an error as the end of a line; empty if the error has no hint."""
    hint = getattr(error, "hint", "")
    return f"; next: {hint}" if hint else ""


def _below_root(name: str) -> str:
    return name if name.startswith(_ROOT) else f"{_ROOT}.{name}"
