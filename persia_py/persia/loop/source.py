"""A data set, and the position of a pass over it."""

import json
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from persia.embedding.data import PersiaBatch
from persia.runtime.errors import DataError, FeatureTypeError, UsageError
from persia.runtime.stateful import Stateful

Cursor = dict[str, Any]
"""The position of a data set: the number of ``batches`` read in this pass, and the ``source`` state of the data set, or
None."""

_SHOWN = 200
"""The maximum number of characters of a state that a message shows."""


class Dataset(Protocol):
    """The data set that a loop reads.

    Attributes:
        buffer_size: The number of batches that are read ahead of training.
    """

    buffer_size: int

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches of one pass."""


@runtime_checkable
class Stream(Protocol):
    """A data set whose batches are received over a connection, and only once."""

    def trained(self, state: dict[str, Any]) -> None:
        """Drop the batches up to ``state``, because they were trained on."""

    def replay_digests(self) -> dict[str, Any] | None:
        """Return the digests of the batches that were trained on, for a checkpoint."""

    def set_replay_digests(self, replay_digests: dict[str, Any] | None) -> None:
        """Set the digests of the batches that a resumed run skips."""

    def waiting(self) -> int:
        """Return the number of received batches that were not yielded yet."""

    def interrupt(self) -> None:
        """End an iteration that runs in another thread."""

    def prepare_next_pass(self, *, completed: bool) -> None:
        """Prepare for the next loop. ``completed`` means that the loop reached its end."""


class Source:
    """A data set, and the position of a loop's pass over it. A data loader keeps it between loops.

    Args:
        dataset: The source of batches.

    Attributes:
        cursor: The position after the last batch that was trained on; at the start of a pass None, if the data set has
            no state.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.cursor: Cursor | None = None
        self._stateful = dataset if isinstance(dataset, Stateful) else None
        self._stream = dataset if isinstance(dataset, Stream) else None
        self._start: Cursor | None = None  # the start of the pass, even if a loop starts in the middle of the pass
        self._end: Cursor | None = None
        self._skip = 0

    def resume(self, cursor: Cursor | None, replay_digests: dict[str, Any] | None) -> None:
        """Move the data set to the start of the loop.

        Args:
            cursor: The position from a checkpoint; None continues at the current position.
            replay_digests: The digests of the batches before it, from the same checkpoint.
        """
        if self._start is None and self._stateful is not None:
            self._start = position(0, self._stateful.state_dict())
        if cursor is not None and cursor["source"] is not None and self._stateful is not None:
            self._stateful.load_state_dict(cursor["source"])
            if self._stream is not None:
                self._stream.set_replay_digests(replay_digests)
        elif cursor is None:
            cursor = None if self._stateful is None else position(0, self._stateful.state_dict())
        self.cursor = cursor
        self._skip = int(cursor["batches"]) if cursor is not None and cursor["source"] is None else 0

    def batches(self) -> Iterator[tuple[PersiaBatch, str]]:
        """Yield each batch with the position after it, as text. Batches before the start are read and dropped."""
        for count, batch in enumerate(self.dataset, 1):
            if count <= self._skip:
                continue
            _check_training(batch, count)
            yield batch, json.dumps(position(count, None if self._stateful is None else self._stateful.state_dict()))
        self._end = None if self._stateful is None else position(0, self._stateful.state_dict())

    def trained(self, after: str) -> None:
        """Record that the batch at this position was trained on."""
        self.cursor = json.loads(after)
        if self._stream is not None and self.cursor is not None:
            self._stream.trained(self.cursor["source"])

    def replay_digests(self) -> dict[str, Any] | None:
        """Return the digests of the batches before the cursor.

        Return None if the data set is not a stream, or the digests are unknown.
        """
        return None if self._stream is None else self._stream.replay_digests()

    def waiting(self) -> int:
        """Return the number of received batches that were not read yet."""
        return 0 if self._stream is None else self._stream.waiting()

    def pass_ended(self) -> None:
        """Record that all batches of the pass were trained on, so that the next loop begins a new pass."""
        self.cursor = self._start = self._end

    def pass_cut_short(self) -> None:
        """Record that the pass ends because another rank's data has ended. A stream continues with its next batch."""
        if self._stream is None:
            self.cursor = self._start

    def interrupt(self) -> None:
        """End the iteration in another thread, if the data set is a stream."""
        if self._stream is not None:
            self._stream.interrupt()

    def prepare_next_pass(self, *, completed: bool, read_to_end: bool) -> None:
        """Prepare for the next loop, which continues after the last batch that was trained on.

        Args:
            completed: Whether the loop reached the end of the pass.
            read_to_end: Whether the thread that read the data set has ended.
        """
        if self._stream is not None:
            self._stream.prepare_next_pass(completed=completed)
            return
        source = None if self.cursor is None else self.cursor["source"]
        if read_to_end and not completed and self._stateful is not None and source is not None:
            self._stateful.load_state_dict(source)


def position(batches: int, source: Any) -> Cursor:
    """Return a cursor that survives being written to a checkpoint and read back.

    Raises:
        UsageError: The data set's state is not plain JSON.
    """
    try:
        same = json.loads(json.dumps(source)) == source
    except (TypeError, ValueError):
        same = False
    if not same:
        shown = repr(source)
        raise UsageError(
            f"the data set's state_dict() cannot be stored in a checkpoint: {shown[:_SHOWN]}"
            f"{'…' if len(shown) > _SHOWN else ''}; return numbers, strings, lists and dicts with strings for keys"
        )
    return {"batches": batches, "source": source}


def _check_training(batch: object, number: int) -> None:
    if not isinstance(batch, PersiaBatch):
        raise FeatureTypeError(f"the data set's batch {number}: expected a PersiaBatch, found {type(batch).__name__}")
    if not batch.data.requires_grad:
        raise DataError(
            f"the data set's batch {number} has requires_grad=False and cannot be trained on; "
            "iterate the data set inside eval_ctx, or leave out requires_grad"
        )
