"""The loss of a batch, over all labels, and the outputs of a model by label."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from persia.runtime.errors import DataError
from persia.serving.scores import split

Label = tuple[str, float, str]
"""The name of a label, its weight in the loss, and its type of loss, ``bce`` or ``mse``."""


class Objective:
    """The loss of a batch: the sum over labels of weight times mean loss.

    With ``w_i`` the weight of row ``i`` (1 without weights), the mean loss of a label is ``sum_i w_i l_i / sum_i w_i``,
    where ``l_i`` is

    * ``bce``: the binary cross-entropy of the label and ``sigmoid(output)``, computed from the logit
    * ``mse``: the squared difference of label and output

    Args:
        labels: The labels, in the order of the model's outputs.
    """

    def __init__(self, labels: Sequence[Label]) -> None:
        self.labels = [*labels]

    def outputs(self, output: Any) -> list[torch.Tensor]:
        """Return the output of each label, ``[batch, 1]``.

        Args:
            output: The output of the model: a tensor ``[batch, labels]`` (or ``[batch]`` for one label), a list or
                tuple with one tensor for each label, or a dictionary of tensors by label.

        Raises:
            DataError: The output has a wrong shape, or lacks a label.
        """
        return split(output, [name for name, _, _ in self.labels])

    def __call__(
        self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss.

        Args:
            outputs: The result of :meth:`outputs`.
            labels: The labels, ``[batch, 1]`` each.
            weights: The weights of rows, ``[batch, 1]``; None means 1.

        Raises:
            DataError: There is no label.
        """
        total: torch.Tensor | None = None
        for (_, weight, kind), output, label in zip(self.labels, outputs, labels, strict=True):
            loss = self._mean(kind, output, label, weights)
            loss = loss if weight == 1 else weight * loss
            total = loss if total is None else total + loss
        if total is None:
            raise DataError("there is no label to train on")
        return total

    @staticmethod
    def _mean(kind: str, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        function = functional.binary_cross_entropy_with_logits if kind == "bce" else functional.mse_loss
        if weights is None:
            return function(output, label)
        each = function(output, label, reduction="none")
        return (weights * each).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
