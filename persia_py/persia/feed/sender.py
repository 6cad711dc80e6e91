"""Data-compose's end of the feed: hands batch ``n`` of its replica to rank ``n mod world size``."""

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from persia.feed.protocol import MAX_BATCH_BYTES, RunRestarted, Stopped
from persia.feed.stream import Shared, Stream
from persia.runtime.errors import DataError
from persia.runtime.logging import get_logger
from persia_core.data import Batch

_logger = get_logger("feed")

Find = Callable[[], Iterable[Mapping[str, Any]]]
"""Returns the trainer ranks that are announced: each with ``index``, ``replicas`` and ``address``."""

_PAUSE_S = 1.0
_LEAVE_S = 5.0
"""Seconds for streams to end when the sender does."""


class Sender:
    """Sends batches to every rank of a run. Waits for ever for ranks to come, and logs when that changes.

    Args:
        job: The job's name.
        index: This replica's index.
        size: How many data-compose replicas there are.
        find: Who is announced.
        start_timeout: Seconds in which the place of a replica that died has to become free.

    Attributes:
        world_size: Number of trainer ranks.
        generation: Of the run the batches are for; 0 if the ranks want none.

    Raises:
        AuthError: A rank refuses the token.
        IncompatibleError: A rank is of another job, version or number of replicas.
        UsageError: Another process is connected as this replica.
        RunRestarted: The trainers were replaced meanwhile.
    """

    def __init__(self, job: str, index: int, size: int, *, find: Find, start_timeout: float) -> None:
        self._find = find
        self.world_size = self._wait_for_trainers(job)
        self._shared = Shared(job, index, size, uuid.uuid4().hex, start_timeout, self.world_size)
        self._streams = [Stream(self._shared, rank, self._locate) for rank in range(self.world_size)]
        try:
            with self._shared.changed:
                self._wait(lambda: all(stream.welcomed for stream in self._streams))
                self._check(stopped=False)
        except BaseException:
            self.close()
            raise

    @property
    def generation(self) -> int:
        """The run's generation."""
        return self._shared.generation or 0

    @property
    def rank_0(self) -> str:
        """Where the rank 0 is that gets the batches; every context of a trainer has an address of its own."""
        return self._streams[0].address

    def _wait_for_trainers(self, job: str) -> int:
        """Return the world size, once somebody says it."""
        pause = threading.Event()
        waiting = False
        while True:
            sizes = {int(peer["replicas"]) for peer in self._find()}
            if len(sizes) == 1:
                return sizes.pop()
            if not waiting:
                waiting = True
                _logger.info("waiting for the trainers of job %s", job)
            pause.wait(_PAUSE_S)

    def _locate(self, rank: int) -> str | None:
        """Return where the rank is; the process that was started last, if two say that they are it."""
        found = [peer for peer in self._find() if int(peer["index"]) == rank]
        return str(max(found, key=lambda peer: str(peer["started"]))["address"]) if found else None

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._shared.changed.wait_for(lambda: self._shared.over or self._stopped or ready())

    @property
    def _stopped(self) -> bool:
        return all(stream.stopped is not None for stream in self._streams)

    def _check(self, *, stopped: bool = True) -> None:
        """Raise what is to be raised; the caller holds the lock."""
        if self._shared.error is not None:
            raise self._shared.error
        if self._shared.restarted:
            raise RunRestarted(self._shared.restarted)
        if stopped and self._stopped:
            raise Stopped(self._streams[0].stopped)

    def send(self, batch: Batch) -> None:
        """Send a batch; wait until its rank has room.

        Raises:
            Stopped: No rank wants batches any more.
            RunRestarted: A new generation of the run began.
            DataError: The batch is too large.
            PersiaError: As when the sender was made.
        """
        shared = self._shared
        number, rank = divmod(shared.batches, self.world_size)
        stream = self._streams[rank]
        with shared.changed:
            self._check()
            seq, shared.batches = shared.batches, shared.batches + 1
            if stream.stopped is not None:
                return
        if number < stream.replay.batches:
            stream.replay.leave_out(batch)
            return
        data = batch.to_bytes()
        if len(data) > MAX_BATCH_BYTES:
            raise DataError(f"send_data: batch {seq} has {len(data)} bytes, allowed: {MAX_BATCH_BYTES}; split it")
        with shared.changed:
            self._wait(lambda: not stream.full)
            self._check()
            if stream.stopped is None:
                stream.add(number, seq, data)
                shared.changed.notify_all()

    def end(self) -> None:
        """Say that everything is sent, and wait until every rank has received it.

        Raises:
            Stopped: No rank wants batches any more.
            RunRestarted: A new generation of the run began.
            PersiaError: As when the sender was made.
        """
        self._end("")
        with self._shared.changed:
            self._wait(self._arrived)
            self._check()

    def fail(self, error: BaseException) -> None:
        """Tell every rank that the script failed, as far as they can be reached."""
        self._end(f"{type(error).__name__}: {error}")
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._shared.over or self._arrived(), _LEAVE_S)

    def _end(self, failure: str) -> None:
        with self._shared.changed:
            self._shared.ended, self._shared.failure = True, failure
            self._shared.changed.notify_all()

    def _arrived(self) -> bool:
        return all(stream.delivered or stream.stopped is not None for stream in self._streams)

    def close(self) -> None:
        """End all streams."""
        with self._shared.changed:
            self._shared.closed = True
            self._shared.changed.notify_all()
        for stream in self._streams:
            stream.close(_LEAVE_S)
