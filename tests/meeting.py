"""Ranks that connect within one process: the fixtures ``pool`` and ``meet``, and what they exchange."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from persia.distributed import control_plane, handshake

LONG = 20.0


def me(rank: int, world_size: int = 2, **changes: Any) -> handshake.Introduction:
    known: dict[str, Any] = {"version": "1", "host": "here", "pid": 100 + rank, "token": "secret", **changes}
    return handshake.Introduction(job=known.pop("job", "j"), rank=rank, world_size=world_size, **known)


Meet = Callable[[int], list[control_plane.Peers]]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def meet(pool: ThreadPoolExecutor) -> Iterator[Meet]:
    """Connect ranks, which end with the test."""
    made: list[control_plane.Peers] = []
    listeners: list[socket.socket] = []

    def together(count: int) -> list[control_plane.Peers]:
        listener = handshake.listen("127.0.0.1")
        listeners.append(listener)
        first = pool.submit(handshake.host, listener, me(0, count), LONG)
        address = ("127.0.0.1", listener.getsockname()[1])
        others = [pool.submit(handshake.join, address, me(rank, count), LONG) for rank in range(1, count)]
        made.extend(future.result(LONG) for future in (first, *others))
        return made

    yield together
    for each in made:
        each.leave(None)
    for listener in listeners:
        listener.close()


def all_gather(pool: ThreadPoolExecutor, ranks: list[control_plane.Peers], topic: str) -> list[Future[list[Any]]]:
    return [pool.submit(each.all_gather, topic, each.rank * 10) for each in ranks]
