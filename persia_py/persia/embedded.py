"""The embedded mode: the embedding store inside this process, nothing else to start."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from persia import env
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.errors import ConfigError, UsageError
from persia.logger import get_logger
from persia_core import config as _config
from persia_core import engine as _engine

if TYPE_CHECKING:
    from persia.embedding.optim import Optimizer

_logger = get_logger("embedded")


class EmbeddedContext:
    """One engine over one in-process store, shared by all nested contexts.

    Attributes:
        engine: The engine.
        embedding_config_path: The file that defines the slots.
    """

    def __init__(self) -> None:
        if env.get_world_size() > 1:
            raise UsageError(
                f"WORLD_SIZE={env.get_world_size()}: the embedded mode keeps all rows in one process and trains with "
                "one rank; unset WORLD_SIZE and RANK"
            )
        self.embedding_config_path = find_config("PERSIA_EMBEDDING_CONFIG", "embedding_config.yml")
        if self.embedding_config_path is None:
            raise ConfigError(
                "no embedding_config.yml: set PERSIA_EMBEDDING_CONFIG to its path, or put it into a folder config/ "
                "beside the script"
            )
        global_path = find_config("PERSIA_GLOBAL_CONFIG", "global_config.yml")
        embedding = _config.parse_embedding_config(*read_config(self.embedding_config_path))
        general = _config.parse_global_config(*read_config(global_path)) if global_path else _config.GlobalConfig()
        for warning in (*embedding.warnings, *general.warnings):
            _logger.warning("%s", warning)
        _logger.info("embedding slots from %s, embedded store", self.embedding_config_path)
        self.engine = _engine.Engine(embedding, general)
        self._config = get_default_embedding_config()
        self._optimizer: Optimizer | None = None
        self._seed: int | None = None

    def begin(
        self,
        *,
        optimizer: "Optimizer | None" = None,
        config: EmbeddingConfig | None = None,
        resume: tuple[int, int, int] | None = None,
    ) -> None:
        """Start a new epoch of the run.

        Args:
            optimizer: None keeps the one in force.
            config: None keeps the one in force.
            resume: Epoch, step and seed of the checkpoint whose rows were just loaded.
        """
        import torch

        self._optimizer = optimizer or self._optimizer
        self._config = config or self._config
        after_epoch, step, seed = resume or (0, self.engine.step, None)
        if seed is not None:
            self._seed = seed
        elif self._seed is None:
            self._seed = torch.initial_seed() % 2**64
        self.engine.begin(
            seed=self._seed,
            optimizer=None if self._optimizer is None else self._optimizer.spec,
            initializer=self._config.initializer,
            admit_probability=self._config.admit_probability,
            weight_bound=self._config.weight_bound,
            after_epoch=after_epoch,
            step=step,
        )

    @property
    def optimizer(self) -> "Optimizer | None":
        """The optimizer of the run; None while only evaluating."""
        return self._optimizer

    def close(self) -> None:
        """End the engine's threads and give the rows' memory back."""
        self.engine.close()


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
