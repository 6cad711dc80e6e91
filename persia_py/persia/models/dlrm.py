"""DLRM, the deep learning recommendation model of Naumov et al. 2019 (arXiv 1906.00091)."""

from collections.abc import Sequence

import torch
from torch import nn

from persia.models.blocks import Layers, check_inputs, mlp, wrong_dropout, wrong_sizes
from persia.runtime.errors import ConfigError


class DLRM(nn.Module):
    """Predict a binary label, such as a click, from dense inputs and one embedding for each slot.

    A bottom MLP maps the dense inputs to a vector of the size of an embedding. The dot products of all pairs of vectors
    are the input of a top MLP. With dense inputs ``x``, slots ``e_1`` to ``e_S`` and ``e_0 = bottom(x)``::

        logit = top([e_0, <e_i, e_j> for all i > j])

    Without dense inputs (``num_dense=0``) ``e_0`` is a learned vector, so ``<e_i, e_0>`` is a linear term of slot
    ``i``.

    The model returns logits. Train it with ``nn.BCEWithLogitsLoss``; ``torch.sigmoid`` of the output is the
    probability. PersiaML's scripts have a sigmoid in the model and use ``nn.BCELoss``. Their loss is the same function,
    but a sigmoid that rounds to 0 or 1 has no gradient.

    Args:
        num_dense: The total number of columns of the dense inputs; 0 if there are none.
        num_slots: The number of slots.
        embedding_dim: The dimension of every slot.
        bottom_mlp: The layer sizes of the bottom MLP; the last is the dimension of the slots. A ReLU follows every
            layer. Without dense inputs it has no effect and may be empty. The default in ``persia.yml`` is 64 and the
            dimension.
        top_mlp: The layer sizes of the top MLP; the last is the number of labels, the logits. A ReLU follows every
            layer except the last. The default in ``persia.yml`` is 256, 64 and the number of labels.
        dropout: The dropout probability of each hidden layer of the top MLP.
        num_labels: The number of labels; each has a separate logit on the same layers.
        activation_checkpointing: Whether to recompute intermediate results in the backward pass instead of keeping
            them. This saves memory and slows down the step; results are the same.

    Raises:
        ConfigError: Arguments are incompatible; the message lists all errors.
    """

    pairs: torch.Tensor
    constant: nn.Parameter | None

    def __init__(
        self,
        num_dense: int,
        num_slots: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        dropout: float = 0.0,
        num_labels: int = 1,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        _check(num_dense, num_slots, embedding_dim, bottom_mlp, top_mlp, dropout, num_labels)
        self.num_dense = num_dense
        self.num_slots = num_slots
        self.embedding_dim = embedding_dim
        vectors = num_slots + 1
        rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        self.bottom = Layers()
        self.register_parameter("constant", None)
        if num_dense:
            self.bottom = mlp(num_dense, bottom_mlp, recomputes=activation_checkpointing)
            self.bottom.append(nn.ReLU())
        else:
            self.constant = nn.Parameter(torch.randn(embedding_dim) * embedding_dim**-0.5)
        width = embedding_dim + num_slots * vectors // 2
        self.top = mlp(width, top_mlp, dropout, recomputes=activation_checkpointing)

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits, ``[batch, num_labels]``.

        Args:
            non_id_tensors: The dense inputs, each ``[batch, columns]``, with ``num_dense`` columns in total. Their
                dtype must equal that of the model's parameters.
            embedding_tensors: One ``[batch, embedding_dim]`` for each slot, in the order of training.

        Raises:
            DataError: A tensor does not have the shape that the model expects, or a dense input is not a float tensor.
        """
        # TorchScript supports neither these messages nor the class of the error.
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_inputs(
                "DLRM", non_id_tensors, embedding_tensors, self.num_dense, [self.embedding_dim] * self.num_slots
            )
        constant = self.constant
        if constant is not None:
            dense = constant.expand(embedding_tensors[0].shape[0], -1)
        else:
            dense = self.bottom(torch.cat(non_id_tensors, dim=1))
        vectors = torch.cat([dense.unsqueeze(1), torch.stack(embedding_tensors, dim=1)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits: torch.Tensor = self.top(torch.cat([dense, products.index_select(1, self.pairs)], dim=1))
        return logits


def _check(
    num_dense: int,
    num_slots: int,
    embedding_dim: int,
    bottom_mlp: Sequence[int],
    top_mlp: Sequence[int],
    dropout: float,
    num_labels: int,
) -> None:
    counts = {"num_slots": num_slots, "embedding_dim": embedding_dim, "num_labels": num_labels}
    wrong = [f"num_dense ({num_dense}) must be at least 0"] * (num_dense < 0)
    wrong += [f"{name} ({value}) must be at least 1" for name, value in counts.items() if value < 1]
    logits = "1, the logit" if num_labels == 1 else f"num_labels ({num_labels})"
    mlps = [("top_mlp", top_mlp, num_labels, logits)]
    if num_dense or bottom_mlp:
        mlps.insert(0, ("bottom_mlp", bottom_mlp, embedding_dim, f"embedding_dim ({embedding_dim})"))
    for name, sizes, end, title in mlps:
        if not sizes:
            wrong.append(f"{name} is empty; its last layer must equal {title}")
        elif sizes[-1] != end:
            wrong.append(f"{name}[-1] ({sizes[-1]}) must equal {title}")
        wrong += wrong_sizes(name, sizes)
    wrong += wrong_dropout(dropout)
    if wrong:
        raise ConfigError("DLRM: " + "; ".join(wrong))
