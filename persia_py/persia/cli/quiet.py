"""How much verbs log."""

import os


def only_warnings(*, evaluations: bool = True) -> None:
    """Log warnings and errors only, unless ``LOG_LEVEL`` or ``PERSIA_LOG`` says otherwise.

    Args:
        evaluations: Also those about ids without a row, which are usual while a model is trained.
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
    """Log all, and show whole tracebacks: ``--verbose``. Processes that this one starts do so too."""
    os.environ["LOG_LEVEL"] = "DEBUG"
    from persia.runtime.logging import setLogger

    setLogger(log_level="DEBUG")  # it is configured already: modules have their loggers when they are imported
