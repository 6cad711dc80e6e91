"""Loggers of persia, to standard error: ``LOG_LEVEL`` (default info), and ``LOG_FORMAT``, text (default) or json.

``PERSIA_LOG`` sets levels by name: ``persia.wire=debug,persia.loop=info``. A level without a name is that of all
others, in place of ``LOG_LEVEL``. Servers and the engine read the same text; each process ignores names of the others.
"""

import json
import logging
import os
import sys
from datetime import datetime, timezone
from typing import Any, TextIO

from persia.runtime.errors import ConfigError
from persia.runtime.settings import SERVED

_ROOT = "persia"
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_LEVELS = {"WARNING": "warn", "CRITICAL": "error"}
"""Levels for which the servers have another name."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the keys of the servers' logs, and ``exception`` if one was logged."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        service, replica = _place()
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": _LEVELS.get(record.levelname, record.levelname.lower()),
            "service": service,
            "replica": replica,
            "message": record.getMessage(),
            "target": record.name,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what is standard error when a record is logged. A live progress line takes its place for a while."""

    def __init__(self) -> None:
        """Make the handler without a stream of its own."""
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr


def _place() -> tuple[str, int]:
    """Return the service of this process in its job, and its index."""
    if rank := os.environ.get("RANK", "").strip():
        service, index = "persia-trainer", rank
    else:
        service = "persia-data" if SERVED in os.environ else "persia"
        index = os.environ.get("REPLICA_INDEX", "").strip()
    return service, int(index) if index.isdecimal() else 0


def _formatter() -> logging.Formatter:
    name = os.environ.get("LOG_FORMAT", "").strip() or "text"
    if name not in {"json", "text"}:
        raise ConfigError(f"LOG_FORMAT={name!r}: want json or text")
    return JsonFormatter() if name == "json" else logging.Formatter(_FORMAT)


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
        log_level: A level of :mod:`logging`, by number or name, or ``trace``, which is debug here; None means the
            level without a name in ``PERSIA_LOG``, else ``LOG_LEVEL``, else INFO.
        log_filename: The file that gets all records, if ``enable_file_logger`` is set.
        enable_file_logger: Append to ``log_filename``.
        err_redirect_filepath: The file that gets records above ``err_redirect_level``, if ``enable_err_redirect`` is
            set.
        enable_err_redirect: Append to ``err_redirect_filepath``.
        err_redirect_level: The highest level that is not written to that file.

    Raises:
        ConfigError: A level is unknown, ``LOG_FORMAT`` is neither json nor text, or a file cannot be opened.
    """
    levels = named_levels()
    level = log_level if log_level is not None else os.environ.get("LOG_LEVEL", "").strip() or "INFO"
    if isinstance(level, str):
        level = _level(level, f"LOG_LEVEL={level!r}")
    if log_level is None:
        level = levels.get("", level)
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = StderrHandler()
        handler.setFormatter(_formatter())
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
    """Return the levels in ``PERSIA_LOG`` by the names of loggers; an empty name is that of all others.

    Raises:
        ConfigError: A level is unknown, or a name is not one of persia's.
    """
    text = os.environ.get("PERSIA_LOG", "")
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, level = part.rpartition("=")
        name = name.strip()
        if name and name != _ROOT and not name.startswith(f"{_ROOT}."):
            raise ConfigError(f"PERSIA_LOG={text!r}: found {name!r}, want names such as {_ROOT}.wire or {_ROOT}.loop")
        found[name] = _level(level.strip(), f"PERSIA_LOG={text!r}: {part!r}")
    return found


def _level(text: str, place: str) -> int:
    names = logging.getLevelNamesMapping() if hasattr(logging, "getLevelNamesMapping") else logging._nameToLevel
    known: dict[str, int] = {**names, "TRACE": logging.DEBUG}
    if text.upper() not in known:
        raise ConfigError(f"{place}: want one of {', '.join(sorted(known))}")
    return known[text.upper()]


def _append_to(logger: logging.Logger, path: str | os.PathLike[str], level: int) -> None:
    """Append the records of ``level`` and above to a file, each once."""
    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"log file {os.fspath(path)}: {error.strerror or error}") from error
    whole = handler.baseFilename
    if any(isinstance(each, logging.FileHandler) and each.baseFilename == whole for each in logger.handlers):
        handler.close()
        return
    handler.setLevel(level)
    handler.setFormatter(_formatter())
    logger.addHandler(handler)


def get_default_logger(name: str | None = None, **options: Any) -> logging.Logger:
    """Return persia's own logger, or with ``name`` one below it: ``get_default_logger("train")`` is ``persia.train``.

    Args:
        name: The name below ``persia``; None means persia's own logger.
        **options: Arguments of :func:`setLogger`, with which the logger is configured.
    """
    logger = logging.getLogger(_ROOT)
    if not logger.handlers:
        setLogger()
    if name is not None:
        logger = logging.getLogger(_below_root(name))
    return setLogger(logger.name, **options) if options else logger


def get_logger(name: str) -> logging.Logger:
    """Return a logger below persia's own: ``get_logger("data")`` is ``persia.data``."""
    return get_default_logger(name)


def _below_root(name: str) -> str:
    return name if name.startswith(_ROOT) else f"{_ROOT}.{name}"
