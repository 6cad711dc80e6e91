"""How the ranks of a run train the model."""

from persia.config import Config
from persia.distributed import DistributedBaseOption, FSDPOption
from persia.runtime.logging import get_logger
from persia.runtime.settings import get_world_size

_logger = get_logger("trainer")


def option_of(config: Config) -> DistributedBaseOption | None:
    """Return the option of ``parallel``, for a context; None is DDP."""
    if config.parallel == "ddp":
        return None
    if get_world_size() == 1:
        _logger.warning("parallel: fsdp has no effect with one rank, which has all weights")
    return FSDPOption()
