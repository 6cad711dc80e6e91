"""The process's place in the job, from environment variables.

``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` follow torchrun's contract; ``REPLICA_INDEX`` and ``REPLICA_SIZE`` number
the replicas of a service. Unset means a job of one.
"""

import os
from dataclasses import dataclass

from persia.runtime.errors import UsageError

SERVED = "PERSIA_LAUNCHER_SERVED"
"""Variable by which the launcher names a file; the address of the rank 0 that gets the batches is written to it."""


@dataclass(frozen=True, slots=True)
class _Place:
    rank: int
    local_rank: int
    world_size: int
    replica_index: int
    replica_size: int


def _read(name: str, default: int, *, least: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise UsageError(f"environment variable {name}={text!r}: want a whole number of at least {least}")
    return value


def _load() -> _Place:
    place = _Place(
        rank=_read("RANK", 0, least=0),
        local_rank=_read("LOCAL_RANK", 0, least=0),
        world_size=_read("WORLD_SIZE", 1, least=1),
        replica_index=_read("REPLICA_INDEX", 0, least=0),
        replica_size=_read("REPLICA_SIZE", 1, least=1),
    )
    for index, size, names in (
        (place.rank, place.world_size, "RANK and WORLD_SIZE"),
        (place.replica_index, place.replica_size, "REPLICA_INDEX and REPLICA_SIZE"),
    ):
        if index >= size:
            raise UsageError(f"environment variables {names}: index {index} must be below size {size}")
    return place


_place: _Place | None = None


def _current() -> _Place:
    global _place
    if _place is None:
        _place = _load()
    return _place


def reload_env() -> None:
    """Read the environment variables again."""
    global _place
    _place = _load()


def set_env(
    *,
    rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    replica_index: int | None = None,
    replica_size: int | None = None,
) -> None:
    """Set the given variables in this process's environment and read them again."""
    given = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "REPLICA_INDEX": replica_index,
        "REPLICA_SIZE": replica_size,
    }
    os.environ.update({name: str(value) for name, value in given.items() if value is not None})
    reload_env()


def get_rank() -> int:
    """Return the trainer rank, from 0."""
    return _current().rank


def get_local_rank() -> int:
    """Return the rank among the trainers of this host, from 0."""
    return _current().local_rank


def get_world_size() -> int:
    """Return the number of trainer ranks."""
    return _current().world_size


def get_replica_index() -> int:
    """Return this process's index among the replicas of its service, from 0."""
    return _current().replica_index


def get_replica_size() -> int:
    """Return the number of replicas of this process's service."""
    return _current().replica_size


def flag(name: str) -> bool:
    """Return whether environment variable ``name`` is switched on (1, true, yes, on; case does not matter)."""
    text = os.environ.get(name, "").strip().lower()
    if text in {"", "0", "false", "no", "off"}:
        return False
    if text in {"1", "true", "yes", "on"}:
        return True
    raise UsageError(f"environment variable {name}={text!r}: want 1 or 0")


def staleness(argument: int | None) -> int:
    """Return the staleness K: the argument, else ``EMBEDDING_STALENESS``, else 8."""
    value = _read("EMBEDDING_STALENESS", 8, least=1) if argument is None else argument
    if not 1 <= value <= 64:
        raise UsageError(f"embedding staleness {value}: want 1 (synchronous) to 64")
    return value


def nats_url() -> str | None:
    """Return ``PERSIA_NATS_URL``; None without it, in the embedded mode."""
    return os.environ.get("PERSIA_NATS_URL", "").strip() or None


def checkpoint_root() -> str | None:
    """Return ``PERSIA_CKPT_DIR``, below which servers write checkpoints; None without it."""
    return os.environ.get("PERSIA_CKPT_DIR", "").strip() or None


def start_timeout() -> float:
    """Return how many seconds a trainer waits for its peers at its start: ``PERSIA_START_TIMEOUT``, else 60."""
    return _seconds("PERSIA_START_TIMEOUT", 60.0)


def rpc_timeout() -> float:
    """Return how many seconds a look-up or push may take with its retries: ``PERSIA_RPC_TIMEOUT``, else 60."""
    return _seconds("PERSIA_RPC_TIMEOUT", 60.0)


def hang_timeout() -> float:
    """Return how many seconds a step of a training loop may take: ``PERSIA_HANG_TIMEOUT``, else 1800; 0 is no limit."""
    return 0.0 if os.environ.get("PERSIA_HANG_TIMEOUT", "").strip() == "0" else _seconds("PERSIA_HANG_TIMEOUT", 1800.0)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 86_400.0:
        raise UsageError(f"environment variable {name}={text!r}: want seconds, above 0 and at most 86400")
    return value
