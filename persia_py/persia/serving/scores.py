"""Converts model outputs to outputs of labels and to scores, in training, evaluation, prediction and serving."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from persia.runtime.errors import DataError

if TYPE_CHECKING:
    import torch


def split(output: Any, labels: Sequence[str]) -> "list[torch.Tensor]":
    """Return the output of each label, ``[batch, 1]``.

    Args:
        output: The output of the model: a tensor ``[batch, labels]`` (or ``[batch]`` for one label), a list or tuple
            with one tensor for each label, or a dictionary of tensors by label.
        labels: The names of the labels.

    Raises:
        DataError: The output has a wrong shape, or lacks a label.
    """
    import torch

    if isinstance(output, Mapping):
        if absent := [name for name in labels if name not in output]:
            raise DataError(f"the model's output lacks the labels {', '.join(absent)}; it has {', '.join(output)}")
        parts = [output[name] for name in labels]
    elif isinstance(output, torch.Tensor):
        whole = output.unsqueeze(1) if output.dim() == 1 else output
        if whole.dim() != 2 or whole.shape[1] != len(labels):
            raise DataError(
                f"the model returned {list(output.shape)}, expected [batch, {len(labels)}]: a column for each label: "
                f"{', '.join(labels)}"
            )
        if len(labels) == 1:
            return [whole]
        parts = [whole[:, place : place + 1] for place in range(len(labels))]
    elif isinstance(output, Sequence) and len(output) == len(labels):
        parts = [*output]
    else:
        found = type(output).__name__ + (f" of length {len(output)}" if isinstance(output, Sequence) else "")
        raise DataError(f"the model returned {found}, expected an output for each label: {', '.join(labels)}")
    return [part.reshape(-1, 1) for part in parts]


def numbers(output: "torch.Tensor") -> npt.NDArray[np.float32]:
    """Return the output of a label, ``[batch, 1]``, as ``[batch]`` on the host."""
    found: npt.NDArray[np.float32] = output.detach().float().cpu().numpy()[:, 0]
    return found


def sigmoid(logits: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return ``1 / (1 + exp(-logit))``."""
    values = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(values))
    return np.where(values >= 0, 1 / (1 + small), small / (1 + small))


def score(output: npt.NDArray[np.float32], *, probability: bool) -> npt.NDArray[np.float32]:
    """Return the score of an output: its sigmoid for a ``probability``, otherwise the output itself."""
    return sigmoid(output).astype(np.float32) if probability else output
