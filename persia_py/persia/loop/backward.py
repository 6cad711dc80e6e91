"""The backward half of a training step: checks gradients, sends them to the rows, and applies them to the model."""

from collections.abc import Callable

import torch
from torch.utils.dlpack import from_dlpack

from persia.backend.base import Backend, NonFiniteTensor
from persia.embedding.optim import Optimizer
from persia.loop import digests
from persia.loop.finite import (
    Ids,
    StepTensors,
    at_sample,
    first_before_loss,
    first_nonfinite_index,
    is_sharded,
    local_part,
    no_ids,
)
from persia.loop.loss_scale import LossScale
from persia.runtime import flight
from persia.runtime.errors import NonFiniteError, PersiaError, UsageError
from persia.runtime.logging import get_logger
from persia_core import backward as _core
from persia_core.forward import TrainingBatch

_logger = get_logger("gradients")

MAX_SKIPPED_STEPS = 25
"""The maximum number of consecutive steps that may be skipped because of NaN or infinity before training stops."""

_FIND = (
    "inspect the tensor named above, lower the learning rate, or clip the norm of gradients; to find the operation, "
    "train once with --set train.detect_anomaly=true (in a script torch.autograd.set_detect_anomaly(True))"
)
_FIND_OR_SKIP = f"{_FIND}; to skip such steps: --set train.nonfinite=skip (in a script TrainCtx(nonfinite='skip'))"


