"""The paths of the YAML files: ``persia.yml``, or ``embedding_config.yml`` and ``global_config.yml``."""

import sys
from pathlib import Path

from persia.runtime import settings
from persia.runtime.errors import ConfigError

CONFIG = "PERSIA_CONFIG"
"""The variable that names the ``persia.yml`` of a job."""

CONFIG_FOLDER = "PERSIA_CONFIG_FOLDER"
"""The variable that names the folder to which paths in :data:`CONFIG` are relative, if it is not the folder of the
file."""

EMBEDDING_CONFIG = "PERSIA_EMBEDDING_CONFIG"
"""The variable that names the ``embedding_config.yml`` of a job without :data:`CONFIG`."""

GLOBAL_CONFIG = "PERSIA_GLOBAL_CONFIG"
"""The variable that names the ``global_config.yml`` of a job."""


def persia_config() -> Path | None:
    """Return the ``persia.yml`` that ``PERSIA_CONFIG`` names; None if the variable is not set.

    Raises:
        ConfigError: The file does not exist, or ``PERSIA_EMBEDDING_CONFIG`` is also set.
    """
    given, other = settings.variable(CONFIG), settings.variable(EMBEDDING_CONFIG)
    if given is None:
        return None
    if other is not None:
        raise ConfigError(
            f"{CONFIG} is {given}, and {EMBEDDING_CONFIG} is {other}: slots come from one file",
            hint="unset one of the two variables",
        )
    if not Path(given).is_file():
        raise _no_file(CONFIG, given)
    return Path(given)


def find_config(variable: str, name: str) -> Path | None:
    """Return the configuration file: that of the variable, or ``config/NAME`` next to the script or below the cwd.

    Return None if no file is found.

    Raises:
        ConfigError: The variable names a file that does not exist.
    """
    given = settings.variable(variable)
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise _no_file(variable, given)
        return path
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path(script).resolve().parent] if script else []
    for folder in (*folders, Path.cwd()):
        path = folder / "config" / name
        if path.is_file():
            return path
    return None


def read_config(path: Path) -> tuple[str, str]:
    """Return the text and the name of a configuration file.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}",
            hint="correct the path, or let the user of this process read the file",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path} as UTF-8: {error}", hint="save the file in UTF-8") from error


def find_persia_yml() -> Path | None:
    """Return the ``persia.yml``: that of ``PERSIA_CONFIG``, or the one in the working directory.

    Return None if there is no such file.

    Raises:
        ConfigError: The variable names a file that does not exist.
    """
    given = settings.variable(CONFIG)
    if given is None:
        path = Path("persia.yml")
        return path if path.is_file() else None
    if not Path(given).is_file():
        raise _no_file(CONFIG, given)
    return Path(given)


def _no_file(variable: str, given: str) -> ConfigError:
    return ConfigError(
        f"{variable}={given}: no such file (working directory: {Path.cwd()})",
        hint=f"correct the path in {variable}, or unset the variable",
    )
