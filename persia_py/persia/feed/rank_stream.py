"""The stream of a data-compose replica to one rank. It fills the rank's buffer, and sends lost batches again."""

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from persia import __version__
from persia.feed import channel
from persia.feed.protocol import PROTOCOL
from persia.feed.replay import Record, ReplayCheck
from persia.proto import feed_pb2 as pb
from persia.proto import feed_pb2_grpc as services
from persia.runtime.errors import IncompatibleError, PersiaError, UsageError
from persia.runtime.logging import get_logger

_logger = get_logger("feed")
_SAME_BUILD = "start every process of the job from the same build, and with the same PERSIA_JOB"

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0
"""Seconds between two attempts to connect. The pause doubles from the first value up to the last value."""
_jitter = random.Random()  # a separate generator, because the data script may seed the global one


@dataclass
class SenderState:
    """The state that the streams of one sender share; guarded by ``changed``.

    Attributes:
        job: The name of the job.
        index: The index of the replica.
        size: The number of replicas.
        sender: The id of this process.
        start_timeout: Seconds within which the connection of a dead replica must be closed.
        world_size: The number of ranks.
        changed: Notified at every change of this state or of a stream.
        generation: The generation of the run; None before the first welcome.
        restarted: Why the script must restart; empty if it need not.
        error: The error that ends the sender.
        batches: The number of batches passed to the sender.
        ended: Whether the script has sent its last batch.
        failure: The error of the script; empty if it did not fail.
        closed: Whether the sender is being closed.
    """

    job: str
    index: int
    size: int
    sender: str
    start_timeout: float
    world_size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    generation: int | None = None
    restarted: str = ""
    error: PersiaError | None = None
    batches: int = 0
    ended: bool = False
    failure: str = ""
    closed: bool = False

    @property
    def over(self) -> bool:
        """Whether all streams must end: the sender is closed or has failed, or the script must restart."""
        return self.closed or bool(self.restarted) or self.error is not None


