"""Reads and writes YAML files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from persia.runtime.errors import ConfigError


def load_yaml(filepath: str | os.PathLike[str]) -> Any:
    """Return the content of a YAML file.

    Raises:
        ConfigError: The file cannot be read, or is not valid YAML.
    """
    try:
        with Path(filepath).open(encoding="utf-8") as file:
            return yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {filepath}: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{filepath}: not valid YAML in UTF-8: {error}") from error


def dump_yaml(content: Mapping[str, Any], filepath: str | os.PathLike[str]) -> None:
    """Write ``content`` as a YAML file, keeping the order of keys."""
    with Path(filepath).open("w", encoding="utf-8") as file:
        yaml.safe_dump(dict(content), file, sort_keys=False)
