"""The embedded mode: the embedding store is in this process."""

from persia.backend.base import Backend, Device, RowSettings
from persia.embedding.config import Configuration
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia_core.engine import Engine
from persia_core.forward import Pipeline

_logger = get_logger("embedded")


class LocalBackend(Backend):
    """One engine over one in-process store."""

    def __init__(self, configuration: Configuration | None = None, device: Device | None = None) -> None:
        if settings.world_size > 1:
            raise UsageError(
                f"WORLD_SIZE={settings.world_size}: without PERSIA_NATS_URL all rows are in one process, which is the "
                "only rank; unset WORLD_SIZE and RANK, or set PERSIA_NATS_URL to use embedding servers"
            )
        super().__init__(configuration, device)
        _logger.info("embedding slots from %s, rows in this process", self.configuration.source)
        self.engine = Engine(self.configuration.embedding, self.configuration.general)
        if device is not None:
            device.serve(self.engine)

    def _begin(self, rows: RowSettings, after_generation: int, step: int, seed: int) -> None:
        self._begin_rows(rows, after_generation, step, seed)

    def open_loop(self, staleness: int, reproducible: bool, buffer: int, *, hooks: str = "") -> Pipeline:
        """Start a training loop, in a new generation."""
        del hooks
        self.activity += 1
        self.engine.renew(reproducible)
        return self.engine.open(staleness, reproducible, buffer, self.gradient_scale)

    def close(self, error: BaseException | None = None) -> None:
        """End the data script and the engine's threads, and free the memory of the rows."""
        del error
        if self.feed is not None:
            self.feed.close()
        self.engine.close()
