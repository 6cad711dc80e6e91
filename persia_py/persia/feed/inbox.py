"""The batches of all data-compose replicas that one rank will train on, merged in turn.

Which batch comes next depends on the replicas' numbers alone, never on who is faster: replica 0's first, replica 1's
first, ..., replica 0's second, and so on; a replica that has ended drops out.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from persia.feed.protocol import Stopped
from persia.feed.replay import Digest, follow
from persia.runtime.errors import ConfigError, DataError, UsageError
from persia.runtime.logging import get_logger
from persia_core.data import Batch

_logger = get_logger("feed")

_REMIND_S = 30
"""Seconds between two log lines of a rank that waits for data."""


class TakenPlaceError(UsageError):
    """Two senders claim the same replica index."""


@dataclass
class Place:
    """Where a replica that connects goes on.

    Attributes:
        received: Its batches this rank has received; they are not sent again.
        queued: Those of them that wait to be taken.
        buffer: How many may wait at most.
        digest: Of the batches received; None where it is not known.
    """

    received: int
    queued: int
    buffer: int
    digest: Digest


@dataclass
class Events:
    """What a connected sender is told.

    Attributes:
        taken: One of its batches was taken, by its number.
        stopped: No batch is wanted any more, and why.
        replaced: The same sender has connected again.
    """

    taken: Callable[[int], None]
    stopped: Callable[[str], None]
    replaced: Callable[[], None]


@dataclass
class _Line:
    """One replica's batches."""

    received: int = 0
    taken: int = 0
    digest: Digest = 0  # of those received
    waiting: deque[tuple[int, Batch, Digest]] = field(default_factory=deque)
    sender: str | None = None  # None: not connected
    events: Events | None = None
    ended: bool = False
    error: BaseException | None = None

    @property
    def drained(self) -> bool:
        return self.ended and not self.waiting


