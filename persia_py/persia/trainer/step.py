"""A step of a run: the model gets a batch, whole or some rows at a time, and the step is made."""

import contextlib
import gc
import math

import torch

from persia.config import Config
from persia.ctx import TrainCtx
from persia.ctx.micro_batch import batch_normalisations
from persia.loop import out_of_memory
from persia.runtime.errors import ConfigError, OutOfMemoryError
from persia.runtime.logging import get_logger
from persia.runtime.settings import get_world_size
from persia.trainer.batches import weights_in
from persia.trainer.objective import Objective
from persia.trainer.state import TrainerState
from persia_core.forward import TrainingBatch

_logger = get_logger("trainer")

_KNOBS = (
    "less memory: --set train.micro_batch={rows} (rows in the model at a time), --set precision=bf16 (half the bytes "
    "of activations), or smaller layers (`model`) or dims (`features`)"
)


class Steps:
    """Makes the steps of a run.

    If memory runs out in a forward or a backward, the step is repeated with half as many rows at a time. Its loss and
    its gradients are those of the whole batch, except for rounding, and the rows of each id are pushed once. The number
    is kept for the next steps, and in checkpoints.

    Args:
        config: The configuration.
        ctx: The training context.
        objective: The loss.
        state: Keeps the number of rows at a time.
    """

    def __init__(self, config: Config, ctx: TrainCtx, objective: Objective, state: TrainerState) -> None:
        self._ctx = ctx
        self._objective = objective
        self._state = state
        self._weighted = config.train.weight is not None
        self._given = rows_at_a_time(config)
        self._anomalies = config.train.detect_anomaly

    @property
    def rows(self) -> int | None:
        """The number of rows at a time; None is the whole batch."""
        return self._state.micro_batch.of(self._given)

    def __call__(self, batch: TrainingBatch) -> torch.Tensor:
        """Train on a batch, and return its loss.

        Raises:
            OutOfMemoryError: There is not even the memory for one row at a time, or the step cannot be repeated.
            NonFiniteError: A tensor is not finite.
        """
        while True:
            rows = min(self.rows or batch.batch_size, batch.batch_size)
            try:
                with torch.autograd.set_detect_anomaly(True) if self._anomalies else contextlib.nullcontext():
                    return self._whole(batch) if rows == batch.batch_size else self._divided(batch, rows)
            except OutOfMemoryError as error:
                self._halve(error, batch, rows)
            gc.collect()  # the error held the frames of the failed step, and with them its tensors
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _whole(self, batch: TrainingBatch) -> torch.Tensor:
        output, labels = self._ctx.forward(batch)
        weights = self._weights(batch, labels)
        with out_of_memory.reported(batch.step, batch.batch_size, list):
            loss = self._objective(self._objective.outputs(output), labels, weights)
        self._ctx.backward(loss)
        return loss.detach()

    def _divided(self, batch: TrainingBatch, rows: int) -> torch.Tensor:
        total: torch.Tensor | None = None
        for part in self._ctx.micro_batches(batch, rows):
            output, labels = self._ctx.forward(part)
            weights = self._weights(batch, labels)
            share: float | torch.Tensor = part.share
            with out_of_memory.reported(batch.step, rows, list):
                if weights is not None:
                    whole, weights = weights.sum(), weights[part.rows]
                    share = weights.sum() / whole.clamp(min=torch.finfo(torch.float32).tiny)
                loss = share * self._objective(self._objective.outputs(output), labels, weights)
            self._ctx.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None  # noqa: S101 - a batch has a row
        return total

    def _weights(self, batch: TrainingBatch, labels: list[torch.Tensor]) -> torch.Tensor | None:
        return weights_in(batch.meta, batch.batch_size).to(labels[0].device) if self._weighted else None

    def _halve(self, error: OutOfMemoryError, batch: TrainingBatch, rows: int) -> None:
        """Choose half as many rows at a time.

        Raises:
            OutOfMemoryError: The step cannot be repeated with fewer.
        """
        half = math.ceil(rows / 2)
        error.hint = _KNOBS.format(rows=half)
        if rows == 1 or not error.can_repeat or batch_normalisations(self._ctx.model):
            raise error
        if get_world_size() > 1:
            error.hint += "; with several ranks the rows are not halved by themselves, because ranks average together"
            raise error
        self._state.micro_batch.use(half, self._given)
        _logger.warning(
            "step %d: memory ran out with %d rows in the model at a time; from now on %d, with the same loss and "
            "gradients (train.micro_batch): %s",
            batch.step,
            rows,
            half,
            str(error).partition("\n")[0],
        )


def rows_at_a_time(config: Config) -> int | None:
    """Return how many rows of a batch a rank gives the model at a time; None means all."""
    train = config.train
    sizes = [] if train.micro_batch is None else [train.micro_batch]
    if train.accumulate > 1:
        sizes.append(math.ceil(config.data.batch_size / get_world_size()))
    return min(sizes, default=None)


def check_divides(config: Config, model: torch.nn.Module) -> None:
    """Check that the rows of a batch can be given to a model some at a time, if the configuration wants that.

    Raises:
        ConfigError: A layer normalises over the rows of a batch.
    """
    names = batch_normalisations(model)
    if rows_at_a_time(config) is None or not names:
        return
    key = "train.accumulate" if config.train.accumulate > 1 else "train.micro_batch"
    raise ConfigError(
        f"{key}: {', '.join(names[:3])} of the model normalises over the rows of a batch, so that the result would not "
        f"be that of a whole batch: use LayerNorm or GroupNorm, or remove {key}"
    )
