"""Loggers of persia, to standard error: ``LOG_LEVEL`` (default info), and ``LOG_FORMAT``, text (default) or json."""

import json
import logging
import os
import sys
from datetime import datetime, timezone

from persia.runtime.errors import ConfigError
from persia.runtime.settings import SERVED

_ROOT = "persia"
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_LEVELS = {"WARNING": "warn", "CRITICAL": "error"}
"""Where the servers have another name for a level."""


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


def setLogger(name: str = _ROOT, log_level: int | str | None = None, **_ignored: object) -> logging.Logger:
    """Configure and return the logger called ``name``.

    Args:
        name: The logger; handlers are attached once.
        log_level: A level of :mod:`logging`, by number or name, or ``trace``, which is debug here; None means
            ``LOG_LEVEL``, else INFO.
        _ignored: PersiaML's arguments for colours and files; accepted, without effect.

    Raises:
        ConfigError: The level is unknown, or ``LOG_FORMAT`` is neither json nor text.
    """
    level = log_level if log_level is not None else os.environ.get("LOG_LEVEL", "").strip() or "INFO"
    if isinstance(level, str):
        names = logging.getLevelNamesMapping() if hasattr(logging, "getLevelNamesMapping") else logging._nameToLevel
        known = {**names, "TRACE": logging.DEBUG}
        if level.upper() not in known:
            raise ConfigError(f"LOG_LEVEL={level!r}: want one of {', '.join(sorted(known))}")
        level = known[level.upper()]
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_formatter())
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)
    return logger


def get_default_logger() -> logging.Logger:
    """Return persia's own logger, configured on first use."""
    logger = logging.getLogger(_ROOT)
    return logger if logger.handlers else setLogger()


def get_logger(name: str) -> logging.Logger:
    """Return a logger below persia's own: ``get_logger("data")`` is ``persia.data``."""
    get_default_logger()
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
