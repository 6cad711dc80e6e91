"""The paths of the YAML files."""

import sys
from pathlib import Path

from persia.runtime import settings
from persia.runtime.errors import ConfigError


def find_config(variable: str, name: str) -> Path | None:
    """Return the configuration file: that of the variable, else ``config/NAME`` beside the script or below the cwd.

    Raises:
        ConfigError: The variable names a file that does not exist.
    """
    given = settings.variable(variable)
    if given is not None:
        return given_config(variable, given)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path(script).resolve().parent] if script else []
    for folder in (*folders, Path.cwd()):
        path = folder / "config" / name
        if path.is_file():
            return path
    return None


def find_persia_yml() -> Path | None:
    """Return the ``persia.yml``: that of ``PERSIA_CONFIG``, else the one in the working directory.

    Raises:
        ConfigError: The variable names a file that does not exist.
    """
    given = settings.variable("PERSIA_CONFIG")
    if given is not None:
        return given_config("PERSIA_CONFIG", given)
    path = Path("persia.yml")
    return path if path.is_file() else None


def given_config(variable: str, given: str) -> Path:
    """Return the configuration file that a variable names.

    Raises:
        ConfigError: There is no such file.
    """
    path = Path(given)
    if not path.is_file():
        raise ConfigError(f"{variable}={given}: no such file (seen from {Path.cwd()})")
    return path


def read_config(path: Path) -> tuple[str, str]:
    """Return a configuration file's text and name.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
