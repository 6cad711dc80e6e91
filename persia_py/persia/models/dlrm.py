"""DLRM, the deep learning recommendation model of Naumov et al. 2019 (arXiv 1906.00091)."""

from collections.abc import Sequence

import torch
from torch import nn

from persia.runtime.errors import ConfigError, DataError


class DLRM(nn.Module):
    """Predict a binary label, such as a click, from dense inputs and one embedding for each slot.

    A bottom MLP maps the dense inputs to a vector of an embedding's size. The dot products of all pairs of vectors go
    to a top MLP. With dense inputs ``x``, slots ``e_1`` to ``e_S`` and ``e_0 = bottom(x)``::

        logit = top([e_0, <e_i, e_j> for all i > j])

    Without dense inputs (``num_dense=0``) ``e_0`` is a learned vector, so that ``<e_i, e_0>`` is a linear term of slot
    ``i``.

    The model returns logits. Train it with ``nn.BCEWithLogitsLoss``; ``torch.sigmoid`` of the output is the
    probability. PersiaML's scripts have a sigmoid in the model and use ``nn.BCELoss``. That is the same function, but a
    sigmoid that rounds to 0 or 1 has no gradient.

    Args:
        num_dense: The number of columns of all dense inputs together; 0 if there are none.
        num_slots: The number of slots.
        embedding_dim: The dimension of every slot.
        bottom_mlp: The layer sizes of the bottom MLP; the last is ``embedding_dim``. A ReLU follows every layer. It has
            no effect if ``num_dense`` is 0, and may be empty then.
        top_mlp: The layer sizes of the top MLP; the last is 1, the logit. A ReLU follows every layer but the last.
        dropout: The share of each hidden layer of the top MLP that is zeroed in training.

    Raises:
        ConfigError: Arguments do not fit together; all mistakes are listed.
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
    ) -> None:
        super().__init__()
        _check(num_dense, num_slots, embedding_dim, bottom_mlp, top_mlp, dropout)
        self.num_dense = num_dense
        self.num_slots = num_slots
        self.embedding_dim = embedding_dim
        vectors = num_slots + 1
        rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        self.bottom = nn.Sequential()
        self.register_parameter("constant", None)
        if num_dense:
            self.bottom = _mlp(num_dense, bottom_mlp, dropout=0.0)
            self.bottom.append(nn.ReLU())
        else:
            self.constant = nn.Parameter(torch.randn(embedding_dim) * embedding_dim**-0.5)
        self.top = _mlp(embedding_dim + num_slots * vectors // 2, top_mlp, dropout)

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits, ``[batch, 1]``.

        Args:
            non_id_tensors: The dense inputs, each ``[batch, columns]``, with ``num_dense`` columns together. Their
                dtype is that of the model's parameters.
            embedding_tensors: One ``[batch, embedding_dim]`` for each slot, in the order of training.

        Raises:
            DataError: A tensor has another shape than the model was built for, or a dense input is not of floats.
        """
        # TorchScript supports neither these messages nor their class.
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            self._check_shapes(non_id_tensors, embedding_tensors)
        constant = self.constant
        if constant is not None:
            dense = constant.expand(embedding_tensors[0].shape[0], -1)
        else:
            dense = self.bottom(torch.cat(non_id_tensors, dim=1))
        vectors = torch.cat([dense.unsqueeze(1), torch.stack(embedding_tensors, dim=1)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits: torch.Tensor = self.top(torch.cat([dense, products.index_select(1, self.pairs)], dim=1))
        return logits

    def _check_shapes(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> None:
        shapes = [list(tensor.shape) for tensor in non_id_tensors]
        if any(len(shape) != 2 for shape in shapes) or sum(shape[1] for shape in shapes) != self.num_dense:
            raise DataError(
                f"DLRM: the batch has dense inputs of shapes {shapes}, want [batch, columns] each, with "
                f"num_dense ({self.num_dense}) columns together"
            )
        for index, tensor in enumerate(non_id_tensors):
            if not tensor.is_floating_point():
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise DataError(
                    f"DLRM: dense input {index} has dtype {dtype}, want floats: convert it with .astype(np.float32) "
                    "where the batch is made, or with tensor.float()"
                )
        if len(embedding_tensors) != self.num_slots:
            raise DataError(f"DLRM: the batch has {len(embedding_tensors)} slots, want num_slots ({self.num_slots})")
        for index, tensor in enumerate(embedding_tensors):
            if tensor.dim() != 2 or tensor.shape[1] != self.embedding_dim:
                raise DataError(
                    f"DLRM: slot {index} has shape {list(tensor.shape)}, want [batch, {self.embedding_dim}]; "
                    "give the slot this dim and embedding_summation: true in embedding_config.yml"
                )


def _mlp(width: int, sizes: Sequence[int], dropout: float) -> nn.Sequential:
    """Return linear layers with a ReLU, and dropout if any, between them."""
    layers: list[nn.Module] = []
    for index, size in enumerate(sizes):
        if index:
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(width, size))
        width = size
    return nn.Sequential(*layers)


def _check(
    num_dense: int,
    num_slots: int,
    embedding_dim: int,
    bottom_mlp: Sequence[int],
    top_mlp: Sequence[int],
    dropout: float,
) -> None:
    counts = {"num_slots": num_slots, "embedding_dim": embedding_dim}
    wrong = [f"num_dense ({num_dense}) must be at least 0"] * (num_dense < 0)
    wrong += [f"{name} ({value}) must be at least 1" for name, value in counts.items() if value < 1]
    mlps = [("top_mlp", top_mlp, 1, "1, the logit")]
    if num_dense or bottom_mlp:
        mlps.insert(0, ("bottom_mlp", bottom_mlp, embedding_dim, f"embedding_dim ({embedding_dim})"))
    for name, sizes, end, title in mlps:
        if not sizes:
            wrong.append(f"{name} is empty; its last layer must equal {title}")
        elif sizes[-1] != end:
            wrong.append(f"{name}[-1] ({sizes[-1]}) must equal {title}")
        wrong += [f"{name}[{i}] ({size}) must be at least 1" for i, size in enumerate(sizes) if size < 1]
    if not 0 <= dropout < 1:
        wrong.append(f"dropout ({dropout}) must be at least 0 and below 1")
    if wrong:
        raise ConfigError("DLRM: " + "; ".join(wrong))