class Inbox:
    """Holds at most ``buffer`` batches of each replica until the rank's data loader takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[int, _Line] = {}
        self._replicas: int | None = None
        self._buffer: int | None = None
        self._skip = 0
        self._digests: list[Digest] = []
        self._turn = 0
        self._stopped: str | None = None

    # The data loader's side.

    def open(
        self, buffer: int, *, skip: int = 0, replicas: int | None = None, digests: list[Digest] | None = None
    ) -> None:
        """Let senders in.

        Args:
            buffer: Batches of each replica that may wait.
            skip: Batches of each replica that an earlier run has trained on.
            replicas: How many replicas that run had; None if it does not matter.
            digests: Of each replica's batches that are skipped; None if they are not known.
        """
        with self._changed:
            self._buffer, self._skip, self._digests = buffer, skip, digests or []
            if replicas is not None:
                self._set_replicas(replicas)
            self._changed.notify_all()

    @property
    def replicas(self) -> int:
        """How many replicas send here; 0 as long as none has said so."""
        return self._replicas or 0

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` was called."""
        return self._buffer is not None

    def take(self, stop: threading.Event) -> tuple[int, Batch, Digest] | None:
        """Return the replica and batch whose turn it is, and the digest of the replica's batches up to this one.

        None after the last batch, and when nothing is wanted any more.
        Waiting for data has no limit, but is logged. After setting ``stop``, call :meth:`wake`.

        Raises:
            BaseException: What the replica's script failed with.
        """
        waited = 0
        with self._changed:
            while self._stopped is None and not stop.is_set():
                index = self._whose_turn()
                if index is None:
                    return None
                line = self._lines.get(index)
                if line is not None and line.waiting:
                    seq, batch, digest = line.waiting.popleft()
                    line.taken += 1
                    self._turn = index + 1
                    self._changed.notify_all()
                    if line.events is not None:
                        line.events.taken(seq)
                    return index, batch, digest
                if line is not None and line.error is not None:
                    raise line.error
                if not self._changed.wait(_REMIND_S):
                    waited += _REMIND_S
                    _logger.warning("waiting for a batch since %d s: %s", waited, self._missing(index))
        return None

    def _whose_turn(self) -> int | None:
        """Return the next replica that is not at its end, or failed there; None when all are at their end."""
        if self._replicas is None:
            return 0
        for offset in range(self._replicas):
            index = (self._turn + offset) % self._replicas
            line = self._lines.get(index)
            if line is None or not line.drained or line.error is not None:
                return index
        return None

    def _missing(self, index: int) -> str:
        if self._replicas is None:
            return "no data-compose replica has connected"
        lines = [(other, self._lines.get(other)) for other in range(self._replicas)]
        absent = [str(other) for other, line in lines if line is None or not (line.sender or line.ended)]
        if absent:
            return f"not connected: data-compose replica {', '.join(absent)} of {self._replicas}"
        return f"data-compose replica {index} is connected and has sent nothing new"

    def queued(self) -> int:
        """Return how many batches wait."""
        with self._changed:
            return sum(len(line.waiting) for line in self._lines.values())

    def wake(self) -> None:
        """Make a waiting :meth:`take` look at its ``stop`` again."""
        with self._changed:
            self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """Tell every sender that no batch is wanted any more; later ones are told when they connect."""
        with self._changed:
            if self._stopped is None:
                self._stopped = reason
                for line in self._lines.values():
                    line.waiting.clear()
                    if line.events is not None:
                        line.events.stopped(reason)
                self._changed.notify_all()

    # The senders' side.

    def connect(
        self, index: int, replicas: int, sender: str, events: Events, gone: Callable[[], bool] = lambda: False
    ) -> Place | None:
        """Take a sender in, once the data loader has asked for batches.

        Args:
            index: Its replica index.
            replicas: How many replicas it says there are.
            sender: Its process; one that connects again replaces its own connection.
            events: Called from other threads, under a lock: they must not block.
            gone: Whether the sender has given up meanwhile; call :meth:`wake` when that changes.

        Returns:
            Where it goes on; None if it is gone.

        Raises:
            Stopped: No batch is wanted: training is over, or the replica has sent everything in this generation.
            TakenPlaceError: Another process is connected as this replica.
            ConfigError: Index or number of replicas contradict those of others, or of the checkpoint.
        """
        with self._changed:
            while self._buffer is None and self._stopped is None and not gone():
                self._changed.wait()
            if gone():
                return None
            if self._stopped is not None:
                raise Stopped(self._stopped)
            self._check_place(index, replicas)
            line = self._line(index)
            if line.ended:
                raise Stopped(f"replica {index} has sent all its batches of this generation")
            if line.sender not in (None, sender):
                raise TakenPlaceError(
                    f"another process is connected as data-compose replica {index} of {replicas}; give each replica "
                    "an index of its own (REPLICA_INDEX)"
                )
            if line.events is not None:
                line.events.replaced()
            line.sender, line.events = sender, events
            self._changed.notify_all()
            return Place(line.received, len(line.waiting), self._buffer or 0, line.digest)

    def _check_place(self, index: int, replicas: int) -> None:
        if index >= replicas:
            raise ConfigError(f"REPLICA_INDEX={index}: want less than REPLICA_SIZE={replicas}")
        if self._replicas not in (None, replicas):
            raise ConfigError(
                f"data-compose replica {index} says REPLICA_SIZE={replicas}, this run has {self._replicas} replicas"
            )
        self._set_replicas(replicas)

    def _set_replicas(self, replicas: int) -> None:
        self._replicas = replicas

    def _line(self, index: int) -> _Line:
        if index not in self._lines:
            known = self._digests[index] if index < len(self._digests) else None
            self._lines[index] = _Line(received=self._skip, taken=self._skip, digest=known if self._skip else 0)
        return self._lines[index]

    def put(self, index: int, sender: str, seq: int, number: int, batch: Batch, encoded: bytes) -> None:
        """Add a replica's batch.

        Args:
            index: The replica.
            sender: Its process.
            seq: The batch's number among all it sends.
            number: The batch's number among those it sends to this rank, from 0.
            batch: The batch.
            encoded: Its bytes, for the digest; they are not kept.

        Raises:
            DataError: Not the next batch, or one more than may wait.
        """
        with self._changed:
            line = self._lines[index]
            if line.sender != sender or self._stopped is not None:
                return
            if number != line.received or line.ended:
                raise DataError(f"data-compose replica {index} sent its batch {number} where {line.received} was due")
            if len(line.waiting) >= (self._buffer or 0):
                raise DataError(f"data-compose replica {index} sent more than the {self._buffer} batches that may wait")
            line.received += 1
            line.digest = follow(line.digest, encoded)
            line.waiting.append((seq, batch, line.digest))
            self._changed.notify_all()

    def end(self, index: int, sender: str, batches: int, error: BaseException | None = None) -> None:
        """Note that a replica has sent everything, or that its script failed.

        Args:
            index: The replica.
            sender: Its process.
            batches: How many batches it sent to this rank, over all its connections.
            error: What its script failed with, for the training loop; None if it did not.

        Raises:
            DataError: More or fewer have come.
        """
        with self._changed:
            line = self._lines[index]
            if line.sender != sender or line.ended:
                return
            wrong = error is None and batches != line.received
            if wrong:
                error = DataError(
                    f"data-compose replica {index} ended after {batches} batches for this rank, and {line.received} "
                    "have come; a script must send the same batches whenever it is started"
                )
            line.ended, line.error = True, error
            self._changed.notify_all()
        if wrong and error is not None:
            raise error

    def disconnect(self, index: int, events: Events) -> bool:
        """Forget a connection; return whether its replica will be missed."""
        with self._changed:
            line = self._lines[index]
            if line.events is not events:
                return False
            line.sender = line.events = None
            return not line.ended and self._stopped is None

    def wait_for_room(self, index: int) -> None:
        """Wait until the replica may put another batch, for a sender inside this process.

        Raises:
            Stopped: No batch is wanted any more.
        """
        with self._changed:
            while self._stopped is None and len(self._lines[index].waiting) >= (self._buffer or 0):
                self._changed.wait()
            if self._stopped is not None:
                raise Stopped(self._stopped)
