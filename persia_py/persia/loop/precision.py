"""The precision of the dense part: which operations run in a 16-bit type, and whether the loss is scaled."""

import contextlib
from typing import Any

import torch

from persia.loop.loss_scale import LossScale
from persia.runtime.errors import UsageError

DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of each precision; None means float32 throughout."""


class Precision:
    """The precision of a model's forward and backward pass.

    Weights, their gradients and the loss are float32, and so are embeddings, unless the context has another
    ``embedding_dtype``. With bf16 and fp16, :func:`torch.autocast` runs matrix products in that dtype; fp16 also scales
    the loss.

    Args:
        name: A key of :data:`DTYPES`.
        device_id: The CUDA device of the model; None means the CPU.

    Raises:
        UsageError: The name is unknown, or the device does not support the dtype.
    """

    def __init__(self, name: str, device_id: int | None) -> None:
        if name not in DTYPES:
            raise UsageError(f"TrainCtx(precision={name!r}): expected one of {', '.join(map(repr, DTYPES))}")
        self._device = "cpu" if device_id is None else "cuda"
        self._dtype = DTYPES[name]
        if name == "bf16" and device_id is not None and not torch.cuda.is_bf16_supported():
            raise UsageError(f"CUDA device {device_id} does not support precision bf16; use fp16 or fp32")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Enclose the forward pass of the model."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self._dtype)

    def loss_scale(self, growth_interval: int) -> LossScale | None:
        """Return the loss scale, which only fp16 needs; ``growth_interval`` as in :class:`LossScale`."""
        return LossScale(growth_interval, self._device) if self._dtype == torch.float16 else None

    def restored(self, output: Any) -> Any:
        """Return a model's output with its tensors converted to float32, for the loss."""
        return output if self._dtype is None else _restored(output, self._dtype)


def _restored(output: Any, dtype: torch.dtype) -> Any:
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == dtype else output
    if isinstance(output, dict):
        return {key: _restored(value, dtype) for key, value in output.items()}
    if type(output) in (list, tuple):  # a named tuple keeps its class
        return type(output)(_restored(value, dtype) for value in output)
    return output
