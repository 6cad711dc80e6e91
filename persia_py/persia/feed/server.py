"""The receiving side of the feed in a rank: a gRPC server that fills the rank's inbox."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from persia import __version__
from persia.feed import channel
from persia.feed.inbox import Inbox, Position, ReplicaInUseError, SenderCallbacks
from persia.feed.protocol import MAX_REPLICAS, PROTOCOL, Stopped
from persia.proto import feed_pb2 as pb
from persia.proto import feed_pb2_grpc as services
from persia.runtime import tokens
from persia.runtime.errors import ConfigError, DataError, UnreachableError
from persia.runtime.logging import get_logger
from persia_core.data import Batch

_logger = get_logger("feed")

_GRACE_S = 5.0
"""Seconds for which the server waits until senders have received the end of the feed."""


_Refusal = tuple[grpc.StatusCode, str]
_Reply = pb.FeedReply | _Refusal | None
"""The next reply of a stream. A refusal or None ends the stream."""


class FeedServer:
    """Receives the batches of all data-compose replicas for one rank; created by :func:`serve`.

    Attributes:
        inbox: The waiting batches.
        address: The address to which senders connect, ``host:port``.
    """

    def __init__(self, job: str, *, host: str) -> None:
        self.inbox = Inbox()
        self._run: tuple[int, int, int] | None = None
        self._closed = False
        open_to_network = tokens.token("data") is not None and not host.startswith("127.")
        credentials = channel.server_credentials()
        self._threads = ThreadPoolExecutor(MAX_REPLICAS, thread_name_prefix="persia-feed")
        self._server = grpc.server(
            self._threads,
            interceptors=[channel.AuthInterceptor("data")],
            options=channel.SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_REPLICAS,
        )
        services.add_TrainerServicer_to_server(_FeedService(self, job), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), self._server)
        listen = "0.0.0.0:0" if open_to_network else "127.0.0.1:0"  # the token protects the port
        try:
            port = (
                self._server.add_insecure_port(listen)
                if credentials is None
                else self._server.add_secure_port(listen, credentials)
            )
        except RuntimeError as error:
            secure = "check that PERSIA_TLS_CERT and PERSIA_TLS_KEY are PEM files of one certificate and its key"
            raise UnreachableError(
                f"cannot listen on {listen} for data-compose: {error}",
                hint="see the lines of gRPC above" if credentials is None else f"{secure}; see the lines of gRPC above",
            ) from error
        self.address = f"{host if open_to_network else '127.0.0.1'}:{port}"
        self._server.start()

    @property
    def run(self) -> tuple[int, int, int] | None:
        """Generation, rank and world size; None before :meth:`welcome`."""
        return self._run

    def welcome(self, generation: int, rank: int, world_size: int) -> None:
        """Let senders connect, because the generation has begun."""
        self._run = generation, rank, world_size

    def stop(self, reason: str) -> None:
        """Report to every sender that the rank has stopped accepting batches."""
        self.inbox.stop(reason)

    def close(self, error: BaseException | None = None) -> None:
        """Stop the server.

        Args:
            error: The error that ends this attempt, if any. After an error, senders wait for the next generation.
        """
        if not self._closed:
            self._closed = True
            if error is None:
                self.stop("training is over")
            self._server.stop(_GRACE_S if error is None else None).wait()
            self._threads.shutdown()


class _FeedService(services.TrainerServicer):
    """The gRPC service. Each connected sender has one call of :meth:`Feed`."""

    def __init__(self, server: FeedServer, job: str) -> None:
        self._server = server
        self._inbox = server.inbox
        self._job = job

    def Feed(  # noqa: N802  # the protocol's name
        self, request_iterator: Iterator[pb.FeedRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.FeedReply]:
        """Receive the batches of one replica."""
        replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()

        def gone() -> None:
            replies.put(None)
            self._inbox.wake()

        def is_gone() -> bool:
            return not context.is_active()

        if not context.add_callback(gone):
            return
        hello = self._hello(request_iterator, context)
        callbacks = SenderCallbacks(
            taken=lambda seq: replies.put(pb.FeedReply(taken=pb.FeedTaken(seq=seq))),
            stopped=lambda reason: replies.put(_stop(reason)),
            replaced=lambda: replies.put((grpc.StatusCode.CANCELLED, "connected again")),
        )
        try:
            position = self._inbox.connect(
                hello.replica_index, hello.replica_size, hello.sender, callbacks, gone=is_gone
            )
        except Stopped as stopped:
            # The end is sent only after the generation has begun. Otherwise an attempt that never began would appear to
            # be finished.
            generation, rank, world_size = self._current_run(context)
            yield pb.FeedReply(welcome=pb.FeedWelcome(generation=generation, rank=rank, world_size=world_size))
            yield _stop(str(stopped))
            return
        except ReplicaInUseError as error:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, str(error))
        except ConfigError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        if position is not None:
            yield from self._replies(request_iterator, context, hello, position, callbacks, replies)

    def _replies(
        self,
        requests: Iterator[pb.FeedRequest],
        context: grpc.ServicerContext,
        hello: pb.FeedHello,
        position: Position,
        callbacks: SenderCallbacks,
        replies: "queue.SimpleQueue[_Reply]",
    ) -> Iterator[pb.FeedReply]:
        """Welcome a connected sender, and yield replies until its stream ends."""
        index, name = hello.replica_index, f"data-compose replica {hello.replica_index}"
        try:
            generation, rank, world_size = self._current_run(context)
            _logger.info("%s of %d connected", name, hello.replica_size)
            yield pb.FeedReply(
                welcome=pb.FeedWelcome(
                    generation=generation, rank=rank, world_size=world_size,
                    skip=position.received, buffer=position.buffer, queued=position.queued,
                    digest=position.record.digest, last_digest=position.record.last,
                    position_before=position.record.position_before, transform=self._inbox.transform,
                )
            )  # fmt: skip
            reading = (requests, hello, rank, world_size, replies)
            threading.Thread(target=self._receive, args=reading, name="persia-feed-in", daemon=True).start()
            while isinstance(reply := replies.get(), pb.FeedReply):
                yield reply
                if reply.WhichOneof("part") == "stop":
                    return
            if reply is not None:
                context.abort(*reply)
        finally:
            if self._inbox.disconnect(index, callbacks):
                _logger.warning("%s: connection lost before the end of its data; waiting for it to reconnect", name)

    def _current_run(self, context: grpc.ServicerContext) -> tuple[int, int, int]:
        """Return generation, rank and world size. If the generation has not begun, make the sender retry."""
        run = self._server.run
        if run is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the run has not begun")
        return run

    def _hello(self, requests: Iterator[pb.FeedRequest], context: grpc.ServicerContext) -> pb.FeedHello:
        """Return the first message; refuse a sender of another job, protocol or version."""
        first = next(requests, None)
        if first is None or first.WhichOneof("part") != "hello":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        hello: pb.FeedHello = first.hello
        wrong = [
            f"{what} {theirs!r} (the trainer has {ours!r})"
            for what, theirs, ours in (
                ("job", hello.job, self._job),
                ("protocol", hello.protocol, PROTOCOL),
                ("version", hello.version, __version__),
            )
            if theirs != ours
        ]
        if wrong:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"data-compose replica {hello.replica_index}: {', '.join(wrong)}"
            )
        if not 1 <= hello.replica_size <= MAX_REPLICAS:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"REPLICA_SIZE is {hello.replica_size}; it must be from 1 to {MAX_REPLICAS}",
            )
        return hello

    def _receive(
        self,
        requests: Iterator[pb.FeedRequest],
        hello: pb.FeedHello,
        rank: int,
        world_size: int,
        replies: "queue.SimpleQueue[_Reply]",
    ) -> None:
        """Fill the inbox until the replica ends.

        This runs in a separate thread, while the thread of the handler sends replies.
        """
        index, sender = hello.replica_index, hello.sender
        try:
            for request in requests:
                if request.WhichOneof("part") == "batch":
                    seq = request.batch.seq
                    number, owner = divmod(seq, world_size)
                    if owner != rank:
                        raise DataError(f"batch {seq} of data-compose replica {index} belongs to rank {owner}")
                    try:
                        batch = Batch.from_bytes(request.batch.data)
                    except DataError as error:
                        replies.put((grpc.StatusCode.DATA_LOSS, f"batch {seq} arrived damaged: {error}"))
                        return
                    data, position = request.batch.data, request.batch.position
                    self._inbox.put(index, sender, seq, number, batch, data, position)
                elif request.WhichOneof("part") == "end":
                    text, total = request.end.error, request.end.batches
                    failed = DataError(f"data-compose replica {index}: its script failed: {text}") if text else None
                    self._inbox.end(index, sender, len(range(rank, total, world_size)), failed)
                    break
                else:
                    raise DataError(f"data-compose replica {index} sent an empty message, or a second hello")
        except DataError as error:
            replies.put((grpc.StatusCode.INVALID_ARGUMENT, str(error)))
        except grpc.RpcError:
            replies.put(None)  # the connection is closed
        else:
            replies.put(None)


def _stop(reason: str) -> pb.FeedReply:
    return pb.FeedReply(stop=pb.FeedStop(reason=reason))


def serve(job: str, *, host: str) -> FeedServer:
    """Listen for the batches of data-compose, on a free port.

    The server starts before the rank is announced, because the announcement contains its address. Senders wait until
    :meth:`FeedServer.welcome` has set the generation and the rank's data loader asks for its first batch.

    Args:
        job: The job's name. Senders of another job are refused.
        host: The host at which data-compose reaches this process. Without ``PERSIA_TOKEN_FILE`` the server listens on
            loopback only.

    Raises:
        AuthError: The token file cannot be read.
        ConfigError: A certificate file cannot be read.
        UnreachableError: No port can be opened.
    """
    return FeedServer(job, host=host)
