"""Ranks and senders of the feed over real sockets, without training."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.feed import server as feed_server
from persia.feed.sender import Sender
from persia.feed.server import FeedServer
from persia_core.data import Batch

JOB = "feed-test"


def batch(number: int) -> Batch:
    """A batch that carries its number."""
    ids = np.array([number], np.uint64)
    labels = [Label(np.zeros(1, np.float32))]
    return PersiaBatch([IDTypeFeatureWithSingleID("a", ids)], labels=labels, meta=str(number).encode()).data


def many(number: int) -> Batch:
    """A batch of many ids, some of them twice, in several features."""
    drawn = np.random.default_rng(number).integers(0, 300, (3, 400), dtype=np.uint64)
    features = [IDTypeFeatureWithSingleID(name, ids) for name, ids in zip("abc", drawn, strict=True)]
    return PersiaBatch(features, labels=[Label(np.zeros(400, np.float32))]).data


def number(batch: Batch) -> int:
    """Return the number of a batch that was taken."""
    assert batch.meta is not None
    return int(batch.meta)


class Ranks:
    """Trainer ranks of one run, without training."""

    def __init__(self, count: int, *, generation: int = 1, buffer: int = 3, job: str = JOB) -> None:
        self.count, self.buffer = count, buffer
        self.servers: list[FeedServer] = []
        self.stop = threading.Event()
        self.begin(generation, job)

    def begin(self, generation: int, job: str = JOB) -> None:
        """Start a new run. The ranks of the previous run have ended without a message."""
        self.kill()
        self.servers = [feed_server.serve(job, host="127.0.0.1") for _ in range(self.count)]
        for rank, server in enumerate(self.servers):
            server.welcome(generation, rank, self.count)
            server.inbox.open(self.buffer)

    def kill(self) -> None:
        for server in self.servers:
            server.close(RuntimeError("killed"))

    def find(self) -> list[dict[str, Any]]:
        """The response of discovery."""
        return [
            {"index": str(rank), "replicas": str(self.count), "address": server.address, "started": "1"}
            for rank, server in enumerate(self.servers)
        ]

    def take(self, rank: int = 0) -> int | None:
        item = self.servers[rank].inbox.take(self.stop)
        return None if item is None else number(item[1])

    def rest(self, rank: int = 0) -> list[int]:
        return list(iter(lambda: self.take(rank), None))


MakeRanks = Callable[..., Ranks]


@contextmanager
def new_ranks() -> Iterator[MakeRanks]:
    """Return a function that creates ranks, which end with the test."""
    with ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Ranks:
            made = Ranks(*args, **kwargs)
            stack.callback(made.kill)
            return made

        yield make


def connect(ranks: Ranks, index: int = 0, size: int = 1, *, job: str = JOB, start_timeout: float = 20.0) -> Sender:
    return Sender(job, index, size, find=ranks.find, start_timeout=start_timeout)


@contextmanager
def sending(
    ranks: Ranks, count: int, index: int = 0, size: int = 1, *, first: int = 0, changed: int | None = None
) -> Iterator[tuple[threading.Thread, list[BaseException], list[int]]]:
    """A replica that sends ``count`` batches from a thread, and records the batches sent and an early end.

    The content of the batch ``changed`` differs from the usual one.
    """
    ended: list[BaseException] = []
    sent: list[int] = []

    def run() -> None:
        sender = None
        try:
            sender = connect(ranks, index, size)
            for each in range(count):
                sender.send(batch(first + each if each != changed else 10_000))
                sent.append(first + each)
            sender.end()
        except BaseException as error:
            ended.append(error)
        finally:
            if sender is not None:
                sender.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread, ended, sent
    finally:
        for server in ranks.servers:
            server.stop("the test is over")
        thread.join(20)
        assert not thread.is_alive()
