"""The import path of PersiaML for :mod:`persia.runtime.logging`."""

from persia.runtime.logging import get_default_logger, get_logger, setLogger

__all__ = ["get_default_logger", "get_logger", "setLogger"]
