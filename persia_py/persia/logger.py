"""Loggers of persia: one format, level from ``LOG_LEVEL`` (default INFO), to standard error."""

import logging
import os
import sys

from persia.errors import ConfigError

_ROOT = "persia"
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setLogger(name: str = _ROOT, log_level: int | str | None = None, **_ignored: object) -> logging.Logger:
    """Configure and return the logger called ``name``.

    Args:
        name: The logger; handlers are attached once.
        log_level: A level of :mod:`logging`, by number or name; None means ``LOG_LEVEL``, else INFO.
        _ignored: Arguments PersiaML had for colours and files; accepted, without effect.
    """
    level = log_level if log_level is not None else os.environ.get("LOG_LEVEL", "INFO").upper() or "INFO"
    known = logging.getLevelNamesMapping() if hasattr(logging, "getLevelNamesMapping") else logging._nameToLevel
    if isinstance(level, str) and level.upper() not in known:
        raise ConfigError(f"LOG_LEVEL={level!r}: want one of {', '.join(sorted(known))}")
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    return logger


def get_default_logger() -> logging.Logger:
    """Return persia's own logger, configured on first use."""
    logger = logging.getLogger(_ROOT)
    return logger if logger.handlers else setLogger()


def get_logger(name: str) -> logging.Logger:
    """Return a logger below persia's own: ``get_logger("data")`` is ``persia.data``."""
    get_default_logger()
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
