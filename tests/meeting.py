"""Ranks that connect within one process: the fixtures ``pool`` and ``meet``, and helper functions."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

import pytest

from persia.distributed import control_plane, handshake

LONG = 20.0


def me(rank: int, world_size: int = 2, **changes: Any) -> handshake.Introduction:
    known: dict[str, Any] = {"version": "1", "host": "here", "pid": 100 + rank, "token": "secret", **changes}
    return handshake.Introduction(job=known.pop("job", "j"), rank=rank, world_size=world_size, **known)


Meet = Callable[[int], list[control_plane.Peers]]
P = ParamSpec("P")
T = TypeVar("T")


class Threads(Executor):
    """One thread for each call. Unlike with a ``ThreadPoolExecutor``, the process can end while a thread hangs."""

    def __init__(self) -> None:
        self._started: list[threading.Thread] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._started.append(threading.Thread(target=run, name=getattr(fn, "__qualname__", "call"), daemon=True))
        self._started[-1].start()
        return future

    def finish(self) -> None:
        """Check that every call has ended."""
        for thread in self._started:
            thread.join(LONG)
            assert not thread.is_alive(), f"{thread.name} still waits"


@pytest.fixture
def pool() -> Iterator[Executor]:
    threads = Threads()
    yield threads
    threads.finish()


@pytest.fixture
def meet(pool: Executor) -> Iterator[Meet]:
    """Return a function that connects ranks, which end with the test."""
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


def all_gather(pool: Executor, ranks: list[control_plane.Peers], topic: str) -> list[Future[list[Any]]]:
    return [pool.submit(each.all_gather, topic, each.rank * 10) for each in ranks]
