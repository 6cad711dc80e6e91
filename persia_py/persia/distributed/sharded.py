"""A model sharded over the ranks (FSDP2): each rank holds a part of the weights, gradients and optimizer state."""

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as torch_distributed

from persia.distributed.options import DDPOption, default_backend
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger

_logger = get_logger("distributed")


class FSDPOption(DDPOption):
    """Torch's FSDP2: :func:`torch.distributed.fsdp.fully_shard` of the whole model.

    Each rank holds a shard of the weights between steps, and all weights during forward and backward passes. Gradients
    and the optimizer's state are sharded. The script's model keeps a complete copy of the weights for evaluations and
    checkpoints.

    Args:
        backend: ``nccl`` or ``gloo``; None means ``PERSIA_DIST_BACKEND``, by default nccl with GPUs, gloo without.
        timeout_s: Seconds that a collective may take; None means ``PERSIA_DIST_TIMEOUT``, by default a day.
        reshard_after_forward: Whether to shard the weights again between forward and backward pass, so that they are
            gathered twice per step.

    Raises:
        UsageError: The backend is not supported, or a time is not above 0.
    """

    def __init__(
        self, backend: str | None = None, timeout_s: float | None = None, *, reshard_after_forward: bool = False
    ) -> None:
        super().__init__(backend=backend or "gloo", timeout_s=timeout_s)
        self._is_given = backend is not None
        self._reshards = reshard_after_forward

    def initialize(self, store: Any, rank: int, world_size: int, device_id: int | None) -> None:
        """Start the process group.

        Raises:
            UsageError: The backend is nccl without GPUs, or gloo with GPUs.
        """
        if not self._is_given:
            self.backend = default_backend(device_id)
        if self.backend == "gloo" and device_id is not None:
            raise UsageError(
                "FSDP cannot use gloo with a GPU: gloo does not gather the tensors of a GPU",
                hint="use nccl (FSDPOption(backend='nccl'), dist.backend or PERSIA_DIST_BACKEND), or use DDP "
                "(DDPOption, or `parallel: ddp` in persia.yml)",
            )
        super().initialize(store, rank, world_size, device_id)

    def wrap(self, model: torch.nn.Module, device_id: int | None) -> torch.nn.Module:
        """Return the sharded copy of the model."""
        sharded = ShardedModel(model, device_id, reshard_after_forward=self._reshards)
        _logger.info(
            "the model is sharded over %d ranks (FSDP): rank %d holds %d of its %d weights; reshard_after_forward: %s",
            torch_distributed.get_world_size(),
            torch_distributed.get_rank(),
            sum(_local(shard).numel() for shard in sharded.module.parameters()),
            sum(weight.numel() for weight in model.parameters()),
            str(self._reshards).lower(),
        )
        return sharded


_sharded: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[ShardedModel]]" = weakref.WeakKeyDictionary()


