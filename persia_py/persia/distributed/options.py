"""How several ranks train the dense part of a model."""

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as torch_distributed

from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_logger = get_logger("distributed")

_COLLECTIVE = timedelta(days=1)
"""How long torch waits for a rank, which may be evaluating; :class:`Peers` detects dead and silent ranks earlier."""


class DistributedBaseOption(ABC):
    """How several ranks train the dense part of a model.

    A subclass starts a process group and wraps the model. Rank 0's address is found through discovery; no option names
    it.
    """

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
        **options: For :class:`torch.nn.parallel.DistributedDataParallel`. ``find_unused_parameters`` is true unless
            given, as in PersiaML. PersiaML's ``master_addr``, ``master_port`` and ``sync_file`` are accepted and have
            no effect.

    Raises:
        UsageError: Another initialization method or backend.
    """

    def __init__(self, initialization_method: str = "tcp", backend: str = "nccl", **options: Any) -> None:
        if initialization_method not in {"tcp", "file"}:
            raise UsageError(f"DDPOption(initialization_method={initialization_method!r}): want 'tcp' or 'file'")
        if backend not in {"nccl", "gloo"}:
            raise UsageError(f"DDPOption(backend={backend!r}): want 'nccl' or 'gloo'")
        names = ("master_addr", "master_port", "sync_file", "init_file")
        ignored = [name for name in names if options.pop(name, None) is not None]
        if ignored:
            _logger.warning("DDPOption: %s has no effect, rank 0 is found through discovery", ", ".join(ignored))
        self.backend = backend
        self.options = {"find_unused_parameters": True, **options}

    def initialize(self, store: "Store", rank: int, world_size: int, device_id: int | None) -> None:
        """Start the process group."""
        if self.backend == "nccl" and device_id is None:
            raise UsageError("DDPOption(backend='nccl') needs TrainCtx(device_id=...); without GPUs use backend='gloo'")
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
    """Return DDP over nccl with a device, over gloo without."""
    return DDPOption(backend="gloo" if device_id is None else "nccl")
