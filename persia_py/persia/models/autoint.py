"""AutoInt, attention between features, of Song et al. 2019 (arXiv 1810.11921)."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from persia.models.attention import ATTENTIONS, Attention
from persia.models.blocks import check_inputs, mlp, wrong_dropout, wrong_sizes
from persia.runtime.errors import ConfigError


class AutoInt(nn.Module):
    """Predict a binary label, such as a click, from dense inputs and one embedding for each slot.

    Every slot and every dense column is a field with a vector of size ``width``. Layers of multi-head self-attention
    combine the vectors of all fields; an MLP, if any, receives all inputs unchanged (AutoInt+ in the paper). With dense
    inputs ``x`` and slots ``e_1`` to ``e_S``::

        fields = [P_1 e_1, ..., P_S e_S, x_1 v_1, ..., x_D v_D]
        logit  = w . [attention(fields), deep([x, e_1, ..., e_S])] + b

    The model returns logits. Train it with ``nn.BCEWithLogitsLoss``; ``torch.sigmoid`` of the output is the
    probability. Slots may have different dimensions.

    Args:
        num_dense: The total number of columns of the dense inputs; 0 for a model of slots only.
        embedding_dims: The dimension of each slot, in the order of training.
        attention_layers: The number of attention layers.
        heads: The number of heads of each attention layer.
        width: The size of the vector of a field in the attention layers, a multiple of ``heads``.
        attention: ``sdpa``: torch's fused attention, which keeps no matrix of weights between the forward and the
            backward pass. ``math``: the same formula, operation by operation. The results are equal except for
            rounding.
        deep_mlp: The layer sizes of the MLP. A ReLU follows every layer. Without layers, the model has only the
            attention.
        dropout: The dropout probability of each layer of the MLP.
        num_labels: The number of labels; each has a separate logit on the same layers.
        activation_checkpointing: Whether to recompute intermediate results in the backward pass instead of keeping
            them. This saves memory and slows down the step; results are the same.

    Raises:
        ConfigError: Arguments are incompatible; the message lists all errors.
    """

    dense_vectors: nn.Parameter | None

    def __init__(
        self,
        num_dense: int,
        embedding_dims: Sequence[int],
        attention_layers: int = 2,
        heads: int = 2,
        width: int = 32,
        attention: Literal["sdpa", "math"] = "sdpa",
        deep_mlp: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        num_labels: int = 1,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        counts = {"attention_layers": attention_layers, "heads": heads, "width": width, "num_labels": num_labels}
        _check(num_dense, embedding_dims, counts, attention, deep_mlp, dropout)
        self.num_dense = num_dense
        self.embedding_dims = [*embedding_dims]
        self.slots = nn.ModuleList(nn.Linear(dim, width, bias=False) for dim in embedding_dims)
        self.register_parameter("dense_vectors", None)
        if num_dense:
            self.dense_vectors = nn.Parameter(torch.randn(num_dense, width) * width**-0.5)
        self.layers = nn.ModuleList(
            Attention(width, heads, attention, recomputes=activation_checkpointing) for _ in range(attention_layers)
        )
        inputs = num_dense + sum(embedding_dims)
        self.deep = mlp(inputs, deep_mlp, dropout, recomputes=activation_checkpointing)
        if deep_mlp:
            self.deep.append(nn.ReLU())
        if deep_mlp and dropout:
            self.deep.append(nn.Dropout(dropout))
        fields = num_dense + len(embedding_dims)
        self.top = nn.Linear(fields * width + (deep_mlp[-1] if deep_mlp else 0), num_labels)

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
            check_inputs("AutoInt", non_id_tensors, embedding_tensors, self.num_dense, self.embedding_dims)
        vectors: list[torch.Tensor] = []
        for index, project in enumerate(self.slots):
            vectors.append(project(embedding_tensors[index]))
        fields = torch.stack(vectors, dim=1)
        dense_vectors = self.dense_vectors
        if dense_vectors is not None:
            dense = torch.cat(non_id_tensors, dim=1).unsqueeze(2) * dense_vectors
            fields = torch.cat([fields, dense], dim=1)
        for layer in self.layers:
            fields = layer(fields)
        parts = [fields.flatten(1)]
        if len(self.deep) > 0:
            parts.append(self.deep(torch.cat(non_id_tensors + embedding_tensors, dim=1)))
        logits: torch.Tensor = self.top(torch.cat(parts, dim=1))
        return logits


def _check(
    num_dense: int,
    embedding_dims: Sequence[int],
    counts: dict[str, int],
    attention: str,
    deep_mlp: Sequence[int],
    dropout: float,
) -> None:
    wrong = [] if num_dense >= 0 else [f"num_dense ({num_dense}) must be at least 0"]
    if not embedding_dims:
        wrong.append("embedding_dims is empty; pass the dimension of each slot")
    wrong += wrong_sizes("embedding_dims", embedding_dims)
    wrong += [f"{name} ({value}) must be at least 1" for name, value in counts.items() if value < 1]
    heads, width = counts["heads"], counts["width"]
    if heads >= 1 and width >= 1 and width % heads:
        wrong.append(f"width ({width}) must be a multiple of heads ({heads})")
    if attention not in ATTENTIONS:
        wrong.append(f"attention ({attention!r}) must be {' or '.join(ATTENTIONS)}")
    wrong += wrong_sizes("deep_mlp", deep_mlp)
    wrong += wrong_dropout(dropout)
    if wrong:
        raise ConfigError("AutoInt: " + "; ".join(wrong))
