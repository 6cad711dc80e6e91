"""Data loaders, and the data sets that feed them.

* :mod:`persia.data.source`: the interface of a data set
* :mod:`persia.data.streaming`: the data set that data-compose fills
* :mod:`persia.data.loader`: the data loader
"""

from persia.data.loader import DataLoader
from persia.data.source import Cursor, IterableDataset, Stateful
from persia.data.streaming import StreamingDataset

__all__ = ["Cursor", "DataLoader", "IterableDataset", "Stateful", "StreamingDataset"]
