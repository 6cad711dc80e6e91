"""The backward half of a training step: gradients checked, sent to the rows, and applied to the model."""

import torch
from torch.utils.dlpack import from_dlpack

from persia.backend.base import Backend, NonFiniteTensor
from persia.embedding.optim import Optimizer
from persia.loop import digests
from persia.loop.loss_scale import LossScale
from persia.runtime.errors import NonFiniteError, PersiaError, UsageError
from persia.runtime.logging import get_logger
from persia_core import backward as _core
from persia_core.forward import TrainingBatch

_logger = get_logger("gradients")

MAX_SKIPPED_STEPS = 25
"""The number of consecutive steps that may be skipped for NaN or infinity before training stops."""


class Gradients:
    """The embedding gradients of one step, between PyTorch and the rows.

    On a CUDA device the constructor starts the sums and sets :attr:`nonfinite` without a synchronisation. The caller
    combines the flag with its own and synchronises once.

    Args:
        batch: The batch of the gradients.
        gradients: The gradient of each feature; None if the loss does not depend on it.
        scale: The factor of the gradients.

    Attributes:
        nonfinite: A flag on the device, true if a gradient or the sum of an id is not finite; None where
            :meth:`first_nonfinite` finds out without waiting.
    """

    def __init__(self, batch: TrainingBatch, gradients: list[torch.Tensor | None], scale: float = 1.0) -> None:
        self._batch = batch
        self._scale = scale
        self._tensors = [None if each is None else each.detach().contiguous() for each in gradients]
        whole = [each for each in self._tensors if each is not None]
        self._sums: _core.Sums | None = None
        self.nonfinite: torch.Tensor | None = None
        if batch.device_id is not None and len(whole) == len(gradients):
            # PyTorch exports tensors of its current device only.
            with torch.cuda.device_of(whole[0]):  # type: ignore[no-untyped-call]
                self._sums = batch.sum(whole, scale)
            self.nonfinite = _any_in(whole) | from_dlpack(self._sums.nonfinite).any()
        elif batch.device_id is not None:
            # A feature without a gradient is not updated, which only the CPU path supports.
            self._tensors = [None if each is None else each.float().cpu() for each in self._tensors]

    def first_nonfinite(self, kind: str) -> str | None:
        """Return the first gradient that has NaN or infinity, with its ``kind``, name and sample."""
        for name, gradient in zip(self._batch.slots, self._tensors, strict=True):
            if gradient is not None and (place := _first_nonfinite_index(gradient)) is not None:
                sample = place // gradient[0].numel()
                return f"the gradient of {kind} {name!r}, sample {sample}, is {gradient.flatten()[place].item()}"
        return None

    def push(self, lr_factor: float) -> None:
        """Queue the push of the gradients."""
        if self._sums is not None:
            self._batch.push_sums(self._sums, lr_factor)
        else:
            self._batch.push(self._tensors, lr_factor, self._scale)


