"""A model, and the wrapper that trains it on several ranks."""

from typing import Any

import torch

from persia.distributed.sharded import ShardedModel, check_current


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module, without what trains it on several ranks."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        module: torch.nn.Module = model.module
        return module
    return model.whole if isinstance(model, ShardedModel) else model


def whole_model(model: torch.nn.Module) -> torch.nn.Module:
    """As :func:`unwrap_model`, with the weights of its training.

    Raises:
        UsageError: They are sharded, and not gathered.
    """
    check_current(model)
    return unwrap_model(model)


def trained_module(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module whose weights the optimizer updates: the user's own, or its sharded copy."""
    return model.module if isinstance(model, ShardedModel) else unwrap_model(model)


def synchronise_gradients(model: torch.nn.Module | None, on: bool) -> None:
    """Average the gradients of the next forward and backward over all ranks, or leave them on each rank.

    Those that are left are added to those that are averaged, on each rank before.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = on  # as no_sync() does, for one forward
    elif isinstance(model, ShardedModel):
        model.synchronise_gradients(on)


def zero_loss(model: torch.nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor:
    """Return a loss of 0 whose backward averages the gradients that the ranks have added up.

    It depends on the weights that have a gradient here, and on nothing that the model computes: a NaN of the model
    cannot enter the gradients, and no buffer changes. Only the wrapper runs, and hooks of the whole model, which get
    the inputs and an output ``[1, 1]`` of 0.
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
    """Gather the weights of a sharded model for the forwards and backwards of a step; every rank calls this."""
    if isinstance(model, ShardedModel):
        model.gather_weights()


def can_drop_step(model: torch.nn.Module | None) -> bool:
    """Whether :func:`drop_step` may follow an error in the middle of a backward."""
    return not isinstance(model, ShardedModel) or model.can_reset


def drop_step(model: torch.nn.Module | None) -> None:
    """Forget a step that was left in its middle, in a model's wrapper; every rank calls this after the same step.

    The wrapper may still hold gradients, or wait for the backward of a forward: it would take that of the next forward
    for it, and average gradients too early.
    """
    if isinstance(model, ShardedModel):
        model.drop_step()
    elif isinstance(model, torch.nn.parallel.DistributedDataParallel):
        synchronise_gradients(model, True)
        model.require_forward_param_sync = True  # of buffers, in the next forward; a forward that failed left it so
        if hasattr(model.reducer, "_reset_state"):
            model.reducer._reset_state()


def optimizer_state(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the whole state of a model's optimizer.

    Raises:
        UsageError: It is sharded, and not gathered.
    """
    return model.optimizer_state(optimizer) if isinstance(model, ShardedModel) else optimizer.state_dict()


def load_dense(
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer,
    dense: dict[str, Any] | None,
    state: dict[str, Any],
) -> None:
    """Load whole states of a model, if there is one, and of its optimizer."""
    if model is not None and dense is not None:
        unwrap_model(model).load_state_dict(dense)
    if isinstance(model, ShardedModel):
        model.load(optimizer, state)
    else:
        optimizer.load_state_dict(state)
