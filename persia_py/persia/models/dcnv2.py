"""DCN-v2, the improved deep and cross network of Wang et al. 2021 (arXiv 2008.13535)."""

from collections.abc import Sequence

import torch
from torch import nn

from persia.models.blocks import CrossNetwork, check_inputs, mlp, wrong_dropout, wrong_sizes
from persia.runtime.errors import ConfigError


class DCNv2(nn.Module):
    """Predict a binary label, such as a click, from dense inputs and one embedding for each slot.

    A cross network models products of inputs explicitly, an MLP implicitly. With ``x``, the concatenation of all dense
    inputs and embeddings (the parallel structure of the paper, figure 1b)::

        logit = w . [cross(x), deep(x)] + b

    Without ``deep_mlp``, the model has only the cross network. The model returns logits. Train it with
    ``nn.BCEWithLogitsLoss``; ``torch.sigmoid`` of the output is the probability. Slots may have different dimensions.

    Args:
        num_dense: The total number of columns of the dense inputs; 0 for a model of slots only.
        embedding_dims: The dimension of each slot, in the order of training.
        cross_layers: The number of layers of the cross network.
        deep_mlp: The layer sizes of the MLP. A ReLU follows every layer.
        low_rank: The rank of the weights of the cross network. None: full rank.
        dropout: The dropout probability of each layer of the MLP.
        num_labels: The number of labels; each has a separate logit on the same layers.
        activation_checkpointing: Whether to recompute intermediate results in the backward pass instead of keeping
            them. This saves memory and slows down the step; results are the same.

    Raises:
        ConfigError: Arguments are incompatible; the message lists all errors.
    """

    def __init__(
        self,
        num_dense: int,
        embedding_dims: Sequence[int],
        cross_layers: int = 3,
        deep_mlp: Sequence[int] = (256, 128),
        low_rank: int | None = None,
        dropout: float = 0.0,
        num_labels: int = 1,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        _check(num_dense, embedding_dims, cross_layers, deep_mlp, low_rank, dropout, num_labels)
        self.num_dense = num_dense
        self.embedding_dims = [*embedding_dims]
        width = num_dense + sum(embedding_dims)
        self.cross = CrossNetwork(width, cross_layers, low_rank, recomputes=activation_checkpointing)
        self.deep = mlp(width, deep_mlp, dropout, recomputes=activation_checkpointing)
        if deep_mlp:
            self.deep.append(nn.ReLU())
        if deep_mlp and dropout:
            self.deep.append(nn.Dropout(dropout))
        self.top = nn.Linear(width + (deep_mlp[-1] if deep_mlp else 0), num_labels)

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits, ``[batch, num_labels]``.

        Args:
            non_id_tensors: The dense inputs, each ``[batch, columns]``, with ``num_dense`` columns in total.
            embedding_tensors: One ``[batch, dim]`` for each slot, in the order of training.

        Raises:
            DataError: A tensor does not have the shape that the model expects.
        """
        # TorchScript supports neither these messages nor the class of the error.
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_inputs("DCNv2", non_id_tensors, embedding_tensors, self.num_dense, self.embedding_dims)
        inputs = torch.cat(non_id_tensors + embedding_tensors, dim=1)
        parts = [self.cross(inputs)]
        if len(self.deep) > 0:
            parts.append(self.deep(inputs))
        logits: torch.Tensor = self.top(torch.cat(parts, dim=1))
        return logits


def _check(
    num_dense: int,
    embedding_dims: Sequence[int],
    cross_layers: int,
    deep_mlp: Sequence[int],
    low_rank: int | None,
    dropout: float,
    num_labels: int,
) -> None:
    wrong = [] if num_dense >= 0 else [f"num_dense ({num_dense}) must be at least 0"]
    if not embedding_dims:
        wrong.append("embedding_dims is empty; pass the dimension of each slot")
    wrong += wrong_sizes("embedding_dims", embedding_dims)
    if cross_layers < 1:
        wrong.append(f"cross_layers ({cross_layers}) must be at least 1")
    wrong += wrong_sizes("deep_mlp", deep_mlp)
    if low_rank is not None and low_rank < 1:
        wrong.append(f"low_rank ({low_rank}) must be at least 1, or None for full rank")
    wrong += wrong_dropout(dropout)
    wrong += [] if num_labels >= 1 else [f"num_labels ({num_labels}) must be at least 1"]
    if wrong:
        raise ConfigError("DCNv2: " + "; ".join(wrong))
