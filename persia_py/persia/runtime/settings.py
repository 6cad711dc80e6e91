"""The environment variables that persia's Python code reads.

:data:`settings` has their checked values, except names of files and interfaces, which are read with :func:`variable`.
``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` follow torchrun's contract; ``REPLICA_INDEX`` and ``REPLICA_SIZE`` number
the replicas of a service. If they are not set, there is one rank or one replica.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from persia.runtime.errors import UsageError

SERVED = "PERSIA_LAUNCHER_SERVED"
"""The variable that names the launcher's file for the address of the rank 0 that receives the batches."""

MAX_STALENESS = 64

DIST_BACKENDS = ("auto", "nccl", "gloo")
"""The backends for exchanging dense gradients. auto means nccl with a GPU, and gloo without one."""


@dataclass(frozen=True, slots=True)
class Place:
    """The position of the process in its job.

    Attributes:
        rank: The trainer rank, from 0.
        local_rank: The rank among the trainers of this host, from 0.
        world_size: The number of trainer ranks.
        replica_index: The index among the replicas of the service, from 0.
        replica_size: The number of replicas of the service.
    """

    rank: int
    local_rank: int
    world_size: int
    replica_index: int
    replica_size: int

    @classmethod
    def read(cls) -> "Place":
        """Read the position from the environment.

        Raises:
            UsageError: A variable is not an integer, or an index is not below its size.
        """
        place = cls(
            rank=_whole("RANK", 0, least=0),
            local_rank=_whole("LOCAL_RANK", 0, least=0),
            world_size=_whole("WORLD_SIZE", 1, least=1),
            replica_index=_whole("REPLICA_INDEX", 0, least=0),
            replica_size=_whole("REPLICA_SIZE", 1, least=1),
        )
        for what, index, size, names in (
            ("ranks", place.rank, place.world_size, ("RANK", "WORLD_SIZE")),
            ("indexes", place.replica_index, place.replica_size, ("REPLICA_INDEX", "REPLICA_SIZE")),
        ):
            if index >= size:
                raise UsageError(
                    f"{names[0]} is {index}, but {names[1]} is {size}: {what} go from 0 to {size - 1}",
                    hint=f"correct {names[0]} or {names[1]}",
                )
        return place


