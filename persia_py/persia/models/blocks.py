"""The parts of models: layers, and the checks of their arguments and inputs."""

from collections.abc import Sequence

import torch
from torch import nn

from persia.runtime.errors import DataError


def mlp(width: int, sizes: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers of the given sizes, with a ReLU, and dropout if any, between two of them.

    Args:
        width: The number of inputs.
        sizes: The number of outputs of each layer.
        dropout: The dropout probability of each layer but the last.
    """
    layers: list[nn.Module] = []
    for index, size in enumerate(sizes):
        if index:
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(width, size))
        width = size
    return nn.Sequential(*layers)


class CrossNetwork(nn.Module):
    """The cross network of DCN-v2 (arXiv 2008.13535, formulas 1 and 2).

    With inputs ``x_0`` of ``width`` columns::

        x_{l+1} = x_0 * (W_l x_l + b_l) + x_l        for each layer l, where * is element by element

    With a ``rank`` each ``W_l`` is the product ``U_l V_l`` of two matrices, ``[width, rank]`` and ``[rank, width]``.

    Args:
        width: The number of columns.
        layers: The number of layers; the output has all products of up to ``layers + 1`` inputs.
        rank: The rank of the weights; None means full.
    """

    def __init__(self, width: int, layers: int, rank: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width)
            if rank is None
            else nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
            for _ in range(layers)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output, ``[batch, width]``, for the inputs, ``[batch, width]``."""
        crossed = inputs
        for layer in self.layers:
            crossed = inputs * layer(crossed) + crossed
        return crossed


def check_inputs(
    model: str,
    non_id_tensors: list[torch.Tensor],
    embedding_tensors: list[torch.Tensor],
    num_dense: int,
    dims: list[int],
) -> None:
    """Refuse tensors that a model was not built for.

    Args:
        model: Its name, for the message.
        non_id_tensors: The dense inputs of a batch.
        embedding_tensors: The pooled embeddings of a batch.
        num_dense: The columns that the dense inputs have together.
        dims: The dimension of each slot.

    Raises:
        DataError: A tensor has another shape, there are more or fewer of them, or a dense input is not of floats.
    """
    shapes = [list(tensor.shape) for tensor in non_id_tensors]
    if any(len(shape) != 2 for shape in shapes) or sum(shape[1] for shape in shapes) != num_dense:
        raise DataError(
            f"{model}: the batch has dense inputs of shapes {shapes}, want [batch, columns] each, with "
            f"num_dense ({num_dense}) columns together"
        )
    for index, tensor in enumerate(non_id_tensors):
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise DataError(
                f"{model}: dense input {index} has dtype {dtype}, want floats: convert it with .astype(np.float32) "
                "where the batch is made, or with tensor.float()"
            )
    if len(embedding_tensors) != len(dims):
        raise DataError(f"{model}: the batch has {len(embedding_tensors)} slots, want {len(dims)}")
    for index, (tensor, dim) in enumerate(zip(embedding_tensors, dims, strict=True)):
        if tensor.dim() != 2 or tensor.shape[1] != dim:
            raise DataError(
                f"{model}: slot {index} has shape {list(tensor.shape)}, want [batch, {dim}]; "
                "give the slot this dim and embedding_summation: true in embedding_config.yml"
            )


def wrong_sizes(name: str, sizes: Sequence[int]) -> list[str]:
    """Return the mistakes in the layer sizes called ``name``."""
    return [f"{name}[{index}] ({size}) must be at least 1" for index, size in enumerate(sizes) if size < 1]


def wrong_dropout(dropout: float) -> list[str]:
    """Return the mistakes in a dropout probability."""
    return [] if 0 <= dropout < 1 else [f"dropout ({dropout}) must be at least 0 and below 1"]
