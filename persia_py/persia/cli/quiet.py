"""The log level of commands."""

import os


def only_warnings(*, evaluations: bool = True) -> None:
    """Log warnings and errors only, unless ``LOG_LEVEL`` or ``PERSIA_LOG`` says otherwise.

    Args:
        evaluations: Whether to log warnings about ids without a row too. They are common while a model is trained.
    """
    if os.environ.get("LOG_LEVEL", "").strip():
        return
    from persia.runtime.logging import named_levels, setLogger

    if "" in named_levels():
        return
    setLogger(log_level="WARNING")
    if not evaluations:
        setLogger("persia.evaluation", log_level="ERROR")


def log_all() -> None:
    """Log everything, and show full tracebacks (``--verbose``). Child processes inherit this."""
    os.environ["LOG_LEVEL"] = "DEBUG"
    from persia.runtime.logging import setLogger

    setLogger(log_level="DEBUG")  # modules have created their loggers before the variable was set
