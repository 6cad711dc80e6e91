"""The two YAML files: where they are, and what they say."""

import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from typing_extensions import Self

from persia.errors import ConfigError
from persia.logger import get_logger
from persia_core import config as _config

_logger = get_logger("configs")


@dataclass(frozen=True)
class Configuration:
    """A run's slots and general settings, parsed and valid.

    Attributes:
        source: What defines the slots, for messages.
        digest: Of that, equal on all ranks of a run.
        embedding: The slots.
        general: The job and its limits.
    """

    source: str
    digest: str
    embedding: _config.EmbeddingConfig
    general: _config.GlobalConfig

    @classmethod
    def find(cls) -> Self:
        """Read both files from where the environment, or a folder ``config/``, has them.

        Raises:
            ConfigError: There is no embedding configuration, or a file is wrong.
        """
        path = find_config("PERSIA_EMBEDDING_CONFIG", "embedding_config.yml")
        if path is None:
            raise ConfigError(
                "no embedding_config.yml: set PERSIA_EMBEDDING_CONFIG to its path, or put it into a folder config/ "
                "beside the script"
            )
        return cls.of(*read_config(path))

    @classmethod
    def of(cls, text: str, source: str) -> Self:
        """Take the text of an embedding configuration; the general one is read from its file, if there is one.

        Raises:
            ConfigError: Either is wrong; every mistake is named.
        """
        path = find_config("PERSIA_GLOBAL_CONFIG", "global_config.yml")
        embedding = _config.parse_embedding_config(text, source)
        general = _config.parse_global_config(*read_config(path)) if path else _config.GlobalConfig()
        for warning in (*embedding.warnings, *general.warnings):
            _logger.warning("%s", warning)
        return cls(source, sha256(text.encode()).hexdigest()[:16], embedding, general)


def find_config(variable: str, name: str) -> Path | None:
    """Return the configuration file: the variable's, else ``config/NAME`` beside the script or below the cwd.

    Raises:
        ConfigError: The variable names a file that is not there.
    """
    given = os.environ.get(variable, "").strip()
    if given:
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
