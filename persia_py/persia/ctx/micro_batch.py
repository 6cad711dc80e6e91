"""A subset of the rows of a training batch, on which the model runs separately."""

from dataclasses import dataclass

import torch

from persia.runtime.errors import UsageError
from persia_core.forward import TrainingBatch


@dataclass(frozen=True)
class MicroBatch:
    """A subset of the rows of a training batch, from :meth:`persia.ctx.TrainCtx.micro_batches`.

    Attributes:
        batch: The whole batch.
        rows: The rows, as a slice of the batch.
        share: The share of the batch's rows, by which a mean loss is multiplied.
        is_last: Whether this is the last micro-batch of the batch.
        dense: The dense inputs of the rows.
        embeddings: The embeddings of the rows.
        labels: The labels of the rows.
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
    """Check that a model computes each row separately, so that micro-batches give the gradients of the whole batch.

    Raises:
        UsageError: The model has a batch-normalization layer in training mode.
    """
    names = batch_normalisations(model)
    if names:
        raise UsageError(
            "cannot split a batch into micro-batches: the model normalizes over the samples of a batch "
            f"({', '.join(names[:3])}), so the gradients would not be those of the whole batch; use LayerNorm or "
            "GroupNorm, or call eval() on these layers"
        )


def batch_normalisations(model: torch.nn.Module | None) -> list[str]:
    """Return the layers of a model that normalize over the rows of a batch, by name and class."""
    return [
        f"{type(module).__name__} {name!r}"
        for name, module in ([] if model is None else model.named_modules())
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
    ]
