"""The paths of the two YAML files."""

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
        path = Path(given)
        if not path.is_file():
            raise ConfigError(f"{variable}={given}: no such file (seen from {Path.cwd()})")
        return path
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path(script).resolve().parent] if script else []
    for folder in (*folders, Path.cwd()):
        path = folder / "config" / name
        if path.is_file():
            return path
    return None


def read_config(path: Path) -> tuple[str, str]:
    """Return a configuration file's text and name.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
