"""How several ranks train the dense part of a model."""

import os
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as torch_distributed

from persia.runtime import flight
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_logger = get_logger("distributed")

_COLLECTIVE = timedelta(days=1)
"""How long torch waits for a rank. :class:`Peers` detects dead, silent and late ranks earlier, by a clock that stands
still while a debugger holds a rank; torch cannot change the limit of a collective that has begun."""


_COLLECTIVES = 2000
"""Collectives of NCCL that torch's flight recorder keeps."""


class DistributedBaseOption(ABC):
    """How several ranks train the dense part of a model.

    A subclass starts a process group and wraps the model. Rank 0's address is found through discovery; no option names
    it.
    """

    @property
    def limit_s(self) -> float | None:
        """Seconds that a collective may take, without those in which a debugger holds a rank; None is no limit."""
        return settings.dist_timeout

    @abstractmethod
    def initialize(self, store: "Store", rank: int, world_size: int, device_id: int | None) -> None:
        """Start the process group; ``store`` is rank 0's, and every rank calls this."""

    @abstractmethod
    def wrap(self, model: torch.nn.Module, device_id: int | None) -> torch.nn.Module:
        """Return the module whose gradients are averaged over all ranks; every rank calls this."""


class DDPOption(DistributedBaseOption):
    """Torch's DistributedDataParallel.

    Args:
        initialization_method: ``tcp`` or ``file``, as in PersiaML; rank 0 is found through discovery in both cases.
        backend: ``nccl`` with GPUs, ``gloo`` without them.
        timeout_s: Seconds that a collective may take; None is ``PERSIA_DIST_TIMEOUT``, else a day.
        **options: For :class:`torch.nn.parallel.DistributedDataParallel`. ``find_unused_parameters`` is true unless
            given, as in PersiaML. PersiaML's ``master_addr``, ``master_port`` and ``sync_file`` are accepted and have
            no effect.

    Raises:
        UsageError: Another initialization method or backend, or a time that is not above 0.
    """

    def __init__(
        self,
        initialization_method: str = "tcp",
        backend: str = "nccl",
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        if initialization_method not in {"tcp", "file"}:
            raise UsageError(f"DDPOption(initialization_method={initialization_method!r}): want 'tcp' or 'file'")
        if backend not in {"nccl", "gloo"}:
            raise UsageError(f"DDPOption(backend={backend!r}): want 'nccl' or 'gloo'")
        if timeout_s is not None and not timeout_s > 0:
            raise UsageError(f"DDPOption(timeout_s={timeout_s!r}): want seconds, above 0")
        names = ("master_addr", "master_port", "sync_file", "init_file")
        ignored = [name for name in names if options.pop(name, None) is not None]
        if ignored:
            _logger.warning("DDPOption: %s has no effect, rank 0 is found through discovery", ", ".join(ignored))
        self.backend = backend
        self.timeout_s = timeout_s
        self.options = {"find_unused_parameters": True, **options}

    @property
    def limit_s(self) -> float | None:
        """As given, else ``PERSIA_DIST_TIMEOUT``."""
        return self.timeout_s or super().limit_s

    def initialize(self, store: "Store", rank: int, world_size: int, device_id: int | None) -> None:
        """Start the process group."""
        if self.backend == "nccl" and device_id is None:
            raise UsageError(
                "DDPOption(backend='nccl'), dist.backend and PERSIA_DIST_BACKEND: nccl needs a GPU, "
                "TrainCtx(device_id=...); without GPUs use gloo"
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
        """Return the model in DistributedDataParallel."""
        devices = None if device_id is None else [device_id]
        try:
            return torch.nn.parallel.DistributedDataParallel(model, device_ids=devices, **self.options)
        except TypeError as error:
            raise UsageError(f"DDPOption: {error}") from error


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """Return DDP over ``PERSIA_DIST_BACKEND``; without it, over nccl with a device, over gloo without."""
    return DDPOption(backend=default_backend(device_id))


def default_backend(device_id: int | None) -> str:
    """Return ``PERSIA_DIST_BACKEND``, which ``dist.backend`` sets; without it, nccl with a device, gloo without."""
    backend = settings.dist_backend
    if backend == "auto":
        backend = "gloo" if device_id is None else "nccl"
    return backend


def _record_collectives() -> None:
    """Let torch's flight recorder keep the last collectives of NCCL, for the report of a hang."""
    folder = flight.folder()
    defaults = {
        "TORCH_FR_BUFFER_SIZE": str(_COLLECTIVES),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(_COLLECTIVES),  # its name before torch 2.9
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "nccl-rank-"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "nccl-rank-"),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    flight.collectives = _collectives


def _collectives() -> str | None:
    """Return the last collectives of NCCL as JSON, from torch's flight recorder; None if this torch has none."""
    core: Any = torch._C._distributed_c10d
    dump = getattr(core, "_dump_nccl_trace_json", None)
    return None if dump is None else bytes(dump(includeCollectives=True, onlyActive=False)).decode()
