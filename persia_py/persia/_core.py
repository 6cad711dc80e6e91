"""The check that the loaded ``persia_core`` was built from these sources."""

import importlib


def check_core(version: str) -> None:
    """Refuse a missing or stale ``persia_core``.

    Args:
        version: The version of these Python sources.

    Raises:
        ImportError: ``persia_core`` is not installed, or is of another version (``StaleCoreError``).
    """
    try:
        core = importlib.import_module("persia_core")
    except ModuleNotFoundError as error:
        if error.name != "persia_core":
            raise
        raise ImportError(
            "persia_core, the compiled part of persia, is not installed; "
            "install the wheel persia-core, or in a clone run: make setup"
        ) from error
    built = getattr(core, "__version__", "unknown")
    if built != version:
        errors = importlib.import_module("persia_core.errors") if hasattr(core, "errors") else None
        stale = getattr(errors, "StaleCoreError", ImportError)
        raise stale(
            f"{core.__file__} was built as version {built}, these Python sources are version {version}; "
            "build it again: make setup (or remove the file from PYTHONPATH)"
        )