class Settings:
    """The settings in the environment. All except the position are read on access."""

    def __init__(self) -> None:
        self._place: Place | None = None

    @property
    def place(self) -> Place:
        """The position of the process in its job, read once: see :func:`reload_env`."""
        if self._place is None:
            self._place = Place.read()
        return self._place

    def reload_place(self) -> None:
        """Read the position again."""
        self._place = Place.read()

    @property
    def rank(self) -> int:
        """``RANK``."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """``WORLD_SIZE``."""
        return self.place.world_size

    @property
    def job(self) -> str | None:
        """``PERSIA_JOB``: the name of the job; None leaves it to the global configuration."""
        return variable("PERSIA_JOB")

    @property
    def nats_url(self) -> str | None:
        """``PERSIA_NATS_URL``; None if it is not set, as in the embedded mode."""
        return variable("PERSIA_NATS_URL")

    @property
    def token_file(self) -> str | None:
        """``PERSIA_TOKEN_FILE``: the file with the job's secret."""
        return variable("PERSIA_TOKEN_FILE")

    @property
    def run_dir(self) -> str | None:
        """``PERSIA_RUN_DIR``: the folder of the run's files."""
        return variable("PERSIA_RUN_DIR")

    @property
    def checkpoint_root(self) -> str | None:
        """``PERSIA_CKPT_DIR``: the folder or URL of checkpoints; a relative path of a checkpoint is below it."""
        return variable("PERSIA_CKPT_DIR")

    @property
    def data_script(self) -> str | None:
        """``PERSIA_DATALOADER_ENTRY``: the data script and its arguments."""
        return variable("PERSIA_DATALOADER_ENTRY")

    @property
    def listen(self) -> str | None:
        """``PERSIA_LISTEN``: the address at which a server listens."""
        return variable("PERSIA_LISTEN")

    @property
    def tls_ca(self) -> str | None:
        """``PERSIA_TLS_CA``: the certificate with which other processes are verified."""
        return variable("PERSIA_TLS_CA")

    @property
    def tls_name(self) -> str:
        """``PERSIA_TLS_NAME``: the name in the certificates of other processes, by default ``persia``."""
        return variable("PERSIA_TLS_NAME") or "persia"

    @property
    def tls_certificate(self) -> str | None:
        """``PERSIA_TLS_CERT``: the certificate of this process."""
        return variable("PERSIA_TLS_CERT")

    @property
    def tls_key(self) -> str | None:
        """``PERSIA_TLS_KEY``: the key of this process's certificate."""
        return variable("PERSIA_TLS_KEY")

    @property
    def served(self) -> str | None:
        """``PERSIA_LAUNCHER_SERVED``: the file for the address of the rank 0 that was served."""
        return variable(SERVED)

    @property
    def host_replicas(self) -> int:
        """``PERSIA_HOST_REPLICAS``, by default 1: the number of containers of this service that share this host."""
        return _whole("PERSIA_HOST_REPLICAS", 1, least=1)

    @property
    def start_timeout(self) -> float:
        """``PERSIA_START_TIMEOUT``, by default 60: seconds that a process waits for servers and peers at the start."""
        return _seconds("PERSIA_START_TIMEOUT", 60.0)

    @property
    def rpc_timeout(self) -> float:
        """``PERSIA_RPC_TIMEOUT``, by default 60: seconds that a look-up or push may take, including retries."""
        return _seconds("PERSIA_RPC_TIMEOUT", 60.0)

    @property
    def hang_timeout(self) -> float:
        """``PERSIA_HANG_TIMEOUT``, by default 1800: seconds that a step of a training loop may take.

        0 means no limit.
        """
        return _seconds("PERSIA_HANG_TIMEOUT", 1800.0, or_zero=True)

    @property
    def data_timeout(self) -> float:
        """``PERSIA_DATA_TIMEOUT``, by default 0: seconds that a training loop may wait for a batch.

        0 means no limit.
        """
        return _seconds("PERSIA_DATA_TIMEOUT", 0.0, or_zero=True)

    @property
    def flight_dir(self) -> str | None:
        """``PERSIA_FLIGHT_DIR``: the folder for the files with the last calls of each rank."""
        return variable("PERSIA_FLIGHT_DIR")

    @property
    def metrics_listen(self) -> str | None:
        """``PERSIA_METRICS_LISTEN``: the address at which this process serves its metrics, or ``off``."""
        return variable("PERSIA_METRICS_LISTEN")

    @property
    def metrics_gateway(self) -> str | None:
        """``PERSIA_METRICS_GATEWAY_ADDR``: the push gateway that receives the metrics of a short run at its end."""
        return variable("PERSIA_METRICS_GATEWAY_ADDR")

    @property
    def trace_every(self) -> int:
        """``PERSIA_TRACE_EVERY``, by default 100: the interval between traced steps, if a collector is set.

        0 means never.
        """
        return _whole("PERSIA_TRACE_EVERY", 100, least=0)

    @property
    def dist_backend(self) -> str:
        """``PERSIA_DIST_BACKEND``, by default auto: how ranks exchange dense gradients: auto, nccl or gloo."""
        name = variable("PERSIA_DIST_BACKEND") or "auto"
        if name not in DIST_BACKENDS:
            raise UsageError(f"environment variable PERSIA_DIST_BACKEND={name!r}: expected {', '.join(DIST_BACKENDS)}")
        return name

    @property
    def dist_timeout(self) -> float | None:
        """``PERSIA_DIST_TIMEOUT``: seconds that a collective of torch may take; None means a day."""
        return None if variable("PERSIA_DIST_TIMEOUT") is None else _seconds("PERSIA_DIST_TIMEOUT", 0.0)

    @property
    def digest_every(self) -> int:
        """``PERSIA_DIGEST``, by default 0: the interval between steps whose digests are written; 0 means never."""
        return _whole("PERSIA_DIGEST", 0, least=0)

    @property
    def digest_dir(self) -> str | None:
        """``PERSIA_DIGEST_DIR``: the folder for the digests."""
        return variable("PERSIA_DIGEST_DIR")

    @property
    def allow_public(self) -> bool:
        """``PERSIA_ALLOW_PUBLIC``: whether ranks may connect over a public network."""
        return flag("PERSIA_ALLOW_PUBLIC")

    @property
    def reproducible(self) -> bool:
        """``REPRODUCIBLE``: whether equal runs give bit-identical results."""
        return flag("REPRODUCIBLE")

    def staleness(self, argument: int | None) -> int:
        """Return the staleness K: the argument, or else ``EMBEDDING_STALENESS``, or else 8."""
        value = _whole("EMBEDDING_STALENESS", 8, least=1) if argument is None else argument
        if not 1 <= value <= MAX_STALENESS:
            where = "embedding staleness " if argument is not None else "environment variable EMBEDDING_STALENESS="
            raise UsageError(f"{where}{value}: expected 1 (synchronous) to {MAX_STALENESS}")
        return value


settings = Settings()
"""The settings of this process."""


def in_container() -> bool:
    """Whether this process runs in a container."""
    marks = (Path("/.dockerenv"), Path("/run/.containerenv"))  # files that Docker and Podman create
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(mark.exists() for mark in marks)


def reload_env() -> None:
    """Read the variables of the position again."""
    settings.reload_place()


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
    return settings.place.rank


def get_local_rank() -> int:
    """Return the rank among the trainers of this host, from 0."""
    return settings.place.local_rank


def get_world_size() -> int:
    """Return the number of trainer ranks."""
    return settings.place.world_size


def get_replica_index() -> int:
    """Return this process's index among the replicas of its service, from 0."""
    return settings.place.replica_index


def get_replica_size() -> int:
    """Return the number of replicas of this process's service."""
    return settings.place.replica_size


def flag(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether environment variable ``name`` is switched on (1, true, yes, on; case-insensitive)."""
    text = environment.get(name, "").strip()
    if text.lower() in {"", "0", "false", "no", "off"}:
        return False
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    raise UsageError(f"environment variable {name}={text!r}: must be 1 or 0")


def nats_url() -> str | None:
    """Return ``PERSIA_NATS_URL``; None if it is not set, as in the embedded mode."""
    return settings.nats_url


def checkpoint_root() -> str | None:
    """Return ``PERSIA_CKPT_DIR``, the folder or URL below which checkpoints are written; None if it is not set."""
    return settings.checkpoint_root


def variable(name: str) -> str | None:
    """Return an environment variable without surrounding white space; None if it is empty or not set."""
    return os.environ.get(name, "").strip() or None


def _whole(name: str, default: int, *, least: int) -> int:
    text = variable(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise UsageError(f"environment variable {name}={text!r}: must be an integer of at least {least}")
    return value


def _seconds(name: str, default: float, *, or_zero: bool = False) -> float:
    text = variable(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0.0 < value <= 86_400.0 or (or_zero and value == 0.0)):
        allowed = "above 0 and at most 86400" + (", or 0 for no limit" if or_zero else "")
        raise UsageError(f"environment variable {name}={text!r}: expected seconds, {allowed}")
    return value
