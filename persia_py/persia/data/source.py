"""The interface of a data set."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from persia.embedding.data import PersiaBatch
from persia.loop.source import Cursor
from persia.runtime.errors import UsageError
from persia.runtime.stateful import Stateful

__all__ = ["Cursor", "IterableDataset", "Stateful"]


class IterableDataset(ABC):
    """A data set defined by iteration.

    A subclass defines ``__iter__``, which yields :class:`PersiaBatch`. It may also have ``state_dict()`` and
    ``load_state_dict(state)``, as torch's stateful loaders. The state is JSON: numbers, strings, lists, dicts. A
    resumed run then continues after the last trained batch. Without these methods, a resumed run reads and skips all
    batches that were trained on. This requires the same order in every run.

    With several ranks, each rank iterates over its own data set.

    Args:
        buffer_size: The number of batches that are read ahead of training.
    """

    def __init__(self, buffer_size: int = 10) -> None:
        if buffer_size < 1:
            raise UsageError(f"{type(self).__name__}(buffer_size={buffer_size}): must be at least 1")
        self.buffer_size = buffer_size

    @abstractmethod
    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches of one pass."""
