"""Functions for operators: monitoring the memory of a run, and polling the notice of a spot instance."""

import contextlib
from pathlib import Path

from persia.config import Config
from persia.ctx import TrainCtx
from persia.profile.growth import FOLDER, MemoryWatch
from persia.runtime.settings import get_local_rank, get_world_size
from persia.runtime.spot import SpotWatch


def spot_watch_of(config: Config) -> contextlib.AbstractContextManager[SpotWatch | None]:
    """Return the poller of the spot notice, on one rank of each trainer; None without the block ``spot``."""
    block = config.spot
    if block is None or get_local_rank() != 0:
        return contextlib.nullcontext()
    return SpotWatch(
        block.url, every_s=block.every_s, headers=block.headers, token_url=block.token_url, resource=block.resource
    )


def memory_watch_of(
    config: Config, folder: Path, ctx: TrainCtx
) -> contextlib.AbstractContextManager[MemoryWatch | None]:
    """Return the hook that samples memory in the training loop; None without the block ``memory``."""
    block = config.memory
    if block is None:
        return contextlib.nullcontext()
    return MemoryWatch(folder / FOLDER, ctx, every=block.every, leaks=block.leaks, limit_mb=block.limit_mb)


def effective_batch(config: Config) -> str:
    """Return one line that shows how the number of rows in a step is computed."""
    world, rows, times = get_world_size(), config.data.batch_size, config.train.accumulate
    least, most = rows // world, -(-rows // world)
    each = f"{least:,}" if least == most else f"{least:,} or {most:,}"
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    return f"effective batch: {config.step_rows:,} rows per step = {each} per rank x {times} accumulated x {ranks}"
