"""Extends the timeouts of torch's collectives, which must not end a run while a rank is stopped at a breakpoint."""

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d as c10d

LIMIT = timedelta(days=1)
"""The time that a collective may wait for the other ranks."""


def extend() -> None:
    """Extend the timeout of all process groups to a day. Every rank of a group calls this."""
    if distributed.is_available() and distributed.is_initialized():
        set_timeout: Callable[..., None] = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
        for group in list(c10d._world.pg_map):
            set_timeout(LIMIT, group)


def extend_new() -> None:
    """Set the timeout of each process group that is created later to a day, regardless of the script's timeout."""
    if distributed.is_available():
        for name in ("init_process_group", "new_group"):
            patient = _patient(getattr(c10d, name))
            for module in (c10d, distributed):
                setattr(module, name, patient)


def _patient(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def call(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options)
        given.arguments["timeout"] = LIMIT
        return make(*given.args, **given.kwargs)

    return call


def place() -> tuple[int, int] | None:
    """Return rank and size of the process group; None if there is no process group."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None


def store() -> Any:
    """Return the store of the process group; None if there is no process group."""
    return c10d._get_default_store() if place() is not None else None
