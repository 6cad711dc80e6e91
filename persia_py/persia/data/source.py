"""What a data set is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from persia.embedding.data import PersiaBatch
from persia.runtime.errors import UsageError

Cursor = dict[str, Any]
"""Where a data set stands: ``batches`` read in this pass, and the data set's own ``source`` state or None."""


class IterableDataset(ABC):
    """A data set defined by iteration.

    A subclass defines ``__iter__``, which yields :class:`PersiaBatch`. If it also has ``state_dict()`` and
    ``load_state_dict(state)`` (torch's convention for stateful loaders; the state is JSON: numbers, strings, lists,
    dicts), a resumed run continues behind the last trained batch; otherwise that many batches are read and skipped,
    which needs the same order in every run.

    With several ranks each rank iterates its own data set.

    Args:
        buffer_size: Batches read ahead of training.
    """

    def __init__(self, buffer_size: int = 10) -> None:
        if buffer_size < 1:
            raise UsageError(f"buffer_size={buffer_size}: want at least 1")
        self.buffer_size = buffer_size

    @abstractmethod
    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches of one pass."""


@runtime_checkable
class Stateful(Protocol):
    """A data set that can be continued."""

    def state_dict(self) -> dict[str, Any]:
        """Return where iteration stands."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there at the next iteration."""