class RankStream:
    """Sends batches to one rank, and reconnects when a connection fails.

    A batch is kept until the rank has taken it for training, because it may have to be sent again.

    Args:
        state: The state that all streams of the sender share.
        rank: The rank.
        locate: Returns the address of the rank; empty if the rank takes no batches, None if it is not announced.
    """

    def __init__(self, state: SenderState, rank: int, locate: Callable[[int], str | None]) -> None:
        self.rank = rank
        self.skip: int | None = None
        self.replay = ReplayCheck(state.index, rank, 0, Record())
        self.transform = ""
        self.stopped: str | None = None
        self.address = ""
        self.delivered = False
        self._state = state
        self._locate = locate
        self._pending: deque[tuple[int, int, bytes, str]] = deque()  # number, seq, encoded batch, position
        self._buffer = 0
        self._queued = 0  # batches of an earlier process of this replica that are waiting at the rank
        self._call: grpc.Future[Any] | None = None
        self._logged = ""
        self._refused_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"persia-feed-rank-{rank}", daemon=True)
        self._thread.start()

    # The methods below are for the sender. The caller holds ``state.changed``.

    @property
    def welcomed(self) -> bool:
        """Whether the rank has sent the position at which to resume."""
        return self.skip is not None

    @property
    def full(self) -> bool:
        """Whether the next batch must wait until the rank has taken one."""
        return self.stopped is None and len(self._pending) + self._queued >= self._buffer

    def add(self, number: int, seq: int, data: bytes, position: str) -> None:
        """Add batch ``number`` of this rank."""
        self._pending.append((number, seq, data, position))

    def close(self, timeout: float) -> None:
        """Close the connection. The caller has set ``state.closed`` and does not hold the lock."""
        call = self._call
        if call is not None:
            call.cancel()
        self._thread.join(timeout)

    # The methods below run in the thread of the stream.

    def _run(self) -> None:
        state, pause = self._state, _FIRST_PAUSE_S
        while not self._done():
            before = self.skip
            address = self._locate(self.rank)
            if address is None:
                self._log_once("rank %d of job %s is not announced; waiting for it", self.rank, state.job)
            elif not address:
                self._log_once(
                    "rank %d of job %s takes no batches: it trains with an EmbeddingCollection, and its own script "
                    "makes the features; waiting for a TrainCtx",
                    self.rank,
                    state.job,
                )
            else:
                try:
                    self._connect(address)
                except PersiaError as error:
                    self._fail(error)
                except grpc.RpcError as error:
                    self._handle_error(error, address)
            pause = _FIRST_PAUSE_S if self.skip != before else min(_LAST_PAUSE_S, 2 * pause)
            with state.changed:
                state.changed.wait_for(self._done, pause * _jitter.uniform(0.5, 1))

    def _done(self) -> bool:
        return self.delivered or self.stopped is not None or self._state.over

    def _log_once(self, text: str, *values: object) -> None:
        """Log a message, unless it differs from the previous one only in its values."""
        if text != self._logged:
            self._logged = text
            _logger.info(text, *values)

    def _handle_error(self, error: grpc.RpcError, address: str) -> None:
        """Let the stream reconnect if the error may be temporary; otherwise end the sender."""
        code, details = error.code(), error.details()
        if self._state.over:
            return
        if code != grpc.StatusCode.ALREADY_EXISTS:
            self._refused_at = None
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            self._fail(channel.auth_error(address, details))
        elif any(sign in (details or "") for sign in channel.BAD_CERTIFICATE):
            self._fail(channel.certificate_error(address, details))
        elif code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED):
            hint = "" if "REPLICA_SIZE" in (details or "") else _SAME_BUILD  # these details include the next step
            self._fail(IncompatibleError(f"rank {self.rank} at {address}: {details}", hint=hint))
        elif code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
            self._fail(UsageError(f"rank {self.rank} at {address}: {details}"))
        elif code == grpc.StatusCode.ALREADY_EXISTS:
            self._refused_at = self._refused_at or time.monotonic()
            if time.monotonic() - self._refused_at >= self._state.start_timeout:
                self._fail(UsageError(f"rank {self.rank} at {address}: {details}"))
            self._log_once("rank %d: %s; retrying", self.rank, details)
        else:
            lost, never = "rank %d at %s: connection lost (%s); reconnecting", "rank %d at %s: %s; retrying"
            self._log_once(lost if self.welcomed else never, self.rank, address, details)

    def _fail(self, error: PersiaError) -> None:
        with self._state.changed:
            self._state.error = self._state.error or error
            self._state.changed.notify_all()

    def _connect(self, address: str) -> None:
        """Use one connection, from the first message to its end."""
        connection = _Connection()
        with contextlib.closing(channel.connect(address)) as grpc_channel:
            call = services.TrainerStub(grpc_channel).Feed(
                self._requests(connection), metadata=channel.metadata("data")
            )
            self._call = call
            try:
                for reply in call:
                    self._handle(reply, connection, address)
                with self._state.changed:
                    self.delivered = self.delivered or (connection.end_sent and self.stopped is None)
                    self._state.changed.notify_all()
            finally:
                with self._state.changed:
                    connection.broken = True
                    self._call = None
                    self._state.changed.notify_all()
                call.cancel()

    def _handle(self, reply: pb.FeedReply, connection: "_Connection", address: str) -> None:
        state = self._state
        with state.changed:
            part = reply.WhichOneof("part")
            if part == "welcome":
                self._handle_welcome(reply.welcome, connection)
                self.address = address if connection.open else self.address
                self._log_once("connected to rank %d of %d at %s", self.rank, state.world_size, address)
            elif part == "taken":
                if self._pending and self._pending[0][1] == reply.taken.seq:
                    self._pending.popleft()
                else:
                    self._queued = max(0, self._queued - 1)
            elif part == "stop" and connection.open:
                self.stopped = reply.stop.reason
                self._pending.clear()
            state.changed.notify_all()

    def _handle_welcome(self, welcome: pb.FeedWelcome, connection: "_Connection") -> None:
        state = self._state
        if state.generation is None:
            state.generation = welcome.generation
        if (welcome.rank, welcome.world_size) != (
            self.rank,
            state.world_size,
        ) or welcome.generation > state.generation:
            state.restarted = (
                f"the trainers are in generation {welcome.generation} with WORLD_SIZE={welcome.world_size}, the data "
                f"script in generation {state.generation} with WORLD_SIZE={state.world_size}"
            )
        elif welcome.generation < state.generation:
            connection.broken = True  # the rank is still in the previous generation
        else:
            if self.skip is None:  # a later welcome includes batches that this process has sent
                digest = welcome.digest if welcome.HasField("digest") else None
                last = welcome.last_digest if welcome.HasField("last_digest") else None
                record = Record(digest, last=last, position_before=welcome.position_before)
                self.replay = ReplayCheck(state.index, self.rank, welcome.skip, record)
                self.transform = welcome.transform
            self.skip, self._buffer = welcome.skip, welcome.buffer
            own = sum(number < welcome.skip for number, *_ in self._pending)
            self._queued = max(0, welcome.queued - own)
            for _ in range(own - min(own, welcome.queued)):
                self._pending.popleft()  # the rank took it while the connection was broken
            connection.next = welcome.skip
            connection.open = True

    def _requests(self, connection: "_Connection") -> Iterator[pb.FeedRequest]:
        """Yield the requests of one connection. gRPC iterates over them in a separate thread."""
        state = self._state
        yield pb.FeedRequest(
            hello=pb.FeedHello(
                job=state.job, replica_index=state.index, replica_size=state.size,
                protocol=PROTOCOL, version=__version__, sender=state.sender,
            )
        )  # fmt: skip
        while True:
            with state.changed:
                state.changed.wait_for(
                    lambda: connection.broken or state.over or (connection.open and self._due(connection))
                )
                if connection.broken or state.over:
                    return
                request = self._next(connection)
            yield request
            if connection.end_sent:
                return

    def _due(self, connection: "_Connection") -> bool:
        return self._state.ended or any(number >= connection.next for number, *_ in self._pending)

    def _next(self, connection: "_Connection") -> pb.FeedRequest:
        for number, seq, data, position in self._pending:
            if number >= connection.next:
                connection.next = number + 1
                return pb.FeedRequest(batch=pb.FeedBatch(seq=seq, data=data, position=position))
        connection.end_sent = True
        return pb.FeedRequest(end=pb.FeedEnd(batches=self._state.batches, error=self._state.failure))


@dataclass
class _Connection:
    """A connection to the rank.

    Attributes:
        open: Whether the rank has sent its welcome.
        broken: Whether the connection has ended, or must end.
        next: The number of the next batch to send.
        end_sent: Whether all batches and the end have been sent.
    """

    open: bool = False
    broken: bool = False
    next: int = 0
    end_sent: bool = False
