"""How several ranks train the dense part of a model."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as torch_distributed

from persia.distributed.averaging import Averaged, Compression, check_together
from persia.distributed.replicated import Replicated
from persia.runtime import flight
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_logger = get_logger("distributed")

_COLLECTIVE = timedelta(days=1)
"""The time limit of torch for a collective. The limit is long because torch cannot change the limit of a collective
that has begun, for example while a debugger holds a rank. :class:`Peers` detects dead, silent and late ranks
earlier."""


_COLLECTIVES = 2000
"""The number of NCCL collectives that torch's flight recorder keeps."""


class DistributedBaseOption(ABC):
    """The base class of options for training the dense part of a model on several ranks.

    A subclass starts a process group and wraps the model. Rank 0's address is found through discovery; no option names
    it.
    """

    @property
    def limit_s(self) -> float | None:
        """Seconds that a collective may take, not counting those in which a debugger holds a rank.

        None means no limit.
        """
        return settings.dist_timeout

    @abstractmethod
    def initialize(self, store: "Store", rank: int, world_size: int, device_id: int | None) -> None:
        """Start the process group; ``store`` belongs to rank 0. Collective: every rank must call it."""

    @abstractmethod
    def wrap(self, model: torch.nn.Module, device_id: int | None) -> torch.nn.Module:
        """Return the module whose gradients are averaged over all ranks. Collective: every rank must call it."""


class DDPOption(DistributedBaseOption):
    """Torch's DistributedDataParallel.

    Args:
        initialization_method: ``tcp`` or ``file``, as in PersiaML; rank 0 is found through discovery in both cases.
        backend: ``nccl`` with GPUs, ``gloo`` without them.
        timeout_s: Seconds that a collective may take; None means ``PERSIA_DIST_TIMEOUT``, by default a day.
        regions: The ranks of each region, by its name. Gradients are added up within each region, then between regions.
        compression: The compression of gradients, see :class:`persia.distributed.Compression`.
        **options: Passed to :class:`torch.nn.parallel.DistributedDataParallel`. ``find_unused_parameters`` is true by
            default, as in PersiaML, unless ``static_graph`` is true. PersiaML's ``master_addr``, ``master_port``,
            ``sync_file`` and ``init_file`` are accepted and have no effect.

    Raises:
        UsageError: The initialization method or backend is not supported, a time limit is not above 0, or arguments are
            mutually exclusive.
    """

    def __init__(
        self,
        initialization_method: str = "tcp",
        backend: str = "nccl",
        timeout_s: float | None = None,
        *,
        regions: Mapping[str, Sequence[int]] | None = None,
        compression: Compression | None = None,
        **options: Any,
    ) -> None:
        own = type(self).__name__
        if initialization_method not in {"tcp", "file"}:
            raise UsageError(f"{own}(initialization_method={initialization_method!r}): expected 'tcp' or 'file'")
        if backend not in {"nccl", "gloo"}:
            raise UsageError(f"{own}(backend={backend!r}): expected 'nccl' or 'gloo'")
        if timeout_s is not None and not timeout_s > 0:
            raise UsageError(f"{own}(timeout_s={timeout_s!r}): expected seconds, above 0")
        names = ("master_addr", "master_port", "sync_file", "init_file")
        ignored = [name for name in names if options.pop(name, None) is not None]
        if ignored:
            _logger.warning(
                "DDPOption: the following arguments have no effect, because rank 0 is found through discovery: %s",
                ", ".join(ignored),
            )
        self.backend = backend
        self.timeout_s = timeout_s
        # With a static graph, torch finds unused weights in the first step.
        self.options = {"find_unused_parameters": not options.get("static_graph"), **options}
        check_together(regions, compression, self.options)
        self.regions, self.compression = regions, compression

    @property
    def limit_s(self) -> float | None:
        """The argument ``timeout_s``, or else ``PERSIA_DIST_TIMEOUT``."""
        return self.timeout_s or super().limit_s

    def initialize(self, store: "Store", rank: int, world_size: int, device_id: int | None) -> None:
        """Start the process group."""
        if self.backend == "nccl" and device_id is None:
            raise UsageError(
                "nccl needs a GPU, and TrainCtx has no device_id",
                hint="pass TrainCtx(device_id=...), or use gloo "
                f"({type(self).__name__}(backend='gloo'), dist.backend or PERSIA_DIST_BACKEND)",
            )
        if self.backend == "nccl":
            _record_collectives()
        _logger.info(
            "dense gradients are averaged over %s (%s)", self.backend, "no GPU" if device_id is None else "GPU"
        )
        torch_distributed.init_process_group(
            self.backend, store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE
        )

    def wrap(self, model: torch.nn.Module, device_id: int | None) -> torch.nn.Module:
        """Return the model wrapped in DistributedDataParallel.

        Raises:
            UsageError: An option of DistributedDataParallel is wrong, or a rank is not in exactly one region.
        """
        devices = None if device_id is None else [device_id]
        try:
            if self.regions is not None or self.compression is not None:
                own = (self.regions, self.compression, _COLLECTIVE)
                return Averaged(model, *own, device_ids=devices, **self.options)
            return Replicated(model, device_ids=devices, **self.options)
        except TypeError as error:
            raise UsageError(f"DDPOption: {error}") from error


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """Return DDP over ``PERSIA_DIST_BACKEND``; if this is not set, over nccl with a device, over gloo without one."""
    return DDPOption(backend=default_backend(device_id))


def default_backend(device_id: int | None) -> str:
    """Return ``PERSIA_DIST_BACKEND``, which ``dist.backend`` sets.

    If the variable is not set, return nccl with a device, and gloo without one.
    """
    backend = settings.dist_backend
    if backend == "auto":
        backend = "gloo" if device_id is None else "nccl"
    return backend


def _record_collectives() -> None:
    """Let torch's flight recorder keep the last NCCL collectives, for reports about hangs."""
    folder = flight.folder()
    defaults = {
        "TORCH_FR_BUFFER_SIZE": str(_COLLECTIVES),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(_COLLECTIVES),  # the name before torch 2.9
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "nccl-rank-"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "nccl-rank-"),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    flight.collectives = _collectives


def _collectives() -> str | None:
    """Return the last NCCL collectives as JSON, from torch's flight recorder; None if this torch has no recorder."""
    core: Any = torch._C._distributed_c10d
    dump = getattr(core, "_dump_nccl_trace_json", None)
    return None if dump is None else bytes(dump(includeCollectives=True, onlyActive=False)).decode()
