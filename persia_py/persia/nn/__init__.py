"""Embedding tables as a module of an existing PyTorch model."""

from persia.nn.collection import EmbeddingCollection, TableConfig

__all__ = ["EmbeddingCollection", "TableConfig"]
