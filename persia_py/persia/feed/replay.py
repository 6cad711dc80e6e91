"""Checks whether a restarted data script sends the same batches, by digests of the batches in their order.

A digest is a CRC over the checksums at the end of encoded batches: 0 before the first batch, None if unknown.
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
_KEPT = 3
"""The number of digests that are kept for a replica. Replicas take turns, so none is more than two batches ahead of a
round."""


def extend(digest: Digest, encoded: bytes) -> Digest:
    """Return the digest after one more encoded batch."""
    return None if digest is None else zlib.crc32(encoded[-_CHECKSUM_BYTES:], digest)


class ReplayCheck:
    """Compares the batches that are skipped for a rank with those that the rank has received from the same replica.

    Args:
        index: The data-compose replica.
        rank: The rank.
        batches: The number of batches that the rank received.
        digest: The digest of these batches; None if it is unknown, in which case nothing is compared.
    """

    def __init__(self, index: int, rank: int, batches: int, digest: Digest) -> None:
        self.batches = batches
        self._index = index
        self._rank = rank
        self._expected = digest
        self._found: Digest = 0
        self._left = batches

    def skip(self, batch: Batch) -> None:
        """Add the next skipped batch to the digest. After the last one, warn if the digests differ."""
        if self._expected is None:
            return
        self._found = extend(self._found, batch.to_bytes())
        self._left -= 1
        if self._left == 0 and self._found != self._expected:
            _logger.warning(
                "data-compose replica %d: the skipped batches (%d) differ from those that rank %d has received: some "
                "samples were trained on twice or not at all, so the run does not have exactly-once results; use a "
                "fixed seed and a fixed order in the script, or start a new run",
                self._index,
                self.batches,
                self._rank,
            )


class RoundDigests:
    """The digests of all replicas after the same number of batches, which a resumed run will skip.

    Args:
        number: The number of batches of each replica at the start.
        digests: The digests after these batches.
    """

    def __init__(self, number: int = 0, digests: list[Digest] | None = None) -> None:
        self._number = number
        self._digests = [
            deque([digest]) for digest in digests or []
        ]  # for each replica; the first is that after ``number`` batches

    def take(self, replica: int, digest: Digest, taken: list[int]) -> None:
        """Add a batch that was taken from the inbox.

        Args:
            replica: The replica of the batch.
            digest: The digest of the replica's batches up to this one.
            taken: The number of batches taken of each replica, including this one.
        """
        while len(self._digests) <= replica:
            self._digests.append(deque([0]))
        if len(self._digests[replica]) < _KEPT:  # after another replica has ended there is no further round
            self._digests[replica].append(digest)
        while self._number < batches_to_skip(taken):
            self._number += 1
            for kept in self._digests:
                kept.popleft()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: integers, strings and lists."""
        return {"version": __version__, "batches": self._number, "digests": [kept[0] for kept in self._digests]}


def batches_to_skip(taken: list[int]) -> int:
    """Return how many batches of each replica all ranks have taken for certain, given those that one rank has taken."""
    return max(0, min(taken, default=0) - 1)


def digests_after(batches: int, replicas: int, state: object) -> list[Digest]:
    """Return the digests of all replicas after this number of batches, from a result of :meth:`RoundDigests.state`.

    Args:
        batches: The number of batches of each replica.
        replicas: The number of replicas.
        state: The state in a checkpoint. It may have any type; an unsuitable one gives None for each digest.
    """
    if batches == 0:
        return [0] * replicas
    match state:
        case {"version": str(version), "batches": int(number), "digests": list(digests)}:
            same = (version, number, len(digests)) == (__version__, batches, replicas)
            if same and all(map(_is_digest, digests)):
                return list(digests)
    return [None] * replicas  # another version may encode batches differently


def _is_digest(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 1 << 32)
