"""Estimates the memory that a run needs before it starts: rows with optimizer state, and the dense model."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from persia.config import Config
from persia.discovery import nats
from persia.features import Transform
from persia.runtime.config_files import GLOBAL_CONFIG, find_config, read_config
from persia.runtime.job import job_name
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia.trainer import models
from persia.trainer.fitting import fit_first
from persia.trainer.parts import Part, Parts
from persia_core import config as _config

_logger = get_logger("trainer")

OVERHEAD = 36
"""The bytes of a row in addition to weights and optimizer state: id, recency, index. In docs/performance.md (B7), 32 to
39 were measured."""
BASE = 400 << 20
"""The memory of a trainer process with torch, without model and data, in bytes."""
FULL = 0.9
"""The share of the memory above which a run does not fit."""
SAMPLE = 1 << 17
"""The number of rows that are read to count ids."""
_FLOAT = 4
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Table:
    """The rows of a table.

    Attributes:
        name: The name of the table.
        rows: The expected number of rows.
        row_bytes: The size of a row with its optimizer state, id and index entry, in bytes.
    """

    name: str
    rows: int
    row_bytes: float

    @property
    def bytes(self) -> int:
        """The size of all rows, in bytes."""
        return round(self.rows * self.row_bytes)


@dataclass(frozen=True)
class Place:
    """The distribution of a run over hosts.

    Attributes:
        servers: The number of servers; 0 if rows are in the trainer.
        servers_here: The number of servers on this host.
        ranks_here: The number of ranks on this host.
        ranks: The number of ranks of the run.
    """

    servers: int = 0
    servers_here: int = 0
    ranks_here: int = 1
    ranks: int = 1

    @classmethod
    def find(cls) -> "Place":
        """Return the distribution of the surrounding job.

        Raises:
            UnreachableError: NATS does not respond.
        """
        if settings.nats_url is None:
            return cls()
        job = job_name()
        hosts = [each.text("host") for each in nats.services(settings.nats_url, "persia-server", job=job)]
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or settings.world_size)
        return cls(len(hosts), hosts.count(socket.gethostname()), ranks, settings.world_size)


@dataclass(frozen=True)
class Sizing:
    """The memory that a run needs.

    Attributes:
        tables: The tables.
        servers: The number of servers among which rows are divided; 0 if they are in the trainer.
        servers_here: The number of these servers on this host.
        ranks_here: The number of ranks on this host.
        dense: The bytes of weights, gradients and optimizer state on each rank, from :func:`dense_bytes`.
        batches: The bytes of the batches that are looked up ahead, on each rank.
        available: The free memory of this host, or the memory that its container may still use, in bytes.
        is_exact: Whether all training rows were read; otherwise the number of ids is extrapolated.
    """

    tables: list[Table] = field(default_factory=list)
    servers: int = 0
    servers_here: int = 0
    ranks_here: int = 1
    dense: int = 0
    batches: int = 0
    available: int = 0
    is_exact: bool = True

    @property
    def server(self) -> int:
        """The bytes of the rows on each server; of all rows if they are in the trainer."""
        return -(-sum(table.bytes for table in self.tables) // max(1, self.servers))

    @property
    def trainer(self) -> int:
        """The bytes of each rank."""
        return BASE + self.dense + self.batches + (0 if self.servers else self.server)

    @property
    def here(self) -> int:
        """The bytes of all servers and ranks on this host."""
        return self.servers_here * self.server + self.ranks_here * self.trainer

    @property
    def fits(self) -> bool:
        """Whether the processes on this host fit into its memory, with a tenth left free."""
        return self.here <= FULL * self.available

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate in bytes, as a JSON-serializable dictionary."""
        return {
            "tables": {table.name: {"rows": table.rows, "bytes": table.bytes} for table in self.tables},
            "servers": self.servers,
            "server": self.server if self.servers else 0,
            "trainer": self.trainer,
            "available": self.available,
            "fits": self.fits,
            "exact": self.is_exact,
        }

    def __str__(self) -> str:
        """Return the estimate as one line."""
        about = "" if self.is_exact else "about "
        rows = f"{about}{sum(table.rows for table in self.tables):,} rows"
        away = self.servers - self.servers_here
        part = f"; servers on other hosts: {away} of {self.servers}" if away else ""
        fits = f"{'fits' if self.fits else 'does not fit'} in the {shown(self.available)} that are free here{part}"
        if not self.servers:
            return f"memory: trainer {shown(self.trainer)}, including {shown(self.server)} for {rows}; {fits}"
        each = f"each of {self.servers} servers" if self.servers > 1 else "server"
        return f"memory: {each} {shown(self.server)} ({rows}), trainer {shown(self.trainer)}; {fits}"

    @property
    def knobs(self) -> str:
        """Return the changes that reduce the memory of a run, most effective first."""
        largest = max(self.tables, key=lambda table: table.bytes, default=None)
        name = "" if largest is None else f" of {largest.name!r} ({shown(largest.bytes)})"
        return (
            f"lower `dim` or set `dtype: f16` for the features of the largest table{name}; "
            "embedding_optimizer: {name: adagrad} keeps one number per row; `admission: {min_count: 3}` keeps rare ids "
            "out; `capacity` in global_config.yml bounds all rows; more servers divide them: persia up --servers N"
        )


