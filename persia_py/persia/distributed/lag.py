"""Determines for which rank the other ranks wait, from the reported position of each rank."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persia.distributed.link import Link
from persia.runtime import clock, flight

Position = dict[str, Any]
"""The result of :func:`persia.runtime.flight.position`."""


@dataclass(frozen=True)
class Known:
    """The last known position of a rank.

    Attributes:
        position: The last position that the rank has sent; None if it has sent none.
        age_s: Seconds since it was sent.
        answers: Whether the rank counts as alive: it has sent its position on request, or a recent heartbeat.
    """

    position: Position | None
    age_s: float
    answers: bool


LIVES_S = 8.0
"""A rank counts as alive if its last heartbeat is not older than this. A rank sends a heartbeat every 2 s."""


class Positions:
    """The reported positions of the other ranks.

    Args:
        rank: This rank.
        links: A connection to each rank to which this rank is connected.

    Attributes:
        answered: The ranks that have reported their positions since a rank hung.
        verdict: The report of rank 0 on which rank lags; empty until it arrives.
    """

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        self._rank, self._links = rank, links
        self._said: dict[int, tuple[float, Position]] = {}
        self.answered: set[int] = set()
        self.verdict = ""

    def note(self, rank: int, position: object, *, answers: bool = False) -> None:
        """Record the position of a rank, if the message has one; ``answers`` means that the position was requested."""
        if isinstance(position, dict):
            self._said[rank] = (time.monotonic(), position)
        if answers:
            self.answered.add(rank)

    def report(self, *, answered: bool = False) -> str:
        """Return a report on which ranks lag, and where each rank is.

        Args:
            answered: Whether only a rank that has responded counts as alive.
        """
        return report(self._known(answered=answered))

    def late(self) -> str:
        """Return the report on the ranks if another rank lags, or if this is rank 0 and all ranks wait."""
        known = self._known(answered=False)
        stuck = self._rank == 0 and all(map(_is_waiting, known.values()))  # for example, because the network has failed
        return report(known) if self._others_lag(known) or stuck else ""

    def waited_s(self, seconds: float) -> float:
        """Return how many of the last ``seconds`` this rank waited for other ranks; 0 while all ranks compute."""
        known = self._known(answered=False)
        mine = known[self._rank].position
        if mine is not None and _waits(mine):
            return min(seconds, float(mine["seconds"]))
        return seconds if self._others_lag(known) else 0.0

    def _others_lag(self, known: Mapping[int, Known]) -> bool:
        return any(rank != self._rank for rank in lagging(known))

    def of(self, ranks: list[int]) -> str:
        """Return the positions of some ranks, as the end of a message about waiting for them."""
        known = self._known(answered=False)
        return "".join(f"; {described(rank, known[rank])}" for rank in ranks if known[rank].position is not None)

    def last_of(self, rank: int) -> str:
        """Return the last position of a rank that has ended, as the end of a message."""
        if rank not in self._said:
            return ""
        said_at, position = self._said[rank]
        return f"; {time.monotonic() - said_at:.0f} s ago it was {doing(position, 0.0)}"

    def _known(self, *, answered: bool) -> dict[int, Known]:
        now = time.monotonic()
        found = {self._rank: Known(flight.position(), 0.0, answers=True)}
        for rank, link in self._links.items():
            silent = clock.now() - link.heard
            said_at, position = self._said.get(rank, (now - silent, None))
            lives = rank in self.answered if answered else silent < LIVES_S
            found[rank] = Known(position, now - said_at, answers=lives)
        return dict(sorted(found.items()))


def lagging(known: Mapping[int, Known]) -> list[int]:
    """Return the ranks for which the other ranks wait; none if all are at the same place.

    The lagging ranks are those that do not respond. If all ranks respond, the lagging ranks have begun the fewest calls
    in which ranks wait for each other. If all counts are equal, the lagging ranks are those that are in no such call.
    """
    if silent := [rank for rank, each in known.items() if not each.answers]:
        return silent
    places = {rank: each.position for rank, each in known.items() if each.position is not None}
    least = min((place["together"] for place in places.values()), default=0)
    behind = [rank for rank, place in places.items() if place["together"] == least]
    if len(behind) == len(places):
        behind = [rank for rank in behind if not _waits(places[rank])]
    return [] if len(behind) == len(known) > 1 else behind


def report(known: Mapping[int, Known]) -> str:
    """Return a report on which ranks lag, with one line on the position of each rank."""
    late = lagging(known)
    lines = [f"lagging: {described(rank, known[rank])}" for rank in late]
    rest = [rank for rank in known if rank not in late]
    if not late and len(known) > 1:
        together = all(map(_is_waiting, known.values()))
        same = "are in the same collective: check the network between them" if together else "have made equal progress"
        lines.append(f"lagging: no rank; all {same}")
    return "\n".join([*lines, *(f"{'waiting' if late else 'at'}: {described(rank, known[rank])}" for rank in rest)])


def described(rank: int, known: Known) -> str:
    """Return the position of a rank, as part of a message."""
    place = known.position
    if place is None:
        return f"rank {rank}: no heartbeat yet"
    name = f"rank {rank} (pid {place['pid']} on {place['host']})"
    if known.answers:
        return f"{name}: {doing(place, known.age_s)}"
    since = f"its last heartbeat, {known.age_s:.0f} s ago: {doing(place, 0.0)}"
    return f"{name}: does not respond: it is stopped, frozen, or without a network; {since}"


def doing(place: Position, age_s: float) -> str:
    """Return what a rank is doing, and for how long."""
    seconds = f"for {place['seconds'] + age_s:.0f} s"
    if place["call"] is None:
        return f"after step {place['step']}, before its first call, {seconds}"
    verb, step, detail = place["call"]
    what = f"{verb}{f' {detail!r}' if detail else ''} " + (
        f"of step {step}" if step is not None else f"after step {place['step']}"
    )
    if place["open"]:
        return f"in {what} {seconds}"
    return f"in the code of its script, after {what}, {seconds}"


def _waits(place: Position) -> bool:
    return bool(place["open"]) and place["call"][0] in flight.TOGETHER


def _is_waiting(known: Known) -> bool:
    return known.position is not None and _waits(known.position)
