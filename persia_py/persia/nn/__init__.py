"""Embedding tables as a module of an existing PyTorch model."""

from persia.nn.collection import EmbeddingCollection
from persia.nn.defaults import default_embedding_config, default_optimizer
from persia.nn.tables import TableConfig

__all__ = ["EmbeddingCollection", "TableConfig", "default_embedding_config", "default_optimizer"]