def _any_in(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return whether a gradient has NaN or infinity.

    This includes gradients that enter no sum, such as those of a sample without ids.
    """
    largest = torch.nn.utils.get_total_norm([each for each in gradients if each.numel()], float("inf"))
    return torch.isfinite(largest).logical_not()


def _first_nonfinite_index(gradient: torch.Tensor) -> int | None:
    if gradient.device.type == "cpu" and gradient.dtype == torch.float32:
        return _core.first_nonfinite(gradient)
    places = torch.isfinite(gradient).logical_not().flatten().nonzero()
    return int(places[0]) if len(places) else None


class Backward:
    """Back-propagates and applies a step to model and rows together, or to neither.

    Args:
        dense_optimizer: Updates the model.
        loss_scale: The factor of the loss in mixed precision.
        model: The model, for the digests of its tensors.

    Attributes:
        skipped_steps: The steps that were skipped for NaN or infinity.
    """

    def __init__(
        self,
        dense_optimizer: torch.optim.Optimizer,
        loss_scale: LossScale | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        self._dense_optimizer = dense_optimizer
        self._model = model
        self.loss_scale = loss_scale
        self.skipped_steps = 0
        self._skipped = 0  # in a row

    def __call__(
        self,
        loss: torch.Tensor,
        batch: TrainingBatch,
        embeddings: list[torch.Tensor],
        embedding_optimizer: Optimizer,
        backend: Backend,
    ) -> torch.Tensor:
        """Run one step; with several ranks, all apply it or none does.

        Args:
            loss: A scalar.
            batch: The batch of the loss.
            embeddings: Its embedding tensors, leaves of the loss's graph.
            embedding_optimizer: Gives the current learning rate.
            backend: Gives access to the other ranks.

        Returns:
            The back-propagated loss, including the loss scale.

        Raises:
            NonFiniteError: :data:`MAX_SKIPPED_STEPS` steps in a row were skipped.
        """
        if self.loss_scale is not None:
            loss = self.loss_scale.scaler.scale(loss)
        try:
            self._step(loss, batch, embeddings, embedding_optimizer, backend)
        finally:
            self._dense_optimizer.zero_grad()
        return loss

    def _step(
        self,
        loss: torch.Tensor,
        batch: TrainingBatch,
        embeddings: list[torch.Tensor],
        embedding_optimizer: Optimizer,
        backend: Backend,
    ) -> None:
        with backend.collective():
            _back_propagate(loss)
        digests.record_step(batch, loss, embeddings, self._model)
        scale = 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.value
        gradients = Gradients(batch, [tensor.grad for tensor in embeddings], scale)
        parameters = [p for group in self._dense_optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.loss_scale is not None and parameters:
            self.loss_scale.scaler.unscale_(self._dense_optimizer)
        mine = None
        if gradients.nonfinite is None or _any_nonfinite(loss, parameters, gradients.nonfinite):
            mine = _first_nonfinite_tensor(loss, gradients, parameters)
        nonfinite = backend.first_nonfinite(mine)
        if nonfinite is not None:
            batch.discard()
        else:
            self._skipped = 0
            gradients.push(embedding_optimizer.lr_factor(batch.step))
            self._dense_optimizer.step()
        if self.loss_scale is not None:
            self.loss_scale.update(finite=nonfinite is None)
        if nonfinite is not None:
            self._skip(nonfinite, batch.step)

    def _skip(self, nonfinite: str, step: int) -> None:
        self._skipped += 1
        self.skipped_steps += 1
        scale = "" if self.loss_scale is None else f"; the loss is scaled by {self.loss_scale.value:g} from now on"
        _logger.warning("step %d skipped, model and rows unchanged: %s%s", step, nonfinite, scale)
        if self._skipped >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{self._skipped} steps in a row had NaN or infinity; the last, step {step}: {nonfinite}"
            )


def _back_propagate(loss: torch.Tensor) -> None:
    """Back-propagate a loss.

    Raises:
        UsageError: That was done before.
    """
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if isinstance(error, PersiaError) or "backward through the graph a second time" not in str(error):
            raise
        raise UsageError(
            "ctx.backward(loss): loss.backward() was called on this loss before. ctx.backward(loss) back-propagates, "
            "updates the rows and makes the step of the dense optimizer: remove loss.backward() and optimizer.step()"
        ) from error


def _any_nonfinite(loss: torch.Tensor, parameters: list[torch.nn.Parameter], flag: torch.Tensor) -> bool:
    """Whether anything is not finite. On a device, this is the only wait of a step."""
    wrong = [torch.isfinite(loss.detach()).logical_not().any(), flag]
    if parameters:
        wrong.append(torch.isfinite(_total_norm(parameters)).logical_not())
    return bool(torch.stack(wrong).any().item())


def _total_norm(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def _first_nonfinite_tensor(
    loss: torch.Tensor, gradients: Gradients, parameters: list[torch.nn.Parameter]
) -> NonFiniteTensor | None:
    if not torch.isfinite(loss.detach()).all():
        return NonFiniteTensor(f"the loss is {loss.detach().flatten()[0].item()}")
    if (text := gradients.first_nonfinite("slot")) is not None:
        return NonFiniteTensor(text)
    if parameters and not torch.isfinite(_total_norm(parameters)):
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                shape = tuple(parameter.shape)
                return NonFiniteTensor(f"the gradient of dense parameter {index}, shape {shape}, is not finite", True)
    if gradients.nonfinite is not None and bool(gradients.nonfinite):
        return NonFiniteTensor("the sum of the gradients of one id is not finite")
    return None
