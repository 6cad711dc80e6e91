"""Training steps: forward, backward, and the data of an open step."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from persia.checkpoint.run_state import RunState
from persia.ctx.base import PreprocessMode
from persia.ctx.checks import titled
from persia.ctx.embedding import EmbeddingCtx
from persia.ctx.micro_batch import MicroBatch, check_splits
from persia.distributed.wrapped import (
    can_drop_step,
    drop_step,
    gather_weights,
    rescale_averaging,
    settle_step,
    synchronise_gradients,
    trained_module,
    zero_loss,
)
from persia.embedding.data import PersiaBatch
from persia.embedding.encoded import sample_ids
from persia.embedding.inputs import arranged
from persia.loop import out_of_memory
from persia.loop.backward import Backward
from persia.loop.finite import Output, StepTensors, named_outputs, no_ids
from persia.loop.loss_scale import LossScale
from persia.loop.precision import Precision
from persia.loop.trained import TrainedBatches
from persia.loop.training import TrainingLoop
from persia.runtime import flight, watchdog
from persia.runtime.errors import NonFiniteError, OutOfMemoryError, UsageError
from persia.runtime.logging import get_logger
from persia_core.forward import TrainingBatch

_logger = get_logger("ctx")


@dataclass(frozen=True)
class StepPolicy:
    """The options of training steps. The attributes are the arguments of :class:`persia.ctx.TrainCtx`.

    Attributes:
        nonfinite: ``raise`` or ``skip``.
        clip_norm: The maximum norm of the gradient of the model's weights; None does not clip.
        precision: ``fp32``, ``bf16`` or ``fp16``; None leaves autocast to the model.
        mixed_precision: Whether to scale the loss on a device, if ``precision`` is None.
        growth_interval: The number of steps after which the loss scale grows.
    """

    nonfinite: str = "skip"
    clip_norm: float | None = None
    precision: str | None = None
    mixed_precision: bool = False
    growth_interval: int = 2000

    def backward(
        self,
        dense_optimizer: torch.optim.Optimizer,
        precision: Precision,
        device_id: int | None,
    ) -> Backward:
        """Return the object that performs the backward half of steps."""
        scale = precision.loss_scale(self.growth_interval)
        if self.mixed_precision and self.precision is None:
            scale = None if device_id is None else LossScale(self.growth_interval)
            if scale is None:
                _logger.info("mixed_precision has no effect without device_id: the loss is not scaled")
        return Backward(dense_optimizer, scale, nonfinite=self.nonfinite, clip_norm=self.clip_norm)


class StepCtx(EmbeddingCtx):
    """Trains the model on batches: an :class:`EmbeddingCtx` with training steps. A subclass opens the training loop.

    Args:
        dense_optimizer: The optimizer of the model.
        policy: The options of steps.
        *args: As in :class:`EmbeddingCtx`, after its mode.
        **kwargs: Passed to :class:`EmbeddingCtx`.
    """

    def __init__(self, dense_optimizer: torch.optim.Optimizer, policy: StepPolicy, *args: Any, **kwargs: Any) -> None:
        super().__init__(PreprocessMode.TRAIN, *args, **kwargs)
        self.dense_optimizer = dense_optimizer
        self._precision = Precision(policy.precision or "fp32", self.device_id)
        self._backward = policy.backward(dense_optimizer, self._precision, self.device_id)
        self._trained_batches = TrainedBatches()
        self._state: RunState | None = None
        self._loop: TrainingLoop | None = None  # the most recent loop
        self._micro: MicroBatch | None = None  # the micro-batch of the last forward pass, if it ran on one
        self._given: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # dense inputs and labels of the step
        self.samples = 0
        self._outputs: list[tuple[int, Any]] = []  # output of each forward pass, with the index of its first sample

    @property
    def _run_state(self) -> RunState:
        if self._state is None:
            raise UsageError(f"{type(self).__name__} is used outside its `with` block")
        return self._state

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, which also unscales the dense gradients; None if the loss is not scaled."""
        scale = self._backward.loss_scale
        return None if scale is None else scale.scaler

    @property
    def step(self) -> int:
        """The number of the last batch that was trained on, from 1. A resumed run continues the count."""
        return self._backend.trained_step

    @property
    def skipped_steps(self) -> int:
        """The number of steps of this context that were skipped because of NaN or infinity."""
        return self._backward.skipped_steps

    def prepare_features(
        self, batch: TrainingBatch | PersiaBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        """Like :meth:`EmbeddingCtx.prepare_features`.

        If the previous training batch had no :meth:`backward`, also count this omission.
        """
        before = self.current_batch
        if batch is not before:
            self._trained_batches.end_step(self._embeddings)
        tensors = super().prepare_features(batch)
        current = self.current_batch
        if current is not None and current is not before:
            self._trained_batches.forward(current.step, trains=current.requires_grad and torch.is_grad_enabled())
        self._given, self._outputs = (tensors[0], tensors[2] or []), []
        return tensors

    def micro_batches(self, batch: TrainingBatch, rows: int) -> Iterator[MicroBatch]:
        """Iterate over micro-batches of a batch, in one step.

        ::

            for part in ctx.micro_batches(batch, 1024):
                output, labels = ctx.forward(part)
                ctx.backward(loss_fn(output, labels[0]) * part.share)

        Gradients are added up, and the :meth:`backward` of the last part performs the step. With a mean loss, the
        gradients are those of the whole batch, except for rounding, and each row is pushed once. Layers such as dropout
        draw different random numbers.

        Args:
            batch: A batch of the training loop.
            rows: The number of samples of each micro-batch; the last one may have fewer.

        Raises:
            UsageError: ``rows`` is below 1, or a layer of the model normalizes over the samples of a batch.
        """
        if rows < 1:
            raise UsageError(f"micro_batches(rows={rows}): must be at least 1")
        size = batch.batch_size
        if rows < size:
            check_splits(self.model)
        self._drop_step()
        dense, embeddings, labels = self.prepare_features(batch)
        for first in range(0, size, rows):
            part = slice(first, min(first + rows, size))
            dense_part, embeddings_part = ([each[part] for each in tensors] for tensors in (dense, embeddings))
            labels_part = None if labels is None else [each[part] for each in labels]
            share = (part.stop - first) / size
            yield MicroBatch(batch, part, share, part.stop == size, dense_part, embeddings_part, labels_part)

    def forward(self, batch: TrainingBatch | PersiaBatch | MicroBatch) -> tuple[Any, Any]:
        """Run the model as in :class:`EmbeddingCtx`; ``batch`` may also be a part of :meth:`micro_batches`.

        Raises:
            OutOfMemoryError: The model needs more memory than is available. The message lists the largest tensors.
        """
        if not isinstance(batch, MicroBatch):
            if self._micro is not None:
                self._drop_step()
            return super().forward(batch)
        watchdog.progress()
        self._micro = batch
        synchronise_gradients(self.model, batch.is_last)
        return self._run_model(batch.batch, batch.dense, batch.embeddings, batch.labels)

    def gather_weights(self, batch: TrainingBatch) -> None:
        """Gather the weights of a sharded (FSDP) model for a step. Collective: every rank must call it.

        Raises:
            OutOfMemoryError: There is not enough memory for the weights. Other ranks may be waiting in this collective,
                so the step cannot be repeated.
        """
        watchdog.progress()
        with self._reporting_memory(batch), self._backend.collective(), flight.Call(flight.FORWARD, batch.step):
            gather_weights(self.model)

    def average_gradients(self, last: MicroBatch) -> None:
        """Average the accumulated gradients over the ranks and finish the step, without another forward pass.

        Args:
            last: The last micro-batch of the step, whose forward and backward pass the script has run with ``is_last``
                false.

        Raises:
            NonFiniteError, OutOfMemoryError: As in :meth:`backward`.
        """
        assert self.model is not None  # noqa: S101 - it ran the forward passes
        watchdog.progress()
        self._micro = dataclasses.replace(last, is_last=True)
        synchronise_gradients(self.model, True)
        with self._backend.collective(), flight.Call(flight.FORWARD, last.batch.step):
            loss = zero_loss(self.model, (last.dense, [each.detach() for each in last.embeddings]))
        self.backward(loss)

    def _drop_step(self) -> None:
        """Discard the rest of a step that the script, or an error, ended early."""
        if self._micro is not None or self._outputs:  # a whole batch without a backward pass has only outputs
            self._micro = None
            drop_step(self.model)
        self._backward.begin()

    def _run_model(
        self, batch: TrainingBatch, dense: list[torch.Tensor], embeddings: list[torch.Tensor], labels: Any
    ) -> tuple[Any, Any]:
        with self._reporting_memory(batch), self._precision.autocast():
            output, labels = super()._run_model(batch, dense, embeddings, labels)
        output = self._precision.restored(output)
        self._outputs.append((0 if self._micro is None else self._micro.rows.start, output))
        return output, labels

    def _reporting_memory(self, batch: TrainingBatch) -> contextlib.AbstractContextManager[None]:
        rows = (batch if self._micro is None else self._micro).batch_size
        return out_of_memory.reported(batch.step, rows, lambda: self._known(batch).by_size(self.dense_optimizer))

    def _known(self, batch: TrainingBatch) -> StepTensors:
        """Return the tensors that the step was computed with, for error reports."""
        places, (dense, labels) = self._arrange(batch, whole=True), self._given
        fed = None if self._loop is None else self._loop.open_batch
        dense_names, label_names = arranged(batch.dense_names, places.dense), arranged(batch.label_names, places.labels)
        return StepTensors(
            None if self.model is None else trained_module(self.model),
            no_ids if fed is None or fed.step != batch.step else partial(sample_ids, fed.batch.to_bytes()),
            [*zip(batch.slots, self._embeddings, strict=True)],
            [(titled("dense input", index, dense_names[index]), each) for index, each in enumerate(dense)],
            [(titled("label", index, label_names[index]), each) for index, each in enumerate(labels)],
            [Output(*each, first) for first, output in self._outputs for each in named_outputs(output)],
        )

    def backward(self, loss: torch.Tensor, embedding_gradient_check_frequency: int = 20) -> torch.Tensor:
        """Back-propagate, update the model, and push the embedding gradients.

        A step with NaN or infinity in the loss or any gradient changes neither model nor rows, on any rank. A message
        names the first non-finite tensor in the order of the computation, with its sample and ids. The message is
        logged, or raised as an error with ``nonfinite="raise"``.

        Args:
            loss: A scalar that depends on the last :meth:`forward`.
            embedding_gradient_check_frequency: Accepted for compatibility with PersiaML, without effect: every step is
                checked.

        Returns:
            The back-propagated loss, detached. With mixed precision, the loss is scaled.

        Raises:
            UsageError: :meth:`forward` was not called with a training batch.
            NonFiniteError: A tensor is not finite, or too many steps in a row were skipped.
            OutOfMemoryError: The gradients need more memory than is available. The message lists the largest tensors.
        """
        del embedding_gradient_check_frequency
        watchdog.progress()
        batch = self.current_batch
        if batch is None or not batch.requires_grad:
            raise UsageError("cannot call backward() yet: call forward() with a training batch first")
        self._label_check.backward(loss)
        if self._micro is not None and not self._micro.is_last:
            try:
                with self._reporting_memory(batch):
                    self._backward.accumulate(loss, batch.step, self._backend)
            except OutOfMemoryError as error:
                error.can_repeat = can_drop_step(self.model)
                raise
            return loss.detach()
        self._trained_batches.backward()
        rescale_averaging(self.model, self._backward.scale)
        can_repeat = False
        try:
            with self._reporting_memory(batch):
                optimizer, known = self._run_state.optimizer, partial(self._known, batch)
                loss = self._backward(loss, batch, self._embeddings, optimizer, self._backend, known)
        except OutOfMemoryError as error:
            # With several ranks, others may already wait in the all-reduce of this backward pass.
            can_repeat = error.can_repeat = self._backend.is_alone and not self._backward.applied
            drop_step(self.model)
            raise
        except NonFiniteError:
            self._trained_batches.skipped = max(self._trained_batches.skipped + 1, self._backward.skipped_steps)
            drop_step(self.model)
            raise
        finally:
            if can_repeat:
                self._trained_batches.repeat(batch.step)
            else:
                self._end_step()
        settle_step(self.model, applied=self._backward.applied)
        self._trained_batches.skipped = self._backward.skipped_steps
        self.samples += batch.batch_size
        if self._loop is not None:
            self._loop.trained(batch)
        else:  # the loop belongs to another context
            self._backend.trained_step = batch.step
        return loss.detach()

    def _end_step(self) -> None:
        self.current_batch = self._micro = None
        self._embeddings, self._given, self._outputs = [], ([], []), []

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss of the last step, unscaled; None before the first one."""
        return self._backward.loss

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradient of the model's weights in the last step, before it is clipped.

        None before the first step, and if no weight has a gradient. The norm is NaN or infinity if a gradient has NaN
        or infinity. On a device, reading the norm waits for the step.
        """
        return None if self._backward.grad_norm is None else float(self._backward.grad_norm)
