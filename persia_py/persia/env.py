"""The import path of PersiaML for the position of this process in its job, from :mod:`persia.runtime.settings`."""

from persia.runtime.settings import (
    checkpoint_root,
    get_local_rank,
    get_rank,
    get_replica_index,
    get_replica_size,
    get_world_size,
    nats_url,
    reload_env,
    set_env,
)

__all__ = [
    "checkpoint_root",
    "get_local_rank",
    "get_rank",
    "get_replica_index",
    "get_replica_size",
    "get_world_size",
    "nats_url",
    "reload_env",
    "set_env",
]