class ShardedModel(torch.nn.Module):
    """The sharded copy of a model, which is trained.

    Args:
        whole: The script's model, which receives rank 0's weights.
        device_id: The CUDA device; None means the CPU.
        reshard_after_forward: As in :class:`FSDPOption`.

    Attributes:
        whole: The script's model, with the weights of the last :meth:`gather`.
        module: The sharded copy.
        is_current: Whether ``whole`` has the weights of the copy.
        is_bound: Whether an optimizer updates the copy.

    Raises:
        UsageError: Torch cannot shard the model; the message says why.
    """

    whole: torch.nn.Module

    def __init__(self, whole: torch.nn.Module, device_id: int | None, *, reshard_after_forward: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__()
        self.__dict__["whole"] = whole  # kept outside the submodules of this module
        for tensor in whole.state_dict().values():
            torch_distributed.broadcast(tensor, src=0)
        mesh = init_device_mesh("cpu" if device_id is None else "cuda", (torch_distributed.get_world_size(),))
        self.module = copy.deepcopy(whole)
        try:
            sharded = fully_shard(self.module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        except (NotImplementedError, ValueError) as error:
            raise UsageError(
                f"FSDP cannot shard {type(whole).__name__}: {error}",
                hint="use DDP: DDPOption, or `parallel: ddp` in persia.yml",
            ) from error
        self._fsdp: Any = sharded
        self._reshards = reshard_after_forward
        if torch_distributed.get_backend() == "gloo":  # gloo can sum, but not average
            self._fsdp.set_force_sum_reduction_for_comms(True)
        if hasattr(self._fsdp, "set_reduce_scatter_unused_params"):  # ranks may use different layers, as with DDP
            self._fsdp.set_reduce_scatter_unused_params(True)
        self.is_current = True
        self.is_bound = False
        self._optimizer_state: dict[str, Any] | None = None
        _sharded[whole] = weakref.ref(self)

    def forward(self, *inputs: Any) -> Any:
        """Run the sharded copy. Collective: every rank must call it."""
        if torch.is_grad_enabled():
            self.is_current, self._optimizer_state = False, None
        return self.module(*inputs)

    @property
    def is_gathered(self) -> bool:
        """Whether this rank has all weights and the whole optimizer state."""
        return self.is_current and self._optimizer_state is not None

    @property
    def can_reset(self) -> bool:
        """Whether this version of torch can perform a step after an error in a backward pass."""
        return hasattr(self._fsdp, "reset_iter_state")

    def gather_weights(self) -> None:
        """Gather the weights for the next forward. Collective: every rank must call it."""
        self._fsdp.unshard()

    def synchronise_gradients(self, on: bool) -> None:
        """Set whether the next backward pass reduces gradients over the ranks, or accumulates them on this rank.

        If it accumulates them, the weights stay whole until the next forward pass. Then only the first forward pass of
        a step gathers weights, and only its last backward pass reduces gradients, so ranks may divide a step into
        different numbers of parts.
        """
        self._fsdp.set_requires_gradient_sync(on)
        self._fsdp.set_reshard_after_backward(on)
        if self._reshards:
            self._fsdp.set_reshard_after_forward(on)

    def drop_step(self) -> None:
        """Drop the gradients of an incomplete step, and shard the weights again.

        This is not a collective, but each rank that has run a forward pass of the step must call it before its next
        forward pass.
        """
        self.module.zero_grad()  # of the gathered weights, if a part was back-propagated
        if self.can_reset:
            self._fsdp.reset_iter_state()
        self._fsdp.reshard()
        self.module.zero_grad()
        self.synchronise_gradients(True)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the script's model update the shards."""
        self.is_bound = True
        shards = dict(self.module.named_parameters())
        self._replace(optimizer, {weight: shards[name] for name, weight in self.whole.named_parameters()})

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Return the optimizer to the script's model, with the state of the last :meth:`gather` if it is current."""
        self.is_bound = False
        state = self._optimizer_state if self.is_current else None
        optimizer.state.clear()
        weights = dict(self.whole.named_parameters())
        self._replace(optimizer, {shard: weights[name] for name, shard in self.module.named_parameters()})
        if state is not None:
            optimizer.load_state_dict(state)

    @staticmethod
    def _replace(optimizer: torch.optim.Optimizer, by: Mapping[torch.Tensor, torch.Tensor]) -> None:
        for group in optimizer.param_groups:
            group["params"] = [by.get(weight, weight) for weight in group["params"]]
        for weight in [weight for weight in optimizer.state if weight in by]:
            state = optimizer.state.pop(weight)
            optimizer.state[by[weight]] = {key: _shard_of(value, by[weight]) for key, value in state.items()}

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the shards of model and optimizer into the script's model. Collective: every rank must call it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        self.whole.load_state_dict(get_model_state_dict(self.module, options=StateDictOptions(full_state_dict=True)))
        self._optimizer_state = _whole_of(optimizer.state_dict())
        self.is_current = True

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole optimizer state, in the form that it has without shards."""
        if not self.is_current or (self._optimizer_state is None and optimizer.state):
            raise _not_gathered()
        return self._optimizer_state or optimizer.state_dict()

    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take this rank's shards of the script's model and of a whole optimizer state. Not a collective."""
        weights, buffers = dict(self.whole.named_parameters()), dict(self.whole.named_buffers())
        with torch.no_grad():
            for name, shard in self.module.named_parameters():
                _local(shard).copy_(_local(_shard_of(weights[name].detach(), shard)))
            for name, buffer in self.module.named_buffers():
                buffer.copy_(buffers[name])
        params = [weight for group in optimizer.param_groups for weight in group["params"]]
        sharded = {
            number: {key: _shard_of(value, params[number]) for key, value in each.items()}
            for number, each in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": sharded})
        self._optimizer_state, self.is_current = state, True


def check_current(model: torch.nn.Module) -> None:
    """Check that the script's model has the weights of its sharded copy.

    Raises:
        UsageError: The model was trained after its weights were gathered.
    """
    sharded = _sharded_of(model)
    if sharded is not None and not sharded.is_current:
        raise _not_gathered()


def check_loads(instance: torch.nn.Module | torch.optim.Optimizer) -> None:
    """Check that a state dict may be loaded into a model or an optimizer.

    Raises:
        UsageError: The weights are sharded over the ranks, and loading would not change the shards.
    """
    if _is_sharded(instance):
        raise UsageError(
            f"cannot load a state into {type(instance).__name__}: the weights are sharded over the ranks (FSDP), and a "
            "load would not change the shards; load it before TrainCtx is entered, or use ctx.load_checkpoint"
        )


def with_whole_state(
    instance: torch.nn.Module | torch.optim.Optimizer,
) -> torch.nn.Module | torch.optim.Optimizer:
    """Return the model or the optimizer itself; for a sharded copy, return the script's model.

    Raises:
        UsageError: The weights have been trained since they were gathered, or the optimizer updates shards.
    """
    if isinstance(instance, torch.nn.Module):
        check_current(instance)
        return instance.whole if isinstance(instance, ShardedModel) else instance
    if _is_sharded(instance):
        raise UsageError(
            f"cannot save the state of {type(instance).__name__}: it is sharded over the ranks (FSDP); call "
            "ctx.gather_model(), then ctx.dump_checkpoint, which writes the complete state"
        )
    return instance


def _is_sharded(instance: torch.nn.Module | torch.optim.Optimizer) -> bool:
    if isinstance(instance, torch.nn.Module):
        sharded = _sharded_of(instance)
        return sharded is not None and sharded.is_bound
    return any(hasattr(weight, "to_local") for group in instance.param_groups for weight in group["params"])


def _sharded_of(model: torch.nn.Module) -> ShardedModel | None:
    if isinstance(model, ShardedModel):
        return model
    found = _sharded.get(model)
    return None if found is None else found()


def _not_gathered() -> UsageError:
    return UsageError(
        "the weights of the model are sharded over the ranks (FSDP), and were trained after they were gathered; call "
        "ctx.gather_model() on every rank after the same step, before any rank evaluates or saves"
    )


def _shard_of(value: Any, like: torch.Tensor) -> Any:
    """Return this rank's shard of a whole tensor with the shape of ``like``; return anything else unchanged."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local()
    return local


def _whole_of(value: Any) -> Any:
    """Return a state with whole tensors instead of sharded ones. Collective: every rank must call it."""
    if isinstance(value, dict):
        return {key: _whole_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_whole_of(each) for each in value)
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()
