"""Whether a data script that starts again sends what it sent before: digests of batches, in the order they come in.

A digest is a CRC over the checksums that encoded batches end with: 0 before the first, None where it is not known.
"""

import zlib
from collections import deque
from typing import Any

from persia import __version__
from persia.runtime.logging import get_logger
from persia_core.data import Batch

_logger = get_logger("feed")

Digest = int | None

_CHECKSUM_BYTES = 4
_AHEAD = 3
"""Digests of a replica that are kept: replicas take turns, so that none is more than two batches ahead of a round."""


def follow(digest: Digest, encoded: bytes) -> Digest:
    """Return the digest behind one more encoded batch."""
    return None if digest is None else zlib.crc32(encoded[-_CHECKSUM_BYTES:], digest)


class Replay:
    """Compares the batches that are not sent to a rank again with those it has had.

    Args:
        index: The replica.
        rank: The rank.
        batches: How many of the replica's batches it has had.
        digest: Their digest; None if it is not known, and nothing is compared.
    """

    def __init__(self, index: int, rank: int, batches: int, digest: Digest) -> None:
        self.batches = batches
        self._index = index
        self._rank = rank
        self._expected = digest
        self._found: Digest = 0
        self._left = batches

    def leave_out(self, batch: Batch) -> None:
        """Look at the next of these batches; behind the last one, warn if they are others."""
        if self._expected is None:
            return
        self._found = follow(self._found, batch.to_bytes())
        self._left -= 1
        if self._left == 0 and self._found != self._expected:
            _logger.warning(
                "data-compose replica %d: the %d batches that rank %d has had already, and that are not sent again, "
                "are others than those it had: samples of these batches were trained on twice or not at all, and "
                "exactly-once does not hold for them; give the script a fixed seed and a fixed order, or begin a new "
                "run",
                self._index,
                self.batches,
                self._rank,
            )


class Rounds:
    """The digests of the replicas behind the same number of batches, as a resumed run will skip them.

    Args:
        number: Batches of each replica, to begin with.
        digests: Their digests.
    """

    def __init__(self, number: int = 0, digests: list[Digest] | None = None) -> None:
        self._number = number
        self._lines = [deque([digest]) for digest in digests or []]  # the first behind ``number`` batches

    def take(self, replica: int, digest: Digest, taken: list[int]) -> None:
        """Note the digest behind a batch that was taken.

        Args:
            replica: The batch's replica.
            digest: Of this replica's batches up to this one.
            taken: How many batches of each replica were taken, with this one.
        """
        while len(self._lines) <= replica:
            self._lines.append(deque([0]))
        if len(self._lines[replica]) < _AHEAD:  # behind the end of another replica there is no further round
            self._lines[replica].append(digest)
        while self._number < to_skip(taken):
            self._number += 1
            for line in self._lines:
                line.popleft()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: numbers, strings and lists."""
        return {"version": __version__, "batches": self._number, "digests": [line[0] for line in self._lines]}


def to_skip(taken: list[int]) -> int:
    """Return how many batches of each replica every rank is sure to have had, where one has had these."""
    return max(0, min(taken, default=0) - 1)


def digests_behind(batches: int, replicas: int, state: object) -> list[Digest]:
    """Return the replicas' digests behind so many batches of each, as :meth:`Rounds.state` has them, if it does.

    Args:
        batches: Of each replica.
        replicas: How many there are.
        state: From a checkpoint, so that it may be anything.
    """
    if batches == 0:
        return [0] * replicas
    match state:
        case {"version": str(version), "batches": int(number), "digests": list(digests)}:
            same = (version, number, len(digests)) == (__version__, batches, replicas)
            if same and all(map(_is_digest, digests)):
                return list(digests)
    return [None] * replicas  # another version may encode batches in another way


def _is_digest(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 1 << 32)
