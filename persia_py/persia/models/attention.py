"""Multi-head self-attention between the fields of a sample."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

ATTENTIONS = ("sdpa", "math")
"""The ways in which attention is computed."""


class Attention(nn.Module):
    """A layer of self-attention with a residual connection (arXiv 1810.11921, formulas 5 to 8).

    For fields ``f``, with ``Q``, ``K`` and ``V`` divided among the heads, and head size ``d``::

        output = relu(softmax(Q f (K f)' / sqrt(d)) V f + R f)

    Args:
        width: The size of the vector of each field, in the input and the output.
        heads: The number of heads, which must divide ``width``.
        attention: One of :data:`ATTENTIONS`.
        recomputes: Whether to keep only the input for the backward pass, and recompute the rest there.
    """

    def __init__(self, width: int, heads: int, attention: str, *, recomputes: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.is_fused = attention == "sdpa"
        self.recomputes = recomputes
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.residual = nn.Linear(width, width, bias=False)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """Return the output, ``[batch, fields, width]``, for vectors of the same shape."""
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            again = self.recomputes and self.training and torch.is_grad_enabled()
            if again:
                output: torch.Tensor = checkpoint(self._attend, fields, use_reentrant=False)
                return output
        return self._attend(fields)

    def _attend(self, fields: torch.Tensor) -> torch.Tensor:
        query, key = self._split(self.query(fields)), self._split(self.key(fields))
        value = self._split(self.value(fields))
        if self.is_fused:
            attended = scaled_dot_product_attention(query, key, value)
        else:
            scale = float(query.shape[-1]) ** -0.5
            weights = torch.softmax(torch.matmul(query, key.transpose(-2, -1)) * scale, dim=-1)
            attended = torch.matmul(weights, value)
        return torch.relu(attended.transpose(1, 2).flatten(2) + self.residual(fields))

    def _split(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors as ``[batch, heads, fields, head size]``."""
        batch, fields, width = vectors.shape
        return vectors.reshape(batch, fields, self.heads, width // self.heads).transpose(1, 2)
