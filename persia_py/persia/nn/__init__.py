"""Embedding tables as a module of an existing PyTorch model."""

from persia.nn.collection import EmbeddingCollection
from persia.nn.tables import TableConfig

__all__ = ["EmbeddingCollection", "TableConfig"]
