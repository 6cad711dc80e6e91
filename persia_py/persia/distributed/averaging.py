"""Averages gradients for DistributedDataParallel in regions or compressed, instead of one float32 all-reduce."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed as torch_distributed

from persia.distributed.replicated import Replicated
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger

_logger = get_logger("distributed")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The types in which gradients may be sent."""
POWERSGD = "powersgd"
_EPSILON = 1e-8
"""The value that PowerSGD adds to norms. Without it, a layer without a gradient would get NaN."""


@dataclass(frozen=True)
class Compression:
    """Compression of gradients. All methods are lossy.

    Attributes:
        name: ``fp16``, ``bf16`` or ``powersgd``.
        rank: With ``powersgd``, the number of columns of the matrices that are sent.
        start_iter: With ``powersgd``, the number of steps at the start whose gradients are sent uncompressed.

    Raises:
        UsageError: ``name`` is unknown, ``rank`` is below 1, or ``start_iter`` is below 2 (DistributedDataParallel may
            change its buckets after the first step).
    """

    name: str
    rank: int = 1
    start_iter: int = 1000

    def __post_init__(self) -> None:
        """Check the values."""
        if self.name not in {*DTYPES, POWERSGD}:
            raise UsageError(f"Compression({self.name!r}): expected one of {', '.join(map(repr, [*DTYPES, POWERSGD]))}")
        if self.rank < 1 or self.start_iter < 2:
            raise UsageError(
                f"Compression(rank={self.rank}, start_iter={self.start_iter}): expected a rank of at least 1, and a "
                "start_iter of at least 2, because DistributedDataParallel may change its buckets after the first step"
            )


@dataclass
class Bytes:
    """The number of bytes that this rank has passed to collectives of dense gradients.

    Attributes:
        steps: The number of steps.
        gradients: Bytes of the gradients in float32, as one all-reduce over all ranks would have sent them.
        in_region: Bytes passed to collectives within a region.
        across_regions: Bytes passed to collectives between regions; without regions, to those over all ranks.
    """

    steps: int = 0
    gradients: int = 0
    in_region: int = 0
    across_regions: int = 0


def check_regions(regions: Mapping[str, Sequence[int]], world_size: int) -> None:
    """Check that each rank is in exactly one region.

    Raises:
        UsageError: A rank is in no region, is in several, or does not exist.
    """
    placed = sorted(rank for ranks in regions.values() for rank in ranks)
    if placed == [*range(world_size)]:
        return
    problems = [
        ("in no region", sorted({*range(world_size)} - {*placed})),
        ("in several regions", sorted({rank for rank in placed if placed.count(rank) > 1})),
        ("no such rank", sorted({rank for rank in placed if not 0 <= rank < world_size})),
    ]
    told = "; ".join(f"{what}: {', '.join(map(str, ranks))}" for what, ranks in problems if ranks)
    raise UsageError(
        f"regions: expected each rank from 0 to {world_size - 1} in exactly one region; {told}",
        hint="put each rank into one region, such as {east: [0, 1], west: [2, 3]}, or train without regions "
        "(dist.regions, DDPOption)",
    )


