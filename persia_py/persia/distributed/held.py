"""Ranks that a debugger holds. While it holds a rank, the time limits of all ranks are paused."""

from collections.abc import Mapping

from persia.distributed.link import Link
from persia.runtime import clock


class Held:
    """Stops the clock of all ranks as long as a debugger holds one of them.

    Args:
        rank: This rank.
        links: A connection to each rank to which this rank is connected.
    """

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        self._rank, self._links = rank, links
        clock.observe(self._tell)

    def close(self) -> None:
        """Stop notifying the other ranks."""
        clock.unobserve(self._tell)

    def _tell(self, is_held: bool) -> None:
        """Notify the other ranks whether a debugger holds this rank."""
        for link in self._links.values():
            link.send({"held": [self._rank, is_held]})

    def note(self, of: int, is_held: bool) -> None:
        """Stop the clock for another rank, or let it run again. Rank 0 forwards the message."""
        if is_held:
            clock.stop(f"rank {of}", elsewhere=True)
        else:
            clock.go(f"rank {of}")
        for other, link in self._links.items():
            if self._rank == 0 and other != of:
                link.send({"held": [of, is_held]})
