"""Embedding tables of a training script: initial weights, batches, optimizers.

* :mod:`persia.embedding.config`: initial weights of rows, admission of ids, and the bound of weights
* :mod:`persia.embedding.data`: features and batches
* :mod:`persia.embedding.optim`: optimizers; :mod:`persia.embedding.schedule`: learning-rate schedules

The initial weights of a row are a function of the run's seed, the name of the table, the id and the position in the
row. The weights do not depend on the number of servers. ``embedding_config.yml`` can set options of a single table:
``init``, ``optimizer``, ``admission``, ``dtype``, ``rounding`` and ``ttl``. ``init`` is written as ``{name: gamma,
shape: 2}``, with the names and parameters of the classes of this package in snake case.
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
    """Import a submodule, or return a name that has moved to :mod:`persia.nn`."""
    if name in {"data", "optim", "schedule"}:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in {"EmbeddingCollection", "TableConfig"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("persia.nn"), name)
