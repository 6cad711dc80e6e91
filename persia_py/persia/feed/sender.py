"""The sending side of the feed in data-compose. Batch ``n`` of a replica goes to rank ``n mod world size``."""

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from persia.feed.protocol import MAX_BATCH_BYTES, RunRestarted, Stopped
from persia.feed.rank_stream import RankStream, SenderState
from persia.runtime.errors import DataError, IncompatibleError
from persia.runtime.logging import get_logger
from persia_core.data import Batch

_logger = get_logger("feed")

Find = Callable[[], Iterable[Mapping[str, Any]]]
"""A function that returns ``index``, ``replicas``, ``address`` and ``started`` of each announced rank."""

_PAUSE_S = 1.0
_LEAVE_S = 5.0
"""Seconds within which the streams must end when the sender is closed."""


class Sender:
    """Sends batches to every rank of a run. It waits without a time limit until ranks are announced, and logs the wait.

    Args:
        job: The name of the job.
        index: The index of this replica.
        size: The number of data-compose replicas.
        find: Returns the announced ranks.
        start_timeout: Seconds within which the connection of a dead replica must be closed.

    Attributes:
        world_size: The number of ranks.
        generation: The generation of the run; 0 if the ranks accept no batches.

    Raises:
        AuthError: A rank refuses the token.
        IncompatibleError: A rank belongs to another job, has another version, or expects another number of replicas.
        UsageError: Another process is connected as this replica.
        RunRestarted: A new generation of the run began.
    """

    def __init__(self, job: str, index: int, size: int, *, find: Find, start_timeout: float) -> None:
        self._find = find
        self.world_size = self._wait_for_trainers(job)
        self._state = SenderState(job, index, size, uuid.uuid4().hex, start_timeout, self.world_size)
        self._streams = [RankStream(self._state, rank, self._locate) for rank in range(self.world_size)]
        try:
            with self._state.changed:
                self._wait(lambda: all(stream.welcomed for stream in self._streams))
                self._check(stopped=False)
        except BaseException:
            self.close()
            raise

    @property
    def generation(self) -> int:
        """The generation of the run; 0 if the ranks accept no batches."""
        return self._state.generation or 0

    @property
    def transform(self) -> str:
        """The transform that makes the batches, as JSON; empty if the script makes its own batches.

        Raises:
            IncompatibleError: The ranks have different transforms.
        """
        first, *others = (stream.transform for stream in self._streams)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise IncompatibleError(
                    f"the transform of rank {rank} differs from that of rank 0",
                    hint="start all ranks with the same persia.yml and the same data",
                )
        return first

    @property
    def rank_0(self) -> str:
        """The address of the rank 0 that receives the batches. It is different for every training context."""
        return self._streams[0].address

    def _wait_for_trainers(self, job: str) -> int:
        """Wait until ranks are announced that agree on the world size. Return the world size."""
        pause = threading.Event()
        said: set[int] | None = None
        while True:
            sizes = {int(peer["replicas"]) for peer in self._find()}
            if len(sizes) == 1:
                return sizes.pop()
            if sizes != said:
                said = sizes
                if sizes:
                    _logger.warning(
                        "the trainers of job %s disagree on the number of ranks: %s; waiting until they agree; "
                        "next: if this continues, give every trainer the same --nnodes and --nproc-per-node",
                        job,
                        ", ".join(map(str, sorted(sizes))),
                    )
                else:
                    _logger.info("waiting for the trainers of job %s", job)
            pause.wait(_PAUSE_S)

    def _locate(self, rank: int) -> str | None:
        """Return the address of a rank.

        If several processes announce this rank, return that of the one started last.
        """
        found = [peer for peer in self._find() if int(peer["index"]) == rank]
        return str(max(found, key=lambda peer: str(peer["started"]))["address"]) if found else None

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._state.changed.wait_for(lambda: self._state.over or self._stopped or ready())

    @property
    def _stopped(self) -> bool:
        return all(stream.stopped is not None for stream in self._streams)

    def _check(self, *, stopped: bool = True) -> None:
        """Raise the error that ends the sender, if any. The caller holds the lock."""
        if self._state.error is not None:
            raise self._state.error
        if self._state.restarted:
            raise RunRestarted(self._state.restarted)
        if stopped and self._stopped:
            raise Stopped(self._streams[0].stopped)

    def resume(self) -> str:
        """Return the position at which the script can begin; empty means its first batch.

        The position is that after the next-to-last batch of the rank whose last batch is the oldest. The last batch of
        each rank is therefore sent again, compared with the batch that the rank has received, and skipped.
        """

        def before_last(stream: RankStream) -> int:
            return (stream.replay.batches - 2) * self.world_size + stream.rank

        oldest = min(self._streams, key=before_last)
        if before_last(oldest) < 0 or not oldest.replay.position_before:
            return ""
        with self._state.changed:
            self._state.batches = before_last(oldest) + 1
        for stream in self._streams:
            stream.replay.begin_at_last()
        return oldest.replay.position_before

    def send(self, batch: Batch, position: str = "") -> None:
        """Send a batch. Block until its rank has space.

        Args:
            batch: The batch.
            position: The position of the script after the batch; empty if it has none.

        Raises:
            Stopped: The ranks have stopped accepting batches.
            RunRestarted: A new generation of the run began.
            DataError: The batch is too large.
            PersiaError: As in the constructor.
        """
        state = self._state
        number, rank = divmod(state.batches, self.world_size)
        stream = self._streams[rank]
        with state.changed:
            self._check()
            seq, state.batches = state.batches, state.batches + 1
            if seq == 0 and (received := sum(each.replay.batches for each in self._streams)):
                _logger.info("skipping the first batches of the script, which the ranks have received: %d", received)
            if stream.stopped is not None:
                return
        if number < stream.replay.batches:
            stream.replay.skip(number, batch)
            return
        data = batch.to_bytes()
        if len(data) > MAX_BATCH_BYTES:
            size = f"{len(data)} bytes, allowed: at most {MAX_BATCH_BYTES}"
            raise DataError(f"send_data: batch {seq}, counted from 0, has {size}", hint="send smaller batches")
        with state.changed:
            self._wait(lambda: not stream.full)
            self._check()
            if stream.stopped is None:
                stream.add(number, seq, data, position)
                state.changed.notify_all()

    def end(self) -> None:
        """Report that all batches are sent, and wait until every rank has received them.

        Raises:
            Stopped: The ranks have stopped accepting batches.
            RunRestarted: A new generation of the run began.
            PersiaError: As in the constructor.
        """
        self._end("")
        with self._state.changed:
            self._wait(self._arrived)
            self._check()

    def fail(self, error: BaseException) -> None:
        """Report to all reachable ranks that the script has failed."""
        self._end(f"{type(error).__name__}: {error}")
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.over or self._arrived(), _LEAVE_S)

    def _end(self, failure: str) -> None:
        with self._state.changed:
            self._state.ended, self._state.failure = True, failure
            self._state.changed.notify_all()

    def _arrived(self) -> bool:
        return all(stream.delivered or stream.stopped is not None for stream in self._streams)

    def close(self) -> None:
        """Close all streams."""
        with self._state.changed:
            self._state.closed = True
            self._state.changed.notify_all()
        for stream in self._streams:
            stream.close(_LEAVE_S)