def of_run(
    config: Config,
    parts: Parts,
    transform: Transform,
    model: torch.nn.Module,
    rows: int,
    place: Place,
) -> Sizing:
    """Estimate the memory of a run.

    Args:
        config: The configuration.
        parts: The data of the configuration.
        transform: The fitted transform.
        model: The dense model.
        rows: The number of training rows.
        place: The distribution of the run over hosts.
    """
    ids, is_exact = count_ids(config, parts.train, transform, rows)
    return estimate(config, ids, model, place, is_exact=is_exact)


def of_config(config: Config, place: Place | None = None) -> Sizing:
    """Estimate the memory of a configuration from the first rows of its data, before anything is fitted.

    Args:
        config: The configuration.
        place: The distribution of the run over hosts; None means one process with the rows.

    Raises:
        DataError: A value cannot be used, or there are no rows.
        ConfigError: The model cannot be created.
    """
    parts = Parts(config)
    transform = fit_first(config, parts.train, SAMPLE)
    ids, is_exact = count_ids(config, parts.train, transform, parts.count_train())
    return estimate(config, ids, models.build(config), place or Place(), is_exact=is_exact)


def estimate(
    config: Config, ids: Mapping[str, int], model: torch.nn.Module, place: Place, *, is_exact: bool = True
) -> Sizing:
    """Estimate the memory of a run from the numbers of ids.

    Args:
        config: The configuration.
        ids: The number of distinct ids of each table.
        model: The dense model.
        place: The distribution of the run over hosts.
        is_exact: Whether the ids were counted.
    """
    slots = config.compiled.embedding_config().slots
    features = {_table_of(config, slot): dict(config.features[slot]) for slot in slots}
    capacity = _capacity()
    share = min(1.0, capacity / max(1, sum(ids.values())))
    tables = [
        Table(name, int(ids[name] * share), row_bytes(config, features[name])) for name in ids if name in features
    ]
    numbers = sum(int(config.features[slot]["dim"]) for slot in slots)
    ahead = config.train.staleness + 4
    return Sizing(
        tables,
        place.servers,
        place.servers_here,
        place.ranks_here,
        dense_bytes(config, model, place.ranks),
        2 * _FLOAT * config.step_rows * numbers * ahead,
        available(),
        is_exact,
    )


def row_bytes(config: Config, feature: Mapping[str, Any]) -> float:
    """Return the bytes of a row: weights, optimizer state, and :data:`OVERHEAD`.

    Args:
        config: The configuration, for the optimizer of rows.
        feature: The keys of a feature.
    """
    dim = int(feature["dim"])
    block = config.train.embedding_optimizer
    own = feature.get("optimizer")
    optimizer = {"name": block.name, **block.arguments} if own is None else {"vectorwise_shared": False, **own}
    size = _FLOAT if feature.get("dtype", "f32") == "f32" else 2
    return dim * size + _FLOAT * row_states(optimizer, dim) + OVERHEAD


def row_states(optimizer: Mapping[str, Any], dim: int) -> int:
    """Return the number of optimizer state values in a row, like ``state_len`` in ``rust_core/types/src/schema.rs``."""
    if optimizer["name"] == "adagrad":
        return 1 if optimizer.get("vectorwise_shared") else dim
    if optimizer["name"] == "adam":
        return 2 * dim
    return dim if optimizer.get("momentum") else 0


