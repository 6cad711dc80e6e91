"""Some rows of a training batch, which the model is run on apart from the others."""

from dataclasses import dataclass

import torch

from persia.runtime.errors import UsageError
from persia_core.forward import TrainingBatch


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a training batch, from :meth:`persia.ctx.TrainCtx.micro_batches`.

    Attributes:
        batch: The whole batch.
        rows: The rows, as a slice of the batch.
        share: The part of the batch's rows: the factor of a mean loss.
        is_last: The step is made after this one.
        dense: The dense inputs of the rows.
        embeddings: Their embeddings.
        labels: Their labels.
    """

    batch: TrainingBatch
    rows: slice
    share: float
    is_last: bool
    dense: list[torch.Tensor]
    embeddings: list[torch.Tensor]
    labels: list[torch.Tensor] | None

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return int(self.rows.stop - self.rows.start)


def check_splits(model: torch.nn.Module | None) -> None:
    """Check that a model computes each row by itself, so that micro-batches have the gradients of the whole batch.

    Raises:
        UsageError: It normalises over the rows of a batch.
    """
    names = batch_normalisations(model)
    if names:
        raise UsageError(
            f"micro-batches: {', '.join(names[:3])} of the model normalises over the rows of a batch, so that the "
            "gradients would not be those of the whole batch: use LayerNorm or GroupNorm, or put it into eval() mode"
        )


def batch_normalisations(model: torch.nn.Module | None) -> list[str]:
    """Return the layers of a model that normalise over the rows of a batch, by name and class."""
    return [
        f"{type(module).__name__} {name!r}"
        for name, module in ([] if model is None else model.named_modules())
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
    ]
