"""How embedding rows start, come and are bounded.

* :mod:`persia.embedding.config`: how rows start, and what ``embedding_config.yml`` says
* :mod:`persia.embedding.data`: features and batches
* :mod:`persia.embedding.optim`, :mod:`persia.embedding.schedule`: optimizers, and learning rates that vary

A new row's weights are a function of the run's seed, its table's name, its id and the place in the row. They are equal
on any number of servers. ``embedding_config.yml`` may give a table settings of its own: ``init`` (``{name: gamma,
shape: 2}``, with the names and parameters of the classes here in snake case), ``optimizer``, ``admission``,
``dtype``, ``rounding`` and ``ttl``.
"""

import importlib
from typing import Any

from persia.embedding.config import (
    MAX_MIN_COUNT,
    MAX_POISSON_MEAN,
    EmbeddingConfig,
    Gamma,
    Initialization,
    InverseSqrtDim,
    Normal,
    Poisson,
    Uniform,
    Zero,
    get_default_embedding_config,
)

__all__ = [
    "MAX_MIN_COUNT",
    "MAX_POISSON_MEAN",
    "EmbeddingConfig",
    "Gamma",
    "Initialization",
    "InverseSqrtDim",
    "Normal",
    "Poisson",
    "Uniform",
    "Zero",
    "get_default_embedding_config",
]


def __getattr__(name: str) -> Any:
    """Return what has moved to :mod:`persia.nn`, under its old path."""
    if name not in {"EmbeddingCollection", "TableConfig"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("persia.nn"), name)
