"""The embedded mode: the embedding store inside this process, nothing else to start."""

import os
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Settings:
    """How rows start and are updated.

    Attributes:
        optimizer: None while only evaluating.
        config: How rows start, and how far they may go.
    """

    optimizer: "Optimizer | None"
    config: EmbeddingConfig


class EmbeddedContext:
    """One engine over one in-process store, shared by all nested contexts.

    Attributes:
        engine: The engine.
        embedding_config_path: The file that defines the slots.
        settings: What the run's epoch began with.
        trained_step: The last step whose gradients were pushed, or given up.
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
        self.settings = Settings(None, get_default_embedding_config())
        self.trained_step = 0
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

        Raises:
            UsageError: Inside the loop over a data loader, or the rows held do not fit the optimizer. Nothing has
                changed then.
        """
        settings = Settings(optimizer or self.settings.optimizer, config or self.settings.config)
        self.apply(settings, resume)

    def apply(self, settings: "Settings", resume: tuple[int, int, int] | None = None) -> None:
        """As :meth:`begin`, with exactly these settings."""
        import torch

        after_epoch, step, seed = resume or (0, self.trained_step, self._seed)
        seed = torch.initial_seed() % 2**64 if seed is None else seed
        self.engine.begin(
            seed=seed,
            optimizer=None if settings.optimizer is None else settings.optimizer.spec,
            initializer=settings.config.initializer,
            admit_probability=settings.config.admit_probability,
            weight_bound=settings.config.weight_bound,
            after_epoch=after_epoch,
            step=step,
        )
        self.settings, self._seed, self.trained_step = settings, seed, step

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