class Averaging(ABC):
    """A communication hook of DistributedDataParallel.

    The hook returns after the bucket is averaged. If a gloo collective continued in another thread, it could be paired
    with the collective of another bucket on another rank.

    Attributes:
        bytes: The number of bytes sent so far.
    """

    def __init__(self) -> None:
        self.bytes = Bytes()

    def hook(
        self,
        state: object,
        bucket: torch_distributed.GradBucket,  # type: ignore[name-defined]  # torch compares it with this class
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket. DistributedDataParallel calls this."""
        del state
        gradients = bucket.buffer()
        self.bytes.gradients += _size(gradients)
        averaged = self._average(bucket, gradients)
        self.bytes.steps += bucket.is_last()
        devices = [gradients.device] if gradients.is_cuda else None
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(averaged)
        return done

    @abstractmethod
    def _average(self, bucket: Any, gradients: torch.Tensor) -> torch.Tensor:
        """Average the gradients of a bucket in place, and return them."""

    def rescale(self, scale: float) -> None:
        """Rescale the state of earlier steps to the loss scale of the next backward pass."""
        del scale

    def settle(self, *, applied: bool) -> None:
        """Keep the changes of the last step to this state, or discard them if no rank applied the step."""
        del applied

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of this rank for a checkpoint; None if it has no state."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a state that :meth:`state_dict` returned."""
        del state


class Summed(Averaging):
    """Sums gradients over all ranks, or first in each region and then over the regions, optionally in a smaller type.

    Args:
        dtype: The type in which gradients are sent; None keeps their type.
        regions: The ranks of each region; None means one all-reduce.
        timeout: The time limit of torch for collectives of a region.
    """

    def __init__(
        self, dtype: torch.dtype | None, regions: Mapping[str, Sequence[int]] | None, timeout: timedelta
    ) -> None:
        super().__init__()
        self._timeout = timeout
        self._dtype = dtype
        self._own: Any = None  # the group of this rank's region
        self._leaders: Any = None  # the group of the first rank of each region; None on other ranks
        self._leader = 0
        if regions is not None:
            self._make_groups(sorted([*ranks] for ranks in regions.values()))

    def _make_groups(self, regions: list[list[int]]) -> None:
        """Create the process groups. Every rank creates all of them in the same order."""
        mine = torch_distributed.get_rank()
        for ranks in regions:
            group = torch_distributed.new_group(ranks, timeout=self._timeout)
            if mine in ranks:
                self._own, self._leader = group, ranks[0]
        leaders = torch_distributed.new_group([ranks[0] for ranks in regions], timeout=self._timeout)
        self._leaders = leaders if mine == self._leader else None

    def _average(self, bucket: Any, gradients: torch.Tensor) -> torch.Tensor:
        del bucket
        world = torch_distributed.get_world_size()
        sent = gradients.div(world)
        if self._dtype is not None:
            sent = sent.to(self._dtype)
        if self._own is None:
            torch_distributed.all_reduce(sent)
            self.bytes.across_regions += _size(sent)
        else:
            self._in_levels(sent)
        return gradients.copy_(sent)

    def _in_levels(self, sent: torch.Tensor) -> None:
        """Sum in the region, then over the regions. The first rank of a region sends the result to its other ranks."""
        torch_distributed.reduce(sent, self._leader, group=self._own)
        if self._leaders is not None:
            torch_distributed.all_reduce(sent, group=self._leaders)
            self.bytes.across_regions += _size(sent)
        torch_distributed.broadcast(sent, self._leader, group=self._own)
        self.bytes.in_region += 2 * _size(sent)


class PowerSGD(Averaging):
    """Torch's PowerSGD. Its state is saved in checkpoints, and errors of steps that are not applied are discarded.

    Args:
        compression: The options.
    """

    def __init__(self, compression: Compression) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

        super().__init__()
        self._compression = compression
        self._hook = power_sgd.powerSGD_hook
        self._state = power_sgd.PowerSGDState(
            None,
            matrix_approximation_rank=compression.rank,
            start_powerSGD_iter=compression.start_iter,
            orthogonalization_epsilon=_EPSILON,
        )
        self._errors: dict[int, torch.Tensor] | None = None  # the errors before the step that is not settled yet
        self._scale = 1.0  # the loss scale with which the errors were computed

    def rescale(self, scale: float) -> None:
        """Rescale the errors to the loss scale of the next backward pass, to whose gradients they are added.

        Args:
            scale: The loss scale; 1 if the loss is not scaled.
        """
        if scale == self._scale:
            return
        state, factor = self._state, scale / self._scale
        state.error_dict = {bucket: each * factor for bucket, each in state.error_dict.items()}
        self._scale = scale

    def _average(self, bucket: Any, gradients: torch.Tensor) -> torch.Tensor:
        state = self._state
        if self._errors is None:
            self._errors = dict(state.error_dict)
        whole = state.iter < state.start_powerSGD_iter
        before = state.total_numel_after_compression
        averaged = self._hook(state, bucket).wait()
        count = gradients.numel() if whole else state.total_numel_after_compression - before
        self.bytes.across_regions += count * gradients.element_size()
        return averaged

    def settle(self, *, applied: bool) -> None:
        """Keep the errors of the last step, or discard them if it was not applied.

        After a step that was not applied, the low-rank matrices may contain NaN. They are then initialized again, with
        equal random values on all ranks.
        """
        errors, self._errors = self._errors, None
        if not applied and errors is not None:
            self._state.error_dict = errors
            self._state.p_memory_dict.clear()
            self._state.q_memory_dict.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return step count, errors with loss scale, low-rank matrices and random state of this rank, on the CPU."""
        state, compression = self._state, self._compression
        name, keys, position, has_gauss, cached = state.rng.get_state(legacy=True)
        return {
            "kind": [POWERSGD, compression.rank, torch_distributed.get_world_size()],
            "iter": state.iter,
            "scale": self._scale,
            "errors": _copies(state.error_dict),
            "p": _copies(state.p_memory_dict),
            "q": _copies(state.q_memory_dict),
            "rng": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a state that :meth:`state_dict` returned.

        A state with a different matrix rank or a different number of ranks is dropped with a warning.

        The states of all ranks have equal properties, so either all ranks or none drop their states.
        """
        own, kind = self._state, [POWERSGD, self._compression.rank, torch_distributed.get_world_size()]
        own.error_dict, own.p_memory_dict, own.q_memory_dict, own.iter = {}, {}, {}, 0
        own.rng = np.random.RandomState(0)
        self._errors, self._scale = None, 1.0
        if state is None:
            return
        if [*state["kind"]] != kind:
            _logger.warning(
                "PowerSGD starts without a state: the checkpoint has one for matrix rank %d on %d ranks, but this run "
                "has matrix rank %d on %d ranks; gradients are sent uncompressed for %d steps",
                *[*state["kind"]][1:],
                *kind[1:],
                self._compression.start_iter,
            )
            return
        name, keys, *rest = state["rng"]
        own.rng.set_state((name, np.array(keys, np.uint32), *rest))
        own.iter, self._scale = int(state["iter"]), float(state["scale"])
        device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda() else torch.device("cpu")
        for into, name in ((own.error_dict, "errors"), (own.p_memory_dict, "p"), (own.q_memory_dict, "q")):
            into.update({int(bucket): each.clone().to(device) for bucket, each in state[name].items()})


def _copies(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies on the CPU, because the cut of a checkpoint must not need memory on the device."""
    return {bucket: each.to("cpu", copy=True) for bucket, each in tensors.items()}


def _on_cuda() -> bool:
    return torch_distributed.get_backend() == "nccl"


class Averaged(Replicated):
    """DistributedDataParallel whose gradients are averaged by a hook of this module.

    Args:
        model: The model.
        regions: The ranks of each region; None means one all-reduce.
        compression: The compression of gradients; None sends them uncompressed.
        timeout: The time limit of torch for collectives of a region.
        **options: Passed to the base class.

    Attributes:
        averaging: The communication hook.

    Raises:
        UsageError: A rank is not in exactly one region.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        regions: Mapping[str, Sequence[int]] | None,
        compression: Compression | None,
        timeout: timedelta,
        **options: Any,
    ) -> None:
        if regions is not None:
            check_regions(regions, torch_distributed.get_world_size())
        super().__init__(model, **options)
        self.averaging: Averaging
        if compression is not None and compression.name == POWERSGD:
            self.averaging = PowerSGD(compression)
        else:
            dtype = None if compression is None else DTYPES[compression.name]
            self.averaging = Summed(dtype, regions, timeout)
        self.register_comm_hook(None, self.averaging.hook)
        if torch_distributed.get_rank() == 0:
            _log(regions, compression)


def check_together(
    regions: Mapping[str, Sequence[int]] | None, compression: Compression | None, options: Mapping[str, Any]
) -> None:
    """Check that regions, compression and the options of DistributedDataParallel can be combined.

    Raises:
        UsageError: The options cannot be combined.
    """
    if compression is None or compression.name != POWERSGD:
        return
    if regions is not None:
        raise UsageError(
            "DDPOption(regions=..., compression=Compression('powersgd')): the two cannot be combined; pass one of them"
        )
    if not options.get("find_unused_parameters") or options.get("static_graph"):
        raise UsageError(
            "DDPOption(compression=Compression('powersgd')) needs find_unused_parameters=True and no static_graph; "
            "otherwise DistributedDataParallel changes its buckets after the first step, and again after a resume"
        )


def _log(regions: Mapping[str, Sequence[int]] | None, compression: Compression | None) -> None:
    if regions is not None:
        shown = ", ".join(f"{name} (ranks {', '.join(map(str, ranks))})" for name, ranks in regions.items())
        _logger.info("dense gradients are summed in each region, then over the regions: %s", shown)
    if compression is not None:
        detail = ""
        if compression.name == POWERSGD:
            detail = f" (matrix rank {compression.rank}, after {compression.start_iter} steps)"
        _logger.warning(
            "dense gradients are compressed with %s%s, which is lossy: results differ from those without compression",
            compression.name,
            detail,
        )


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
