"""Processes the items of an iterator in several threads, and yields the results in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    workers: int,
    *,
    section: Callable[[Item], object] | None = None,
) -> Generator[Result, None, None]:
    """Yield ``work(item)`` for each item, in the order of the items.

    With one worker, the iterating thread does the work. With several workers, separate threads do the work, up to
    ``workers`` items ahead; the iterating thread only reads the items. An error of the items or of the work is raised
    at its position, after all earlier results.

    Args:
        items: The items.
        work: Called with each item; with several workers, in any thread.
        workers: The number of threads.
        section: Returns the section of an item, such as its epoch. Work on a section begins in new threads, after all
            results of the previous section were yielded. None means that all items are one section.
    """
    if workers == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[Result]] = deque()
    read, threads, current = _Ends(items), None, None
    try:
        for item in read:
            key = None if section is None else section(item)
            if threads is None or key != current:
                yield from _results(waiting)
                if threads is not None:
                    threads.shutdown()
                threads, current = ThreadPoolExecutor(workers, "persia-worker"), key
            waiting.append(threads.submit(work, item))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        yield from _results(waiting)
        if read.error is not None:
            raise read.error
    finally:
        if threads is not None:
            threads.shutdown(cancel_futures=True)


def _results(waiting: "deque[Future[Result]]") -> Iterator[Result]:
    while waiting:
        yield waiting.popleft().result()


class _Ends(Iterable[Item]):
    """Items that end at the first error, which is kept.

    Attributes:
        error: The error that has ended the items, if any.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = items
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Item]:
        """Yield the items up to the error."""
        try:
            yield from self._items
        except Exception as error:
            self.error = error
