"""Access to a model through the wrapper that trains it on several ranks."""

from typing import Any

import torch

from persia.distributed.averaging import Averaged, Bytes
from persia.distributed.replicated import Replicated
from persia.distributed.sharded import ShardedModel, check_current


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module, without its DDP or FSDP wrapper."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        module: torch.nn.Module = model.module
        return module
    return model.whole if isinstance(model, ShardedModel) else model


def whole_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module like :func:`unwrap_model`, with the current weights.

    Raises:
        UsageError: The weights are sharded and were not gathered.
    """
    check_current(model)
    return unwrap_model(model)


def trained_module(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module whose weights the optimizer updates: the user's module, or its sharded copy."""
    return model.module if isinstance(model, ShardedModel) else unwrap_model(model)


def synchronise_gradients(model: torch.nn.Module | None, on: bool) -> None:
    """Average the gradients of the next forward and backward pass over all ranks, or leave them on each rank.

    Gradients that stay on a rank are added to its next gradients, and the sums are averaged.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = on  # like no_sync(), for one forward pass
    elif isinstance(model, ShardedModel):
        model.synchronise_gradients(on)


def check_averaged(model: torch.nn.Module | None, step: int) -> None:
    """Check after the backward pass of a step that its gradients were averaged over all ranks.

    Raises:
        UsageError: Gradients are missing on this rank; the message names the weights.
    """
    if isinstance(model, Replicated):
        model.check_averaged(step)


def zero_loss(model: torch.nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor:
    """Return a loss of 0 whose backward pass averages the accumulated gradients over the ranks.

    The loss depends on the weights that have a gradient on this rank, but not on outputs of the model. A NaN in an
    output therefore cannot enter the gradients, and no buffer changes. Only the wrapper and the hooks of the whole
    model run; the hooks receive the inputs and an output ``[1, 1]`` of 0.
    """
    module = trained_module(model)

    def zero(*_: Any) -> torch.Tensor:
        weights = [each for each in module.parameters() if each.requires_grad]
        used = [each for each in weights if each.grad is not None] or weights
        return torch.stack([(each * 0).sum().float() for each in used])[:, None].sum(0, keepdim=True)

    attributes, instead = vars(module), {"forward": zero, "_compiled_call_impl": None}
    own = {name: attributes[name] for name in instead if name in attributes}
    attributes.update(instead)
    try:
        output: torch.Tensor = model(*inputs)
    finally:
        for name in instead:
            del attributes[name]
        attributes.update(own)
    return output.sum()


def gather_weights(model: torch.nn.Module | None) -> None:
    """Gather the weights of a sharded model for a step. Collective: every rank must call it."""
    if isinstance(model, ShardedModel):
        model.gather_weights()


def can_drop_step(model: torch.nn.Module | None) -> bool:
    """Whether :func:`drop_step` may follow an error in a backward pass."""
    return not isinstance(model, ShardedModel) or model.can_reset


def drop_step(model: torch.nn.Module | None) -> None:
    """Drop an incomplete step in the wrapper of a model. Every rank must call this after the same step.

    The wrapper may still hold gradients, or wait for a backward pass. It would mistake the backward pass of the next
    step for the missing one, and average gradients too early.
    """
    settle_step(model, applied=False)
    if isinstance(model, ShardedModel):
        model.drop_step()
    elif isinstance(model, torch.nn.parallel.DistributedDataParallel):
        synchronise_gradients(model, True)
        # A failed forward pass may leave the flag False. If it is True, the next forward pass broadcasts the buffers.
        model.require_forward_param_sync = True
        if hasattr(model.reducer, "_reset_state"):
            model.reducer._reset_state()


def rescale_averaging(model: torch.nn.Module | None, scale: float) -> None:
    """Set the loss scale of the next backward pass for gradient averaging. Every rank calls this before that pass."""
    if isinstance(model, Averaged):
        model.averaging.rescale(scale)


def settle_step(model: torch.nn.Module | None, *, applied: bool) -> None:
    """Notify gradient averaging whether the step was applied. Every rank calls this after the same step."""
    if isinstance(model, Averaged):
        model.averaging.settle(applied=applied)


def averaging_state(model: torch.nn.Module | None) -> dict[str, Any] | None:
    """Return the state of this rank's gradient averaging for a checkpoint; None if it has no state."""
    return model.averaging.state_dict() if isinstance(model, Averaged) else None


def load_averaging(model: torch.nn.Module | None, state: dict[str, Any] | None) -> None:
    """Load the state of this rank's gradient averaging; None starts from an initial state."""
    if isinstance(model, Averaged):
        model.averaging.load_state_dict(state)


def averaged_bytes(model: torch.nn.Module | None) -> Bytes | None:
    """Return the bytes that this rank passed to collectives of gradients; None for a single float32 all-reduce."""
    return model.averaging.bytes if isinstance(model, Averaged) else None


def optimizer_state(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the whole state of a model's optimizer.

    Raises:
        UsageError: The state is sharded and was not gathered.
    """
    return model.optimizer_state(optimizer) if isinstance(model, ShardedModel) else optimizer.state_dict()


def load_dense(
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer,
    dense: dict[str, Any] | None,
    state: dict[str, Any],
) -> None:
    """Load whole states of a model, if it exists, and of its optimizer."""
    if model is not None and dense is not None:
        unwrap_model(model).load_state_dict(dense)
    if isinstance(model, ShardedModel):
        model.load(optimizer, state)
    else:
        optimizer.load_state_dict(state)