def dense_bytes(config: Config, model: torch.nn.Module, ranks: int) -> int:
    """Return the maximum number of bytes that a rank needs for the dense model.

    These bytes are weights, gradients and optimizer state.

    With ``parallel: fsdp``, a rank holds its shards of all of these, and the script's complete model. During a step it
    also holds all weights and gradients. After a step that ends with an evaluation or a checkpoint, it also holds all
    weights and the complete optimizer state.

    Args:
        config: The configuration.
        model: The dense model.
        ranks: The number of ranks of the run.
    """
    weights, states = sum(parameter.numel() for parameter in model.parameters()), dense_states(config)
    copies = 2.0 + states
    if config.parallel == "fsdp" and ranks > 1:
        copies = 1 + max(2, 1 + states) + copies / ranks
    return round(_FLOAT * weights * copies)


def dense_states(config: Config) -> int:
    """Return the number of optimizer state values per weight of the dense model."""
    block = config.train.dense_optimizer
    if block.name in ("adam", "adamw"):
        return 3 if block.arguments.get("amsgrad") else 2
    return 1 if block.name == "adagrad" or block.arguments.get("momentum") else 0


def preflight(config: Config, parts: Parts, transform: Transform, model: torch.nn.Module, rows: int) -> Sizing:
    """Estimate the memory of a starting run, log it, and warn if it does not fit.

    The arguments are those of :func:`of_run`.
    """
    found = of_run(config, parts, transform, model, rows, Place.find())
    if found.fits:
        _logger.info("%s", found)
    else:
        _logger.warning("%s. To use less memory: %s", found, found.knobs)
    return found


def count_ids(config: Config, train: Part, transform: Transform, rows: int) -> tuple[dict[str, int], bool]:
    """Return the number of distinct ids of each table, and whether all rows were read.

    If there are more than :data:`SAMPLE` rows, only the first :data:`SAMPLE` rows are read. The number of ids in all
    rows is then extrapolated by a power law of the number of rows (Heaps 1978). The power law is fitted to the numbers
    of ids in the first half of these rows and in all of them.
    """
    tables = {slot: _table_of(config, slot) for slot in transform.slots}
    seen: dict[str, npt.NDArray[np.uint64]] = {}
    half: dict[str, int] = {}
    read = 0
    for batch in train.reader(SAMPLE // 8):
        samples = transform(batch.slice(0, SAMPLE - read), strict=False, labels=False)
        for slot, table in tables.items():
            found = np.unique(samples.ids(slot)[0])
            seen[table] = found if table not in seen else np.union1d(seen[table], found)
        read += len(samples)
        if not half and read >= SAMPLE // 2:
            half = {table: len(ids) for table, ids in seen.items()}
        if read >= SAMPLE:
            break
    counts = {table: len(ids) for table, ids in seen.items()}
    if read >= rows or not half:
        return counts, read >= rows
    growth = rows / read
    return {table: round(count * growth ** _power(half[table], count)) for table, count in counts.items()}, False


def _power(half: int, whole: int) -> float:
    """Return the exponent of the power law by which ids grow, from ``half`` in half of the rows to ``whole`` in all."""
    return float(np.log2(whole / half)) if 0 < half < whole else 0.0


def _table_of(config: Config, slot: str) -> str:
    return str(config.features[slot].get("table") or slot)


def available() -> int:
    """Return the free memory of this host in bytes, or less if the container of this process is limited to less."""
    free = int(psutil.virtual_memory().available)
    for path in _CGROUP:
        try:
            limit = path.read_text().strip()
        except OSError:
            continue
        if limit.isdecimal() and int(limit) < psutil.virtual_memory().total:
            return min(free, int(limit) - psutil.Process(os.getpid()).memory_info().rss)
    return free


def shown(size: float) -> str:
    """Return a size in bytes in a readable form."""
    for unit, least in (("GB", 1e9), ("MB", 1e6)):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"


def _capacity() -> int:
    path = find_config(GLOBAL_CONFIG, "global_config.yml")
    return (_config.GlobalConfig() if path is None else _config.parse_global_config(*read_config(path))).capacity
