"""The batches of all data-compose replicas for one rank, in alternating order.

The order depends only on the indices of the replicas, not on their speed: the first batch of replica 0, the first of
replica 1, ..., the second of replica 0, and so on. A replica that has ended is skipped.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from persia.embedding.listed import listed
from persia.feed.protocol import Stopped, sender_name
from persia.feed.replay import Record
from persia.runtime.errors import ConfigError, DataError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia.runtime.waits import REMIND_S
from persia_core.data import Batch

_logger = get_logger("feed")


class ReplicaInUseError(UsageError):
    """Another process has the same replica index."""


@dataclass
class Position:
    """The position at which a connecting data-compose replica must resume.

    Attributes:
        received: The number of its batches that this rank has received; they are not sent again.
        queued: The number of received batches that were not taken yet.
        buffer: The maximum number of waiting batches.
        record: The record of the received batches.
    """

    received: int
    queued: int
    buffer: int
    record: Record


@dataclass
class SenderCallbacks:
    """Functions that the inbox calls for a connected sender.

    Attributes:
        taken: Called when one of its batches was taken, with the number of the batch.
        stopped: Called when the rank has stopped accepting batches, with the reason.
        replaced: Called when the same process has connected again.
    """

    taken: Callable[[int], None]
    stopped: Callable[[str], None]
    replaced: Callable[[], None]


@dataclass
class _ReplicaQueue:
    """The batches of one data-compose replica."""

    received: int = 0
    record: Record = field(default_factory=Record)  # the record of the received batches
    skipped: int = 0  # the number of received batches when the sender connected
    waiting: deque[tuple[int, Batch, Record]] = field(default_factory=deque)
    sender: str | None = None  # None while the replica is not connected
    callbacks: SenderCallbacks | None = None
    ended: bool = False
    error: BaseException | None = None

    @property
    def drained(self) -> bool:
        return self.ended and not self.waiting


class Inbox:
    """A queue for each data-compose replica; each holds at most ``buffer`` batches.

    Attributes:
        transform: The transform that makes the batches, as JSON; empty if the data script makes its own batches.
            :meth:`open` sets it.
    """

    def __init__(self) -> None:
        self.transform = ""
        self._changed = threading.Condition()
        self._queues: dict[int, _ReplicaQueue] = {}
        self._replicas: int | None = None
        self._buffer: int | None = None
        self._skip = 0
        self._records: list[Record] = []
        self._turn = 0
        self._stopped: str | None = None

    # The methods below are for the data loader.

    def open(
        self,
        buffer: int,
        *,
        skip: int = 0,
        replicas: int | None = None,
        records: list[Record] | None = None,
        transform: str = "",
    ) -> None:
        """Let senders connect.

        Args:
            buffer: The maximum number of waiting batches for each replica.
            skip: The number of batches of each replica that the resumed run has trained on.
            replicas: The number of replicas of the resumed run; None if any number is allowed.
            records: The record of the skipped batches of each replica; None if there are no records.
            transform: The transform that makes the batches, as JSON, for the built-in data-compose.
        """
        with self._changed:
            self.transform = transform
            self._buffer, self._skip, self._records = buffer, skip, records or []
            if replicas is not None:
                self._replicas = replicas
            self._changed.notify_all()

    @property
    def replicas(self) -> int:
        """The number of replicas; 0 until the first one has connected."""
        return self._replicas or 0

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` was called."""
        return self._buffer is not None

    def take(self, stop: threading.Event) -> tuple[int, Batch, Record] | None:
        """Wait for the next batch; return its replica, the batch, and the record of the replica's batches up to it.

        Return None after the last batch, after :meth:`stop`, and when ``stop`` is set. Call :meth:`wake` after setting
        ``stop``. The wait has no time limit, but is logged.

        Raises:
            BaseException: The error of the replica's script.
        """
        waited = 0.0
        with self._changed:
            while self._stopped is None and not stop.is_set():
                index = self._next_replica()
                if index is None:
                    return None
                queue = self._queues.get(index)
                if queue is not None and queue.waiting:
                    seq, batch, record = queue.waiting.popleft()
                    self._turn = index + 1
                    self._changed.notify_all()
                    if queue.callbacks is not None:
                        queue.callbacks.taken(seq)
                    return index, batch, record
                if queue is not None and queue.error is not None:
                    raise queue.error
                if not self._changed.wait(REMIND_S):
                    waited += REMIND_S
                    _logger.warning("waiting for a batch for %d s: %s", waited, self._missing(index))
        return None

    def _next_replica(self) -> int | None:
        """Return the next replica that has not ended, or a replica that failed; None if all have ended."""
        if self._replicas is None:
            return 0
        for offset in range(self._replicas):
            index = (self._turn + offset) % self._replicas
            queue = self._queues.get(index)
            if queue is None or not queue.drained or queue.error is not None:
                return index
        return None

    def _missing(self, index: int) -> str:
        if settings.nats_url is None:  # the data script is a thread of this process
            connected = self._replicas is not None
            return "the data script sends no batch" if connected else "the data script has not entered its DataCtx"
        if self._replicas is None:
            return "no data-compose replica has connected"
        queues = [(other, self._queues.get(other)) for other in range(self._replicas)]
        absent = [str(other) for other, queue in queues if queue is None or not (queue.sender or queue.ended)]
        if absent:
            word = "replica" if len(absent) == 1 else "replicas"
            return f"not connected: data-compose {word} {listed(absent)} of {self._replicas}"
        queue = self._queues[index]
        if queue.skipped == queue.received > 1:
            return (
                f"data-compose replica {index} is connected and has sent nothing yet; unless its script uses "
                f"DataCtx.resume, it first repeats the {queue.skipped} batches that this rank has received"
            )
        return f"data-compose replica {index} is connected and has sent nothing new"

    def queued(self) -> int:
        """Return the number of waiting batches."""
        with self._changed:
            return sum(len(queue.waiting) for queue in self._queues.values())

    def wake(self) -> None:
        """Wake a waiting :meth:`take`, so that it checks its ``stop``."""
        with self._changed:
            self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """Stop all senders: connected ones now, later ones when they connect."""
        with self._changed:
            if self._stopped is None:
                self._stopped = reason
                for queue in self._queues.values():
                    queue.waiting.clear()
                    if queue.callbacks is not None:
                        queue.callbacks.stopped(reason)
                self._changed.notify_all()

    # The methods below are for senders.

    def connect(
        self,
        index: int,
        replicas: int,
        sender: str,
        callbacks: SenderCallbacks,
        gone: Callable[[], bool] = lambda: False,
    ) -> Position | None:
        """Connect a sender when the data loader requests batches.

        Args:
            index: The index of its replica.
            replicas: The number of replicas in its configuration.
            sender: The id of its process. A process that connects again replaces its own connection.
            callbacks: The functions to call. They run in other threads and under a lock, so they must not block.
            gone: Returns whether the sender has disconnected in the meantime; call :meth:`wake` when this changes.

        Returns:
            The position at which the sender must resume; None if it has disconnected.

        Raises:
            Stopped: Training has ended, or the replica has sent all batches of this generation.
            ReplicaInUseError: Another process is connected as this replica.
            ConfigError: The index or the number of replicas contradicts other replicas or the checkpoint.
        """
        with self._changed:
            while self._buffer is None and self._stopped is None and not gone():
                self._changed.wait()
            if gone():
                return None
            if self._stopped is not None:
                raise Stopped(self._stopped)
            self._check_replica(index, replicas)
            queue = self._queue(index)
            if queue.ended:
                raise Stopped(f"{sender_name(index)} has sent all its batches of this generation")
            if queue.sender not in (None, sender):
                raise ReplicaInUseError(
                    f"another process is connected as data-compose replica {index} of {replicas}; give each replica "
                    "its own index (REPLICA_INDEX)"
                )
            if queue.callbacks is not None:
                queue.callbacks.replaced()
            if queue.sender is None:
                queue.skipped = queue.received
            queue.sender, queue.callbacks = sender, callbacks
            self._changed.notify_all()
            return Position(queue.received, len(queue.waiting), self._buffer or 0, queue.record)

    def _check_replica(self, index: int, replicas: int) -> None:
        if index >= replicas:
            raise ConfigError(
                f"REPLICA_INDEX is {index}, but REPLICA_SIZE is {replicas}: indexes go from 0 to {replicas - 1}",
                hint="",
            )
        if self._replicas not in (None, replicas):
            raise ConfigError(
                f"data-compose replica {index} has REPLICA_SIZE={replicas}, but this run has "
                f"REPLICA_SIZE={self._replicas}; start every replica with REPLICA_SIZE={self._replicas}",
                hint="",  # the message is sent to the replica, without a hint
            )
        self._replicas = replicas

    def _queue(self, index: int) -> _ReplicaQueue:
        if index not in self._queues:
            known = self._records[index] if index < len(self._records) else Record(None)
            self._queues[index] = _ReplicaQueue(self._skip, known if self._skip else Record())
        return self._queues[index]

    def put(
        self, index: int, sender: str, seq: int, number: int, batch: Batch, encoded: bytes, position: str = ""
    ) -> None:
        """Add a batch of a replica.

        Args:
            index: The index of the replica.
            sender: The id of its process.
            seq: The number of the batch among all that the replica sends.
            number: The number of the batch among those for this rank, from 0.
            batch: The batch.
            encoded: The encoded batch, for the digest; it is not kept.
            position: The position of the script after the batch; empty if it has none.

        Raises:
            DataError: The batch is not the next one, or too many batches are waiting.
        """
        with self._changed:
            queue = self._queues[index]
            if queue.sender != sender or self._stopped is not None:
                return
            if number != queue.received or queue.ended:
                raise DataError(f"{sender_name(index)} sent batch {number}, expected batch {queue.received}")
            if len(queue.waiting) >= (self._buffer or 0):
                raise DataError(f"{sender_name(index)} sent more than the {self._buffer} batches that may wait")
            queue.received += 1
            queue.record = queue.record.extended(encoded, position)
            queue.waiting.append((seq, batch, queue.record))
            self._changed.notify_all()

    def end(self, index: int, sender: str, batches: int, error: BaseException | None = None) -> None:
        """End a replica's batches: it has sent all of them, or its script failed.

        Args:
            index: The index of the replica.
            sender: The id of its process.
            batches: The number of batches it has sent to this rank, over all its connections.
            error: The error of its script, for the training loop; None if the script succeeded.

        Raises:
            DataError: The number of batches sent differs from the number of batches received.
        """
        with self._changed:
            queue = self._queues[index]
            if queue.sender != sender or queue.ended:
                return
            wrong = error is None and batches != queue.received
            if wrong:
                error = DataError(
                    f"{sender_name(index)} ended; batches for this rank: {batches}, received: "
                    f"{queue.received}; a script must send the same batches at every start"
                )
            queue.ended, queue.error = True, error
            self._changed.notify_all()
        if wrong and error is not None:
            raise error

    def disconnect(self, index: int, callbacks: SenderCallbacks) -> bool:
        """Remove a connection; return whether the replica must connect again."""
        with self._changed:
            queue = self._queues[index]
            if queue.callbacks is not callbacks:
                return False
            queue.sender = queue.callbacks = None
            return not queue.ended and self._stopped is None

    def wait_for_room(self, index: int) -> None:
        """Wait until the replica may add another batch. Only a sender inside this process calls this method.

        Raises:
            Stopped: The rank has stopped accepting batches.
        """
        with self._changed:
            while self._stopped is None and len(self._queues[index].waiting) >= (self._buffer or 0):
                self._changed.wait()
            if self._stopped is not None:
                raise Stopped(self._stopped)
