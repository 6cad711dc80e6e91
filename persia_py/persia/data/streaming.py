"""The data set whose batches data-compose sends."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from persia.data.source import IterableDataset
from persia.embedding.data import PersiaBatch
from persia.features import Transform
from persia.feed.embedded import ScriptFeed
from persia.feed.inbox import Inbox
from persia.feed.replay import RoundRecords, batches_to_skip, records_after
from persia.runtime import contexts
from persia.runtime.errors import DataError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

_logger = get_logger("data")

_AHEAD = 64
"""The maximum number of batches beyond the buffer that may be looked up ahead of training: the largest staleness."""


@dataclass
class _Taken:
    """A batch taken from the inbox, and the position of the data set after it."""

    state: list[int]
    batch: PersiaBatch
    replay_digests: dict[str, Any]


class StreamingDataset(IterableDataset):
    """The batches that data-compose sends to this rank with :meth:`persia.ctx.DataCtx.send_data`.

    The batches of several replicas alternate, in the same order in every run. If ``PERSIA_NATS_URL`` is not set, the
    data script (``PERSIA_DATALOADER_ENTRY``, else ``data_loader.py`` or ``data_compose.py`` next to the main script)
    runs in a thread of this process.

    A training context has one stream. If a loop ends early, the next loop continues after its last trained batch. After
    the last batch, every loop is empty.

    Args:
        buffer_size: The maximum number of waiting batches for each replica; if that many batches are waiting,
            ``send_data`` blocks.
        transform: The transform that makes batches from rows. The built-in data-compose of a ``persia.yml`` receives it
            from this data set. It must be the same on all ranks.
    """

    def __init__(self, buffer_size: int = 10, transform: Transform | None = None) -> None:
        super().__init__(buffer_size)
        self._transform = "" if transform is None else transform.to_json()
        self._stop = threading.Event()
        self._forget(None)

    def _forget(self, inbox: Inbox | None) -> None:
        """Reset the state of a stream that is not open yet."""
        self._inbox = inbox
        self._taken: list[int] = []  # the number of batches of each replica that were taken from the inbox
        self._trained: list[int] = []  # the number of batches that were trained on
        self._state: list[int] = []  # the number of batches that were yielded
        self._rounds = RoundRecords()  # the records of the batches that were taken
        # The digests of the batches that were trained on, in the form of a checkpoint.
        self._replay_digests: dict[str, Any] | None = None
        self._drop = 0
        # Batches that were yielded, but not trained on.
        self._held: deque[_Taken] = deque(maxlen=2 * self.buffer_size + _AHEAD)
        self._again: deque[_Taken] = deque()  # batches that will be yielded again

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield batches until every replica has ended."""
        stop = self._stop
        inbox = self._open()
        while (entry := self._next(inbox, stop)) is not None:
            self._held.append(entry)
            self._state = entry.state
            yield entry.batch

    def _next(self, inbox: Inbox, stop: threading.Event) -> _Taken | None:
        if self._again:
            return self._again.popleft()
        while (taken := inbox.take(stop)) is not None:
            replica, batch, record = taken
            self._taken = self._taken + [0] * (inbox.replicas - len(self._taken))
            self._taken[replica] += 1
            self._rounds.take(replica, record, self._taken)
            if not self._drop:
                return _Taken(list(self._taken), PersiaBatch.wrap(batch), self._rounds.state())
            self._drop -= 1
        return None

    def _open(self) -> Inbox:
        """Return this context's inbox. At the first iteration, admit the senders."""
        backend = self._context()
        if backend is None:
            raise UsageError(
                "a StreamingDataset must be iterated inside TrainCtx or eval_ctx; no such context is entered here"
            )
        if backend.feed is None:
            backend.feed = ScriptFeed()
            backend.feed.start()
        inbox: Inbox = backend.feed.inbox
        if self._inbox is not inbox:
            if inbox.is_open:
                raise UsageError("this context already has a StreamingDataset; use that one")
            self._begin(inbox)
        return inbox

    def _begin(self, inbox: Inbox) -> None:
        """Start the stream after the batches that the resumed run has trained on.

        The sender of each replica skips the batches that every rank has certainly trained on. Other trained batches are
        received and dropped, because a replica that ended early may have sent this rank one batch fewer.
        """
        self._inbox = inbox
        replicas, rounds = len(self._trained), batches_to_skip(self._trained)
        records = records_after(rounds, replicas, self._replay_digests)
        self._drop = sum(self._trained) - rounds * replicas
        self._taken = [rounds] * replicas
        self._rounds = RoundRecords(rounds, records)
        inbox.open(self.buffer_size, skip=rounds, replicas=replicas or None, records=records, transform=self._transform)

    def _context(self) -> Any:
        """Return the backend of the current context. Drop a stream that belongs to another context."""
        context = contexts.current()
        backend = None if context is None else context.common_context
        feed = None if backend is None else backend.feed
        if self._inbox is not None and (feed is None or feed.inbox is not self._inbox):
            self._forget(None)
        return backend

    def interrupt(self) -> None:
        """End an iteration that runs in another thread; :meth:`prepare_next_pass` must follow."""
        self._stop.set()
        if self._inbox is not None:
            self._inbox.wake()

    def waiting(self) -> int:
        """Return the number of received batches that were not yielded yet, including those to be yielded again."""
        return len(self._again) + (self._inbox.queued() if self._inbox is not None else 0)

    def trained(self, state: dict[str, Any]) -> None:
        """Drop the batches up to ``state``, a result of :meth:`state_dict`, because they were trained on."""
        self._trained = state["taken"]
        while self._held and sum(self._held[0].state) <= sum(self._trained):
            self._replay_digests = self._held.popleft().replay_digests

    def used(self) -> None:
        """Drop the oldest yielded batch, because it was evaluated."""
        entry = self._held.popleft()
        self._trained, self._replay_digests = entry.state, entry.replay_digests

    def replay_digests(self) -> dict[str, Any] | None:
        """Return the digests of the batches that were trained on, for :meth:`set_replay_digests` of a resumed run."""
        return self._replay_digests

    def set_replay_digests(self, replay_digests: dict[str, Any] | None) -> None:
        """Set the digests of the batches that are skipped after :meth:`load_state_dict`; None if they are unknown."""
        if self._inbox is None:
            self._replay_digests = replay_digests

    def prepare_next_pass(self, *, completed: bool) -> None:
        """Prepare for the next loop after this one has ended.

        Args:
            completed: Whether the loop ran to its end. If it ended early, batches that were neither trained on nor
                evaluated are yielded again.
        """
        self._stop = threading.Event()  # a thread of the previous loop may still use the old event
        if completed:
            self._held.clear()
            return
        if self._held and (gone := sum(self._held[0].state) - 1 - sum(self._trained)):
            _logger.warning("batches that were iterated without training, and are not repeated: %d", gone)
        self._again.extendleft(reversed(self._held))
        self._held.clear()
        self._state = self._trained

    def state_dict(self) -> dict[str, Any]:
        """Return the number of yielded batches of each replica, and the number of ranks."""
        self._context()
        return {"taken": list(self._state), "world_size": settings.world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start after the batches that an earlier run has trained on.

        Raises:
            DataError: The earlier run had another number of ranks.
            UsageError: The stream of this context has begun, and cannot be reset.
        """
        self._context()
        if state_dict["world_size"] != settings.world_size:
            raise DataError(
                f"cannot continue with WORLD_SIZE={settings.world_size}: the data of the checkpoint was split over "
                f"WORLD_SIZE={state_dict['world_size']} ranks; start the same number of ranks"
            )
        taken = [int(count) for count in state_dict["taken"]]
        if self._inbox is None:
            self._state = self._trained = taken
        elif sum(taken) != sum(self._state):
            raise UsageError(
                "cannot load a checkpoint after a loop over a StreamingDataset: the stream cannot go back; load the "
                "checkpoint before the loop"
            )