class Gradients:
    """The embedding gradients of one step, between PyTorch and the rows.

    On a CUDA device the constructor starts the sums and sets :attr:`nonfinite` without a synchronization. The caller
    combines the flag with its own and synchronizes once.

    Args:
        batch: The batch of the gradients.
        gradients: The gradient of each feature; None if the loss does not depend on it.
        scale: The factor by which gradients are multiplied.

    Attributes:
        nonfinite: A flag on the device, true if a gradient or the sum of an id is not finite; None on the CPU, where
            :meth:`first_nonfinite` checks without waiting.
    """

    def __init__(self, batch: TrainingBatch, gradients: list[torch.Tensor | None], scale: float = 1.0) -> None:
        self._batch = batch
        self._scale = scale
        self._tensors = [None if each is None else each.detach().contiguous() for each in gradients]
        whole = [each for each in self._tensors if each is not None]
        self._sums: _core.Sums | None = None
        self.nonfinite: torch.Tensor | None = None
        if batch.device_id is not None and len(whole) == len(gradients):
            # PyTorch exports only tensors on its current device.
            with torch.cuda.device_of(whole[0]):  # type: ignore[no-untyped-call]
                self._sums = batch.sum(whole, scale)
            self.nonfinite = _any_in(whole) | from_dlpack(self._sums.nonfinite).any()
        elif batch.device_id is not None:
            # Some features have no gradient and must not be updated. Only the CPU path supports this.
            self._tensors = [None if each is None else each.float().cpu() for each in self._tensors]

    def first_nonfinite(self, kind: str, ids: Ids = no_ids) -> str | None:
        """Return the first gradient that has NaN or infinity, with its ``kind``, name, sample and ids."""
        for name, gradient in zip(self._batch.slots, self._tensors, strict=True):
            if gradient is not None and (place := first_nonfinite_index(gradient)) is not None:
                found = ids(name, place // gradient[0].numel())
                return at_sample(f"the gradient of {kind} {name!r}", gradient, place, found)
        return None

    @property
    def any_nonfinite(self) -> bool:
        """Whether a gradient or, on a device, the sum of an id is not finite. This waits for the device."""
        if self.nonfinite is not None:
            return bool(self.nonfinite)
        whole = [each for each in self._tensors if each is not None and each.numel()]
        if not whole or bool(torch.isfinite(torch.nn.utils.get_total_norm(whole))):
            return False
        # The norm of finite values may overflow float32, so the elements are checked.
        return any(first_nonfinite_index(each) is not None for each in whole)

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


class Backward:
    """Back-propagates and applies a step to model and rows together, or to neither.

    Args:
        dense_optimizer: The optimizer of the model.
        loss_scale: The loss scale in mixed precision.
        nonfinite: The reaction to NaN or infinity: ``raise`` ends training, ``skip`` skips the step. With a loss scale,
            gradients that overflow skip the step in both cases, and the scale is halved.
        clip_norm: The maximum norm of the gradient of the model's weights; None does not clip. Gradients are checked
            for NaN and infinity before they are scaled down (Pascanu, Mikolov and Bengio 2013, algorithm 1).

    Attributes:
        skipped_steps: The number of steps that were skipped because of NaN or infinity.
        grad_norm: The norm of the gradient of the model's weights in the last step, before it is clipped; None before
            the first step, and if the model has no gradient.
        loss: The loss of the last step, summed over its parts; None before the first step.
        applied: Whether the last step was applied, or failed while being applied.
    """

    def __init__(
        self,
        dense_optimizer: torch.optim.Optimizer,
        loss_scale: LossScale | None = None,
        *,
        nonfinite: str = "skip",
        clip_norm: float | None = None,
    ) -> None:
        self._dense_optimizer = dense_optimizer
        self.loss_scale = loss_scale
        self._nonfinite = nonfinite
        self._clip_norm = clip_norm
        self.skipped_steps = 0
        self.grad_norm: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self._skipped = 0  # the number of consecutive skipped steps
        self.applied = False
        self._parts: list[torch.Tensor] = []  # the losses of the micro-batches of this step so far

    def begin(self) -> None:
        """Drop the gradients of an unfinished step."""
        self._parts.clear()
        self._dense_optimizer.zero_grad()
        if self.loss_scale is not None:
            self.loss_scale.abandon()

    def accumulate(self, loss: torch.Tensor, step: int, backend: Backend) -> None:
        """Back-propagate a part of the step's loss. The gradients are added to those of the other parts."""
        with backend.collective(), flight.Call(flight.BACKWARD, step):  # FSDP's hooks gather weights in a collective
            _back_propagate(self._scaled(loss), step)
        self._parts.append(loss.detach())

    @property
    def scale(self) -> float:
        """The factor by which the loss is multiplied in the next backward pass."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.loss_scale is None else self.loss_scale.scaler.scale(loss)

    def __call__(
        self,
        loss: torch.Tensor,
        batch: TrainingBatch,
        embeddings: list[torch.Tensor],
        embedding_optimizer: Optimizer,
        backend: Backend,
        known: Callable[[], StepTensors] = StepTensors,
    ) -> torch.Tensor:
        """Run one step; with several ranks, all apply it or none does.

        Args:
            loss: The loss, a scalar.
            batch: The batch of the loss.
            embeddings: The embedding tensors of the batch, leaves of the loss's graph.
            embedding_optimizer: The optimizer of rows, which has the current learning rate.
            backend: The access to the rows and the other ranks.
            known: Returns the tensors from which the loss was computed, to name the first non-finite one, and for
                digests.

        Returns:
            The back-propagated loss, including the loss scale.

        Raises:
            NonFiniteError: A tensor has NaN or infinity, and the policy is ``raise``; or :data:`MAX_SKIPPED_STEPS`
                steps in a row were skipped. Neither model nor rows are changed, on any rank.
        """
        self.applied = False
        self._parts.append(loss.detach())
        loss = self._scaled(loss)
        try:
            self._step(loss, batch, embeddings, embedding_optimizer, backend, known)
        finally:
            self.begin()
        return loss

    def _step(
        self,
        loss: torch.Tensor,
        batch: TrainingBatch,
        embeddings: list[torch.Tensor],
        embedding_optimizer: Optimizer,
        backend: Backend,
        known: Callable[[], StepTensors],
    ) -> None:
        with backend.backward(loss, batch.step):
            _back_propagate(loss, batch.step)
        losses = self._parts[0] if len(self._parts) == 1 else torch.stack(self._parts)
        self.loss = losses.sum()
        with backend.collective():  # digests of a sharded model are those of the gathered tensors
            digests.record_step(batch, self.loss, embeddings, known)
        gradients = Gradients(batch, [tensor.grad for tensor in embeddings], 1.0 / self.scale)
        parameters = [p for group in self._dense_optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.loss_scale is not None and parameters:
            self._unscale(self.loss_scale, parameters)
        mine = None
        with backend.collective():  # on a device, this block waits for the all-reduce
            self.grad_norm = norm = _total_norm(parameters) if parameters else None
            if gradients.nonfinite is None or _any_nonfinite(losses, norm, gradients.nonfinite):
                clips = self._clip_norm is not None
                mine = _first_nonfinite_tensor(losses, norm, gradients, parameters, known, clips=clips)
        nonfinite = backend.first_nonfinite(mine)
        if nonfinite is not None:
            batch.discard()
            self._refuse(nonfinite, batch.step)
            return
        self._skipped = 0
        if self._clip_norm is not None and norm is not None:
            _clip(parameters, self._clip_norm, norm)
        self.applied = True
        with flight.Call(flight.PUSH, batch.step):
            gradients.push(embedding_optimizer.lr_factor(batch.step))
        with flight.Call(flight.OPTIMIZER, batch.step):
            self._dense_optimizer.step()
        if self.loss_scale is not None:
            self.loss_scale.update(finite=True)

    def _unscale(self, loss_scale: LossScale, parameters: list[torch.nn.Parameter]) -> None:
        if not any(is_sharded(each) for each in parameters):
            loss_scale.unscale(self._dense_optimizer)
            return
        for each in parameters:
            if each.grad is not None:
                local_part(each.grad).mul_(1.0 / loss_scale.value)

    def _refuse(self, nonfinite: NonFiniteTensor, step: int) -> None:
        """Skip the step, or end training. Every rank makes the same decision."""
        overflows = self.loss_scale is not None and nonfinite.is_gradient and self.loss_scale.value > 1.0
        if self._nonfinite == "raise" and not overflows:
            error = NonFiniteError(f"step {step}: {nonfinite.text}; model and rows are unchanged", hint=_FIND_OR_SKIP)
            error.step = step
            raise error
        if self.loss_scale is not None:
            self.loss_scale.update(finite=False)
        self._skipped += 1
        self.skipped_steps += 1
        scale = "" if self.loss_scale is None else f"; the loss is scaled by {self.loss_scale.value:g} from now on"
        _logger.warning("step %d skipped, model and rows unchanged: %s%s", step, nonfinite.text, scale)
        if self._skipped >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{self._skipped} steps in a row had NaN or infinity; the last, step {step}: {nonfinite.text}",
                hint=_FIND,
            )


def _back_propagate(loss: torch.Tensor, step: int) -> None:
    """Back-propagate a loss.

    Raises:
        UsageError: The loss, or a part of its graph, was already back-propagated.
        NonFiniteError: torch's anomaly detection has found NaN.
    """
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not isinstance(error, PersiaError) and "returned nan values in its" in str(error):
            found = NonFiniteError(
                f"step {step}: {str(error).rstrip('.')}; model and rows are unchanged",
                hint="the warning above this error shows the line of the forward pass: correct this line, lower the "
                "learning rate, or clip the norm of gradients",
            )
            found.step = step
            raise found from error
        if isinstance(error, PersiaError) or "backward through the graph a second time" not in str(error):
            raise
        raise UsageError(
            "ctx.backward(loss): loss.backward() was called on this loss before, or the loss depends on tensors of an "
            "earlier backward pass. ctx.backward(loss) back-propagates, updates the rows and steps the dense "
            "optimizer: remove loss.backward() and optimizer.step(), and detach tensors that are kept between steps"
        ) from error


def _clip(parameters: list[torch.nn.Parameter], limit: float, norm: torch.Tensor) -> None:
    """Scale gradients down to a maximum norm. If gradients are sharded, each rank scales its own part."""
    if not any(is_sharded(each) for each in parameters):
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for each in parameters:
        if each.grad is not None:
            local_part(each.grad).mul_(factor)


def _any_nonfinite(losses: torch.Tensor, norm: torch.Tensor | None, flag: torch.Tensor) -> bool:
    """Whether any tensor is not finite. On a device, this is the only wait in a step."""
    wrong = [torch.isfinite(losses).logical_not().any(), flag]
    if norm is not None:
        wrong.append(torch.isfinite(norm).logical_not())
    return bool(torch.stack(wrong).any().item())


def _total_norm(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Return the norm of all gradients. For sharded gradients, every rank must call this."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    full = getattr(norm, "full_tensor", None)
    return norm if full is None else full()


def _first_nonfinite_tensor(
    losses: torch.Tensor,
    norm: torch.Tensor | None,
    gradients: Gradients,
    parameters: list[torch.nn.Parameter],
    of_step: Callable[[], StepTensors],
    *,
    clips: bool,
) -> NonFiniteTensor | None:
    """Return the first non-finite tensor in the order of the computation. Not a collective.

    A norm beyond float32 counts as non-finite if gradients are clipped, because the scaling factor would make all
    gradients 0.
    """
    if (
        bool(torch.isfinite(losses).all())
        and not gradients.any_nonfinite
        and (norm is None or bool(torch.isfinite(norm)))
    ):
        return None
    known = of_step()
    if (before := first_before_loss(known)) is not None:
        return before
    if not torch.isfinite(losses).all():
        wrong = losses.flatten()[torch.isfinite(losses).logical_not().flatten()][0]
        return NonFiniteTensor(f"the loss is {wrong.item()}")
    if (text := gradients.first_nonfinite("slot", known.ids)) is not None:
        return NonFiniteTensor(text, is_gradient=True)
    names = {} if known.model is None else {id(each): name for name, each in known.model.named_parameters()}
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None and not torch.isfinite(local_part(parameter.grad)).all():
            name = names.get(id(parameter), index)
            what = f"the gradient of the weight {name!r} of the model, shape {tuple(parameter.shape)}, is not finite"
            return NonFiniteTensor(what, averaged=True, is_gradient=True)
    if gradients.any_nonfinite:
        return NonFiniteTensor("the sum of the gradients of one id is not finite", is_gradient=True)
    if clips and norm is not None and not torch.isfinite(norm):
        what = f"the norm of the gradients of the model's weights is {norm.item()}, so they cannot be clipped"
        return NonFiniteTensor(what, averaged=True, is_gradient=True, derived=True)
    return None  # only the norm overflows float32, or, with sharded gradients, another rank names the tensor
