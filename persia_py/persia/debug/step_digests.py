"""Digests of tensors, in a script and at a prompt."""

import sys
from types import FrameType

import torch

from persia.loop import digests
from persia.loop.digests import md5_of
from persia.runtime.errors import UsageError

_SHOWN = 20
"""The maximum number of recorded names that a message lists."""


def digest(tensor: torch.Tensor | str) -> str:
    """Return the MD5 of a tensor's bytes, as 32 hexadecimal digits.

    Args:
        tensor: A tensor, the name of a tensor, or the name of a variable of the caller. The name of a tensor is one in
            the files of ``PERSIA_DIGEST``, such as ``loss`` or ``lookup/SLOT``. Its digest is that of the last recorded
            step.

    Raises:
        UsageError: The tensor does not exist.
    """
    if isinstance(tensor, torch.Tensor):
        return md5_of(tensor)
    if not isinstance(tensor, str):
        raise UsageError(f"digest({type(tensor).__name__}): expected a tensor or its name")
    recorder = digests.current()
    newest = {} if recorder is None else recorder.newest
    if tensor in newest:
        return newest[tensor]
    found = _variable(sys._getframe(1), tensor)
    if isinstance(found, torch.Tensor):
        return md5_of(found)
    names = list(newest)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    known = f"{', '.join(names[:_SHOWN])}{more}" if names else "none"
    hint = "" if newest else "to record the tensors of every N-th step: PERSIA_DIGEST=N"
    raise UsageError(f"digest({tensor!r}): no tensor of this name here; recorded: {known}", hint=hint)


def _variable(frame: FrameType, name: str) -> object:
    return frame.f_locals.get(name, frame.f_globals.get(name))


def record(step: int, model: torch.nn.Module | None = None, **tensors: torch.Tensor | None) -> None:
    """Record digests of a step of a training loop without ``TrainCtx``. Without ``PERSIA_DIGEST`` this does nothing.

    Call it after ``loss.backward()``, before the step of the optimizer.

    Args:
        step: The number of the step.
        model: The model whose parameters and gradients are recorded; if it is sharded over ranks, every rank must call
            this.
        **tensors: Other tensors, by name.

    Raises:
        UsageError: An argument in ``tensors`` is not a tensor.
    """
    wrong = [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor | None)]
    if wrong:
        found = ", ".join(f"{name}={type(tensors[name]).__name__}" for name in wrong)
        raise UsageError(f"record(step, ...): expected tensors, found {found}")
    recorder = digests.current()
    if recorder is None or not recorder.due(step):
        return
    weights = digests.Weights(model, step)
    recorder.record(step, [*weights.parameters(), *tensors.items(), *weights.gradients()])
