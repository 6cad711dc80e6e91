"""Files, programs and ports of this host."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from persia.runtime.errors import ConfigError, UsageError


def load_yaml(filepath: str | os.PathLike[str]) -> Any:
    """Return the content of a YAML file.

    Raises:
        ConfigError: The file is missing, unreadable, or no YAML.
    """
    try:
        with Path(filepath).open(encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{filepath}: {error}") from error


def dump_yaml(content: Mapping[str, Any], filepath: str | os.PathLike[str]) -> None:
    """Write ``content`` as a YAML file, keys in their order."""
    with Path(filepath).open("w", encoding="utf-8") as file:
        yaml.safe_dump(dict(content), file, sort_keys=False)


def run_command(cmd: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run ``cmd`` to its end with ``env`` added to this process's environment.

    Raises:
        subprocess.CalledProcessError: It ended with another status than 0.
    """
    return subprocess.run([str(part) for part in cmd], env={**os.environ, **(env or {})}, check=True)


def resolve_binary_execute_path(binary_name: str) -> str:
    """Return the path of a program: the one in ``THIRD_PARTY_PATH`` if there, else the first on ``PATH``.

    A Python environment that is used without being activated counts as the last folder of ``PATH``.

    Raises:
        UsageError: It is in neither.
    """
    override = os.environ.get("THIRD_PARTY_PATH", "")
    if override:
        candidate = Path(override) / binary_name
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which(binary_name) or shutil.which(binary_name, path=str(Path(sys.executable).parent))
    if found is None:
        raise UsageError(
            f"{binary_name}: neither in THIRD_PARTY_PATH ({override or 'unset'}) nor on PATH "
            "(in a clone, make setup builds persia's own)"
        )
    return found


def find_free_port(port: int | None = None) -> int:
    """Return ``port`` if it can be bound on loopback, else one that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
