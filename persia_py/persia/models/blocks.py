"""Building blocks of models: layers, and checks of their arguments and inputs."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from persia.runtime.errors import DataError


class Layers(nn.Sequential):
    """Layers in sequence, whose intermediate results may be recomputed in the backward pass.

    Args:
        layers: The layers.
        recomputes: Whether to keep only the input for the backward pass, and recompute the layers there.
    """

    def __init__(self, layers: Sequence[nn.Module] = (), recomputes: bool = False) -> None:
        super().__init__(*layers)
        self.recomputes = recomputes

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of nn.Sequential
        """Return the output of the last layer."""
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            again = self.recomputes and self.training and torch.is_grad_enabled()
            if again:
                output: torch.Tensor = checkpoint(super().forward, input, use_reentrant=False)
                return output
        for layer in self:
            input = layer(input)  # noqa: A001
        return input


def mlp(width: int, sizes: Sequence[int], dropout: float = 0.0, *, recomputes: bool = False) -> Layers:
    """Return linear layers of the given sizes, each except the last followed by a ReLU and, if requested, dropout.

    Args:
        width: The number of inputs.
        sizes: The number of outputs of each layer.
        dropout: The dropout probability of each layer except the last.
        recomputes: As in :class:`Layers`.
    """
    layers: list[nn.Module] = []
    for index, size in enumerate(sizes):
        if index:
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(width, size))
        width = size
    return Layers(layers, recomputes)


class CrossNetwork(nn.Module):
    """The cross network of DCN-v2 (arXiv 2008.13535, formulas 1 and 2).

    With inputs ``x_0`` of ``width`` columns::

        x_{l+1} = x_0 * (W_l x_l + b_l) + x_l        for each layer l, where * is element-wise

    With a ``rank`` each ``W_l`` is the product ``U_l V_l`` of two matrices, ``[width, rank]`` and ``[rank, width]``.

    Args:
        width: The number of columns.
        layers: The number of layers; the output contains products of up to ``layers + 1`` inputs.
        rank: The rank of the weights; None means full.
        recomputes: Whether to keep only the input of each layer for the backward pass, and recompute the rest there.
    """

    def __init__(self, width: int, layers: int, rank: int | None = None, *, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.layers = nn.ModuleList(
            nn.Linear(width, width)
            if rank is None
            else nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
            for _ in range(layers)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output, ``[batch, width]``, for inputs of the same shape."""
        crossed = inputs
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            again = self.recomputes and self.training and torch.is_grad_enabled()
            if again:
                for layer in self.layers:
                    crossed = checkpoint(_cross, layer, inputs, crossed, use_reentrant=False)
                return crossed
        for layer in self.layers:
            crossed = inputs * layer(crossed) + crossed
        return crossed


def _cross(layer: nn.Module, inputs: torch.Tensor, crossed: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = inputs * layer(crossed) + crossed
    return result


def check_inputs(
    model: str,
    non_id_tensors: list[torch.Tensor],
    embedding_tensors: list[torch.Tensor],
    num_dense: int,
    dims: list[int],
) -> None:
    """Check that tensors have the shapes for which a model was built.

    Args:
        model: The name of the model, for the message.
        non_id_tensors: The dense inputs of a batch.
        embedding_tensors: The pooled embeddings of a batch.
        num_dense: The total number of columns of the dense inputs.
        dims: The dimension of each slot.

    Raises:
        DataError: A tensor has another shape, the number of tensors differs, or a dense input is not a float tensor.
    """
    shapes = [list(tensor.shape) for tensor in non_id_tensors]
    if any(len(shape) != 2 for shape in shapes) or sum(shape[1] for shape in shapes) != num_dense:
        raise DataError(
            f"{model}: the batch has dense inputs of shapes {shapes}, expected [batch, columns] each, with "
            f"num_dense ({num_dense}) columns in total"
        )
    for index, tensor in enumerate(non_id_tensors):
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise DataError(
                f"{model}: dense input {index} has dtype {dtype}, expected floats: convert it with .astype(np.float32) "
                "where the batch is made, or with tensor.float()"
            )
    if len(embedding_tensors) != len(dims):
        raise DataError(f"{model}: slots in the batch: {len(embedding_tensors)}, expected {len(dims)}")
    for index, (tensor, dim) in enumerate(zip(embedding_tensors, dims, strict=True)):
        if tensor.dim() != 2 or tensor.shape[1] != dim:
            raise DataError(
                f"{model}: slot {index} has shape {list(tensor.shape)}, expected [batch, {dim}]; "
                f"set dim {dim} for the slot, and pool its vectors: set embedding_summation: true in "
                "embedding_config.yml, or remove the key `last` from the feature in persia.yml"
            )


def wrong_sizes(name: str, sizes: Sequence[int]) -> list[str]:
    """Return the errors in the layer sizes, the argument ``name``."""
    return [f"{name}[{index}] ({size}) must be at least 1" for index, size in enumerate(sizes) if size < 1]


def wrong_dropout(dropout: float) -> list[str]:
    """Return the errors in a dropout probability."""
    return [] if 0 <= dropout < 1 else [f"dropout ({dropout}) must be at least 0 and below 1"]
