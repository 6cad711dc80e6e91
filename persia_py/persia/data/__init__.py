"""Data loaders, and the data sets that feed them.

* :mod:`persia.data.source`: the interface of a data set
* :mod:`persia.data.streaming`: the data set that data-compose fills
* :mod:`persia.data.loader`: the data loader
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia.data.loader import DataLoader
    from persia.data.source import Cursor, IterableDataset, Stateful
    from persia.data.streaming import StreamingDataset

__all__ = ["Cursor", "DataLoader", "IterableDataset", "Stateful", "StreamingDataset"]

_MODULES = {
    "Cursor": "source",
    "DataLoader": "loader",
    "IterableDataset": "source",
    "Stateful": "source",
    "StreamingDataset": "streaming",
}


def __getattr__(name: str) -> Any:
    """Import modules that need PyTorch on first use: `persia data inspect` and `persia config check` do not load it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
