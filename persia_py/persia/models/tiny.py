"""The smallest model: one linear layer, for tests of everything around a model."""

from collections.abc import Sequence

import torch
from torch import nn

from persia.models.blocks import check_inputs, wrong_sizes
from persia.runtime.errors import ConfigError


class Tiny(nn.Module):
    """Predict labels by one linear layer over all inputs: a logistic regression on dense inputs and embeddings.

    With ``x``, the concatenation of all dense inputs and embeddings::

        logits = W x + b

    If a run fails with this model too, the cause is not in the layers of the model.

    Args:
        num_dense: The total number of columns of the dense inputs; 0 for a model of slots only.
        embedding_dims: The dimension of each slot, in the order of training.
        num_labels: The number of labels.

    Raises:
        ConfigError: Arguments are incompatible; the message lists all errors.
    """

    def __init__(self, num_dense: int, embedding_dims: Sequence[int], num_labels: int = 1) -> None:
        super().__init__()
        wrong = [] if num_dense >= 0 else [f"num_dense ({num_dense}) must be at least 0"]
        wrong += [] if embedding_dims else ["embedding_dims is empty; pass the dimension of each slot"]
        wrong += wrong_sizes("embedding_dims", embedding_dims)
        wrong += [] if num_labels >= 1 else [f"num_labels ({num_labels}) must be at least 1"]
        if wrong:
            raise ConfigError("Tiny: " + "; ".join(wrong))
        self.num_dense = num_dense
        self.embedding_dims = [*embedding_dims]
        self.top = nn.Linear(num_dense + sum(embedding_dims), num_labels)

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits, ``[batch, num_labels]``. Inputs and errors are those of :meth:`DCNv2.forward`."""
        # TorchScript supports neither these messages nor the class of the error.
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_inputs("Tiny", non_id_tensors, embedding_tensors, self.num_dense, self.embedding_dims)
        logits: torch.Tensor = self.top(torch.cat(non_id_tensors + embedding_tensors, dim=1))
        return logits
