"""The backward half of a training step: gradients checked, sent to the rows, and applied to the model."""

import torch

from persia.common import CommonContext, Offender
from persia.embedding.optim import Optimizer
from persia.errors import NonFiniteError
from persia.logger import get_logger
from persia_core import backward as _core
from persia_core.forward import TrainingBatch

_logger = get_logger("gradients")

MAX_SKIPPED_STEPS = 25
"""Steps in a row that may be skipped for NaN or infinity before training stops."""


class Backward:
    """Back-propagates and applies a step to model and rows together, or to neither.

    Args:
        dense_optimizer: Updates the model.
    """

    def __init__(self, dense_optimizer: torch.optim.Optimizer) -> None:
        self._dense_optimizer = dense_optimizer
        self._skipped = 0

    def __call__(
        self,
        loss: torch.Tensor,
        batch: TrainingBatch,
        embeddings: list[torch.Tensor],
        embedding_optimizer: Optimizer,
        common: CommonContext,
    ) -> None:
        """Run one step; with several ranks, all of them apply it or none.

        Args:
            loss: A scalar.
            batch: The batch the loss was made from.
            embeddings: Its embedding tensors, leaves of the loss's graph.
            embedding_optimizer: Gives the learning rate in force.
            common: Knows the other ranks.

        Raises:
            NonFiniteError: :data:`MAX_SKIPPED_STEPS` steps in a row were skipped.
        """
        try:
            self._step(loss, batch, embeddings, embedding_optimizer, common)
        finally:
            self._dense_optimizer.zero_grad()

    def _step(
        self,
        loss: torch.Tensor,
        batch: TrainingBatch,
        embeddings: list[torch.Tensor],
        embedding_optimizer: Optimizer,
        common: CommonContext,
    ) -> None:
        with common.collective():
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [None if tensor.grad is None else tensor.grad.contiguous() for tensor in embeddings]
        offender = common.first_offender(self._first_nonfinite(loss, batch, gradients))
        if offender is not None:
            batch.discard()
            self._skip(offender, batch.step)
        else:
            self._skipped = 0
            batch.push(gradients, embedding_optimizer.lr_factor(batch.step))
            self._dense_optimizer.step()

    def _skip(self, offender: str, step: int) -> None:
        self._skipped += 1
        _logger.warning("step %d skipped, model and rows unchanged: %s", step, offender)
        if self._skipped >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{self._skipped} steps in a row had NaN or infinity; the last, step {step}: {offender}"
            )

    def _first_nonfinite(
        self, loss: torch.Tensor, batch: TrainingBatch, gradients: list[torch.Tensor | None]
    ) -> Offender | None:
        if not torch.isfinite(loss.detach()).all():
            return Offender(f"the loss is {loss.detach().flatten()[0].item()}")
        for name, gradient in zip(batch.slots, gradients, strict=True):
            if gradient is not None and (place := _core.first_nonfinite(gradient)) is not None:
                sample = place // gradient[0].numel()
                value = gradient.flatten()[place].item()
                return Offender(f"the gradient of slot {name!r}, sample {sample}, is {value}")
        parameters = [p for group in self._dense_optimizer.param_groups for p in group["params"] if p.grad is not None]
        if parameters and not torch.isfinite(torch.nn.utils.get_total_norm([p.grad for p in parameters])):
            for index, parameter in enumerate(parameters):
                if not torch.isfinite(parameter.grad).all():
                    shape = tuple(parameter.shape)
                    return Offender(f"the gradient of dense parameter {index}, shape {shape}, is not finite", True)
        return None
