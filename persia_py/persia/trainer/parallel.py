"""The options of training the model on several ranks."""

import os

from persia.config import Config
from persia.distributed import Compression, DDPOption, DistributedBaseOption, FSDPOption
from persia.distributed.averaging import check_regions
from persia.distributed.options import default_backend
from persia.runtime.logging import get_logger
from persia.runtime.settings import get_local_rank, get_world_size

_logger = get_logger("trainer")


def option_of(config: Config) -> DistributedBaseOption | None:
    """Return the option for ``parallel``, ``fsdp`` and ``dist``, for a context; None means DDP with one all-reduce.

    Raises:
        UsageError: A rank is not in exactly one region.
    """
    dist, alone = config.dist, get_world_size() == 1
    if config.parallel == "fsdp":
        if alone:
            _logger.warning("parallel: fsdp has no effect with one rank, which has all weights")
        return FSDPOption(reshard_after_forward=config.fsdp.reshard_after_forward)
    if dist.regions is None and dist.compression is None:
        return None
    if alone:
        given = [f"dist.{key}" for key in ("regions", "compression") if getattr(dist, key) is not None]
        verb = "has" if len(given) == 1 else "have"
        _logger.warning("%s %s no effect with one rank", " and ".join(given), verb)
        return None
    if dist.regions is not None:
        check_regions(dist.regions, get_world_size())
    block = dist.compression
    compression = None if block is None else Compression(block.name, block.rank, block.start_iter)
    device = get_local_rank() if int(os.environ.get("GPU_NUM") or 0) else None
    return DDPOption(backend=default_backend(device), regions=dist.regions, compression=compression)
