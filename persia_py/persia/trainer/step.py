"""A training step: the model processes a batch, as a whole or some rows at a time, and the step is applied."""

import contextlib
import dataclasses
import gc
import math
from collections.abc import Sequence

import torch

from persia.config import Config
from persia.ctx import TrainCtx
from persia.ctx.micro_batch import MicroBatch, batch_normalisations
from persia.loop import out_of_memory
from persia.runtime.errors import ConfigError, OutOfMemoryError
from persia.runtime.logging import get_logger
from persia.runtime.settings import get_world_size
from persia.trainer.batches import weights_in
from persia.trainer.objective import Objective
from persia.trainer.state import TrainerState
from persia_core.forward import TrainingBatch

_logger = get_logger("trainer")

_FEWER = "--set train.micro_batch={rows} (rows in the model at a time), "
_KNOBS = "--set precision=bf16 (half the bytes of activations), or smaller layers (`model`) or dims (`features`)"
PROBED = 5
"""The number of steps, at the start of a loop and after each halving, in which several ranks first agree that all have
enough memory. In later steps, which need the same memory, they average gradients in the backward pass."""


class Steps:
    """Performs the steps of a run.

    If memory runs out in a forward or backward pass, the step is repeated with half as many rows at a time. Its loss
    and its gradients are those of the whole batch, except for rounding, and each row is pushed once. The number of rows
    is kept for later steps, and in checkpoints.

    Several ranks halve together. Each rank computes its parts, except the last of several, without the other ranks.
    Then the ranks agree that all had enough memory, and average gradients in the last part. Otherwise a failing rank
    would leave the other ranks waiting in a collective.

    Args:
        config: The configuration.
        ctx: The training context.
        objective: The loss.
        state: The state, which stores the number of rows at a time.
    """

    def __init__(self, config: Config, ctx: TrainCtx, objective: Objective, state: TrainerState) -> None:
        self._ctx = ctx
        self._objective = objective
        self._state = state
        self._weighted = config.train.weight is not None
        self._given = rows_at_a_time(config)
        self._anomalies = config.train.detect_anomaly
        self._made = 0  # the number of steps with the current number of rows
        self._agreed_rows: int | None = None  # the rows that needed too much memory, on the first such rank

    @property
    def rows(self) -> int | None:
        """The number of rows at a time; None means the whole batch."""
        return self._state.micro_batch.of(self._given)

    def __call__(self, batch: TrainingBatch) -> torch.Tensor:
        """Train on a batch, and return its loss.

        Raises:
            OutOfMemoryError: There is not enough memory even for one row at a time, or the step cannot be repeated.
            NonFiniteError: A tensor is not finite.
        """
        while True:
            rows = min(self.rows or batch.batch_size, batch.batch_size)
            try:
                with torch.autograd.set_detect_anomaly(True) if self._anomalies else contextlib.nullcontext():
                    loss = self._step(batch, rows)
            except OutOfMemoryError as error:
                self._halve(error, batch, rows)
            else:
                self._made += 1
                return loss
            gc.collect()  # frees the tensors of the failed step, which the error kept alive
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _step(self, batch: TrainingBatch, rows: int) -> torch.Tensor:
        if self._agrees:
            return self._in_agreement(batch, rows)
        if rows == batch.batch_size:
            return self._whole(batch)
        return self._divided(batch, [*self._ctx.micro_batches(batch, rows)])

    @property
    def _agrees(self) -> bool:
        """Whether the ranks agree in this step that each had enough memory; equal on all ranks."""
        if get_world_size() == 1 or batch_normalisations(self._ctx.model):
            return False
        return self.rows is not None or self._made < PROBED

    def _whole(self, batch: TrainingBatch) -> torch.Tensor:
        output, labels = self._ctx.forward(batch)
        weights = self._weights(batch, labels)
        with out_of_memory.reported(batch.step, batch.batch_size, list):
            loss = self._objective(self._objective.outputs(output), labels, weights)
        self._ctx.backward(loss)
        return loss.detach()

    def _in_agreement(self, batch: TrainingBatch, rows: int) -> torch.Tensor:
        """Perform a step whose gradients are averaged only after all ranks had memory for all parts except the last.

        Raises:
            OutOfMemoryError: A rank did not have enough memory; the error is the same on all ranks.
        """
        parts = [*self._ctx.micro_batches(batch, rows)]
        first, last = parts[:-1] or [dataclasses.replace(parts[0], is_last=False)], parts[-1]
        failed = loss = None
        # The weights are gathered before the parts. Otherwise a rank that fails in a part would leave other ranks
        # waiting in an all-gather.
        self._ctx.gather_weights(batch)
        try:
            loss = self._divided(batch, first)
        except OutOfMemoryError as error:
            failed = [error.can_repeat, rows, str(error)]
        backend = self._ctx.common_context
        assert backend is not None  # noqa: S101 - a step is made inside the context
        found = backend.all_gather("memory of a step", failed)
        for rank, each in enumerate(found):
            if each is not None:
                _, self._agreed_rows, text = each
                other = OutOfMemoryError(f"rank {rank}: {text}")
                other.can_repeat = all(repeats for repeats, *_ in filter(None, found))
                raise other
        assert loss is not None  # noqa: S101 - it has not failed
        if len(parts) > 1:
            return loss + self._divided(batch, [last])
        self._ctx.average_gradients(last)
        return loss

    def _divided(self, batch: TrainingBatch, parts: Sequence[MicroBatch]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for part in parts:
            output, labels = self._ctx.forward(part)
            weights = self._weights(batch, labels)
            share: float | torch.Tensor = part.share
            with out_of_memory.reported(batch.step, part.batch_size, list):
                if weights is not None:
                    whole, weights = weights.sum(), weights[part.rows]
                    share = weights.sum() / whole.clamp(min=torch.finfo(torch.float32).tiny)
                loss = share * self._objective(self._objective.outputs(output), labels, weights)
            self._ctx.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None  # noqa: S101 - there is a part
        return total

    def _weights(self, batch: TrainingBatch, labels: list[torch.Tensor]) -> torch.Tensor | None:
        return weights_in(batch.meta, batch.batch_size).to(labels[0].device) if self._weighted else None

    def _halve(self, error: OutOfMemoryError, batch: TrainingBatch, rows: int) -> None:
        """Halve the number of rows at a time.

        Raises:
            OutOfMemoryError: The step cannot be repeated with fewer rows.
        """
        agreed, self._agreed_rows = self._agreed_rows, None
        rows = rows if agreed is None else agreed
        half = math.ceil(rows / 2)
        norms = batch_normalisations(self._ctx.model)
        error.hint = f"to use less memory: {_FEWER.format(rows=half) if half < rows and not norms else ''}{_KNOBS}"
        cannot = rows == 1 or not error.can_repeat or bool(norms)
        if norms:
            error.hint += (
                f"; the number of rows was not halved, because {norms[0]} normalizes over the samples of a batch"
            )
        elif get_world_size() > 1 and agreed is None:
            cannot = True
            error.hint += (
                "; the number of rows was not halved, because the other ranks may have begun to average gradients"
            )
        if cannot:
            raise error
        self._state.micro_batch.use(half, self._given)
        self._made = 0
        _logger.warning(
            "step %d: memory ran out with %d rows in the model at a time; using %d from now on, with the same loss and "
            "gradients (train.micro_batch): %s",
            batch.step,
            rows,
            half,
            str(error).partition("\n")[0],
        )


def rows_at_a_time(config: Config) -> int | None:
    """Return the number of rows on which the model runs at a time on a rank; None means all."""
    train = config.train
    sizes = [] if train.micro_batch is None else [train.micro_batch]
    if train.accumulate > 1:
        sizes.append(math.ceil(config.data.batch_size / get_world_size()))
    return min(sizes, default=None)


def check_divides(config: Config, model: torch.nn.Module) -> None:
    """Check that the model can process the rows of a batch in parts, if the configuration requests this.

    Raises:
        ConfigError: The model has a batch-normalization layer.
    """
    names = batch_normalisations(model)
    if rows_at_a_time(config) is None or not names:
        return
    key = "train.accumulate" if config.train.accumulate > 1 else "train.micro_batch"
    raise ConfigError(
        f"{key}: the model normalizes over the samples of a batch ({', '.join(names[:3])}), so the result would differ "
        "from that of a whole batch",
        hint=f"use LayerNorm or GroupNorm in the model, or remove {key}",
    )
