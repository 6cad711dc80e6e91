"""A data-compose replica's stream to one rank: connects, sends what fits, resends what got lost."""

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
from persia.feed.replay import Replay
from persia.proto import feed_pb2 as pb
from persia.proto import feed_pb2_grpc as services
from persia.runtime.errors import IncompatibleError, PersiaError, UsageError
from persia.runtime.logging import get_logger

_logger = get_logger("feed")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0
"""Between two attempts to connect, doubling."""


@dataclass
class Shared:
    """What the streams of one sender have in common; guarded by ``changed``.

    Attributes:
        job: The job's name.
        index: The replica's index.
        size: How many replicas there are.
        sender: This process, as long as it lives.
        start_timeout: Seconds in which the place of a replica that died has to become free.
        changed: Notified whenever something below, or a stream, has changed.
        generation: Of the run the batches are for; None before the first welcome.
        world_size: How many ranks there are.
        restarted: Why the script has to start again; empty while it need not.
        error: What ends the sender.
        batches: How many batches were given to the sender so far.
        ended: Whether there will be no more.
        failure: Why, if the script failed.
        closed: Whether the sender is being left.
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
        """Whether nothing more is to be sent to anybody."""
        return self.closed or bool(self.restarted) or self.error is not None


class Stream:
    """Sends batches to one rank, whatever happens to the connection.

    A batch is kept until the rank has taken it for training, so that it can be sent again.

    Args:
        shared: What the streams have in common.
        rank: The rank.
        locate: Returns the rank's address, empty where it takes no batches; None while nobody has announced it.
    """

    def __init__(self, shared: Shared, rank: int, locate: Callable[[int], str | None]) -> None:
        self.rank = rank
        self.skip: int | None = None
        self.replay = Replay(shared.index, rank, 0, None)
        self.stopped: str | None = None
        self.address = ""
        self.delivered = False
        self._shared = shared
        self._locate = locate
        self._kept: deque[tuple[int, int, bytes]] = deque()  # number, seq, batch
        self._buffer = 0
        self._queued = 0  # batches the rank holds that an earlier connection brought
        self._call: grpc.Future[Any] | None = None
        self._state = ""
        self._refused_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"persia-feed-rank-{rank}", daemon=True)
        self._thread.start()

    # The sender's side; every caller holds ``shared.changed``.

    @property
    def welcomed(self) -> bool:
        """Whether the rank has said where to go on."""
        return self.skip is not None

    @property
    def full(self) -> bool:
        """Whether a batch has to wait until the rank has taken one."""
        return self.stopped is None and len(self._kept) + self._queued >= self._buffer

    def add(self, number: int, seq: int, data: bytes) -> None:
        """Send a batch: the rank's ``number``-th."""
        self._kept.append((number, seq, data))

    def close(self, timeout: float) -> None:
        """End the connection; the caller has set ``shared.closed`` and does not hold the lock."""
        call = self._call
        if call is not None:
            call.cancel()
        self._thread.join(timeout)

    # The stream's own thread.

    def _run(self) -> None:
        shared, pause = self._shared, _FIRST_PAUSE_S
        while not self._done():
            before = self.skip
            address = self._locate(self.rank)
            if address is None:
                self._say("rank %d of job %s is not announced; waiting for it", self.rank, shared.job)
            elif not address:
                self._say(
                    "rank %d of job %s takes no batches: it trains with an EmbeddingCollection, which is given its "
                    "features by its own script; waiting for a TrainCtx",
                    self.rank,
                    shared.job,
                )
            else:
                try:
                    self._talk(address)
                except PersiaError as error:
                    self._fail(error)
                except grpc.RpcError as error:
                    self._judge(error, address)
            pause = _FIRST_PAUSE_S if self.skip != before else min(_LAST_PAUSE_S, 2 * pause)
            with shared.changed:
                shared.changed.wait_for(self._done, pause * random.uniform(0.5, 1))

    def _done(self) -> bool:
        return self.delivered or self.stopped is not None or self._shared.over

    def _say(self, text: str, *values: object) -> None:
        """Log a change of state, once."""
        if text != self._state:
            self._state = text
            _logger.info(text, *values)

    def _judge(self, error: grpc.RpcError, address: str) -> None:
        """Tell what another attempt may cure from what it may not."""
        code, details = error.code(), error.details()
        if self._shared.over:
            return
        if code != grpc.StatusCode.ALREADY_EXISTS:
            self._refused_at = None
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            self._fail(channel.auth_error(address, details))
        elif any(sign in (details or "") for sign in channel.BAD_CERTIFICATE):
            self._fail(channel.certificate_error(address, details))
        elif code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED):
            self._fail(IncompatibleError(f"rank {self.rank} at {address}: {details}"))
        elif code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
            self._fail(UsageError(f"rank {self.rank} at {address}: {details}"))
        elif code == grpc.StatusCode.ALREADY_EXISTS:
            self._refused_at = self._refused_at or time.monotonic()
            if time.monotonic() - self._refused_at >= self._shared.start_timeout:
                self._fail(UsageError(f"rank {self.rank} at {address}: {details}"))
            self._say("rank %d: %s; trying again", self.rank, details)
        else:
            self._say("rank %d at %s: connection lost (%s); connecting again", self.rank, address, details)

    def _fail(self, error: PersiaError) -> None:
        with self._shared.changed:
            self._shared.error = self._shared.error or error
            self._shared.changed.notify_all()

    def _talk(self, address: str) -> None:
        """One connection, from hello to its end."""
        link = _Link()
        with contextlib.closing(channel.connect(address)) as connection:
            call = services.TrainerStub(connection).Feed(self._requests(link), metadata=channel.metadata("data"))
            self._call = call
            try:
                for reply in call:
                    self._heard(reply, link, address)
                with self._shared.changed:
                    self.delivered = self.delivered or (link.end_sent and self.stopped is None)
                    self._shared.changed.notify_all()
            finally:
                with self._shared.changed:
                    link.broken = True
                    self._call = None
                    self._shared.changed.notify_all()
                call.cancel()

    def _heard(self, reply: pb.FeedReply, link: "_Link", address: str) -> None:
        shared = self._shared
        with shared.changed:
            part = reply.WhichOneof("part")
            if part == "welcome":
                self._be_welcome(reply.welcome, link)
                self.address = address if link.open else self.address
                self._say("connected to rank %d of %d at %s", self.rank, shared.world_size, address)
            elif part == "taken":
                if self._kept and self._kept[0][1] == reply.taken.seq:
                    self._kept.popleft()
                else:
                    self._queued = max(0, self._queued - 1)
            elif part == "stop" and link.open:
                self.stopped = reply.stop.reason
                self._kept.clear()
            shared.changed.notify_all()

    def _be_welcome(self, welcome: pb.FeedWelcome, link: "_Link") -> None:
        shared = self._shared
        if shared.generation is None:
            shared.generation = welcome.generation
        if (welcome.rank, welcome.world_size) != (
            self.rank,
            shared.world_size,
        ) or welcome.generation > shared.generation:
            shared.restarted = (
                f"the trainers began generation {welcome.generation} with {welcome.world_size} ranks after generation "
                f"{shared.generation}"
            )
        elif welcome.generation < shared.generation:
            link.broken = True  # a rank of the generation before that has not noticed yet
        else:
            if self.skip is None:  # a later welcome counts batches of this process, which come once
                digest = welcome.digest if welcome.HasField("digest") else None
                self.replay = Replay(shared.index, self.rank, welcome.skip, digest)
            self.skip, self._buffer = welcome.skip, welcome.buffer
            own = sum(number < welcome.skip for number, _, _ in self._kept)
            self._queued = max(0, welcome.queued - own)
            for _ in range(own - min(own, welcome.queued)):
                self._kept.popleft()  # taken while we were away
            link.next = welcome.skip
            link.open = True

    def _requests(self, link: "_Link") -> Iterator[pb.FeedRequest]:
        """Yield what goes to the rank over one connection; gRPC calls this from a thread of its own."""
        shared = self._shared
        yield pb.FeedRequest(
            hello=pb.FeedHello(
                job=shared.job, replica_index=shared.index, replica_size=shared.size,
                protocol=PROTOCOL, version=__version__, sender=shared.sender,
            )
        )  # fmt: skip
        while True:
            with shared.changed:
                shared.changed.wait_for(lambda: link.broken or shared.over or (link.open and self._due(link)))
                if link.broken or shared.over:
                    return
                request = self._next(link)
            yield request
            if link.end_sent:
                return

    def _due(self, link: "_Link") -> bool:
        return self._shared.ended or any(number >= link.next for number, _, _ in self._kept)

    def _next(self, link: "_Link") -> pb.FeedRequest:
        for number, seq, data in self._kept:
            if number >= link.next:
                link.next = number + 1
                return pb.FeedRequest(batch=pb.FeedBatch(seq=seq, data=data))
        link.end_sent = True
        return pb.FeedRequest(end=pb.FeedEnd(batches=self._shared.batches, error=self._shared.failure))


@dataclass
class _Link:
    """One connection.

    Attributes:
        open: The rank has welcomed us.
        broken: It is over.
        next: The number of the next batch to send.
        end_sent: Everything is sent.
    """

    open: bool = False
    broken: bool = False
    next: int = 0
    end_sent: bool = False
