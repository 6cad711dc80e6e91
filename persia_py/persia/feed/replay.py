"""Checks whether a restarted data script sends the same batches in the same order, by comparing digests.

A digest is a CRC over the checksums at the end of encoded batches: 0 before the first batch, None if unknown. A
position is a string that the script passes to ``send_data`` with a batch. A restarted script can continue after that
batch.
"""

import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any

from persia import __version__
from persia.feed.protocol import sender_name
from persia.runtime.logging import get_logger
from persia_core.data import Batch

_logger = get_logger("feed")

Digest = int | None

_CHECKSUM_BYTES = 4
_KEPT = 3
"""The number of records that are kept for a replica. Batches of the replicas alternate, so no replica is more than two
batches ahead of a round."""

MAX_POSITION_BYTES = 1 << 16
"""The maximum size of a position."""


def extend(digest: Digest, encoded: bytes) -> Digest:
    """Return the digest after one more encoded batch."""
    return None if digest is None else zlib.crc32(encoded[-_CHECKSUM_BYTES:], digest)


@dataclass(frozen=True)
class Record:
    """The information that a rank has about the batches of a replica, up to a certain batch.

    Attributes:
        digest: The digest of these batches.
        position: The position of the script after the last of these batches; empty if it is unknown.
        last: The digest of the last of these batches alone; None if it is unknown or there is none.
        position_before: The position before the last batch.
    """

    digest: Digest = 0
    position: str = ""
    last: Digest = None
    position_before: str = ""

    def extended(self, encoded: bytes, position: str) -> "Record":
        """Return the record after one more encoded batch."""
        return Record(extend(self.digest, encoded), position, extend(0, encoded), self.position)


class ReplayCheck:
    """Compares the batches that are skipped for a rank with those that the rank has received from the same replica.

    Args:
        index: The data-compose replica.
        rank: The rank.
        batches: The number of batches that the rank received.
        record: The rank's record of these batches. Unknown values are not compared.

    Attributes:
        batches: The number of batches that the rank received.
        position_before: The position before the last of these batches; empty if it is unknown.
    """

    def __init__(self, index: int, rank: int, batches: int, record: Record) -> None:
        self.batches = batches
        self.position_before = "" if record.last is None else record.position_before
        self._index = index
        self._rank = rank
        self._last = record.last
        self._first = 0  # the first batch that is compared
        self._expected = record.digest
        self._found: Digest = 0

    def begin_at_last(self) -> None:
        """Compare the last batch only, because the script does not begin at its first batch."""
        self._first, self._expected = self.batches - 1, self._last

    def skip(self, number: int, batch: Batch) -> None:
        """Add skipped batch ``number`` of the rank to the digest. For the last batch, warn if the digests differ."""
        if self._expected is None or number < self._first:
            return
        self._found = extend(self._found, batch.to_bytes())
        if number + 1 == self.batches and self._found != self._expected:
            _logger.warning(
                "%s: the skipped batches (%d) differ from those that rank %d has received: some "
                "samples may be trained on twice or not at all; to avoid this, use a fixed seed and a fixed order in "
                "the script, and start a new run",
                sender_name(self._index),
                self.batches,
                self._rank,
            )


class RoundRecords:
    """The records of all replicas after the same number of batches, which a resumed run will skip.

    Args:
        number: The number of batches of each replica at the start.
        records: The records after these batches.
    """

    def __init__(self, number: int = 0, records: list[Record] | None = None) -> None:
        self._number = number
        self._records = [
            deque([record]) for record in records or []
        ]  # the records of each replica, from the one after ``number`` batches on

    def take(self, replica: int, record: Record, taken: list[int]) -> None:
        """Add a batch that was taken from the inbox.

        Args:
            replica: The replica of the batch.
            record: The record of the replica's batches up to this one.
            taken: The number of batches taken of each replica, including this one.
        """
        while len(self._records) <= replica:
            self._records.append(deque([Record()]))
        if len(self._records[replica]) < _KEPT:  # otherwise another replica has ended, and no round follows
            self._records[replica].append(record)
        while self._number < batches_to_skip(taken):
            self._number += 1
            for kept in self._records:
                kept.popleft()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: integers, strings and lists."""
        records = [kept[0] for kept in self._records]
        return {
            "version": __version__,
            "batches": self._number,
            "digests": [record.digest for record in records],
            "positions": [[record.position, record.last, record.position_before] for record in records],
        }


def batches_to_skip(taken: list[int]) -> int:
    """Return how many batches of each replica all ranks have certainly taken, given the numbers of one rank."""
    return max(0, min(taken, default=0) - 1)


def records_after(batches: int, replicas: int, state: object) -> list[Record]:
    """Return the records of all replicas after this number of batches, from a result of :meth:`RoundRecords.state`.

    Args:
        batches: The number of batches of each replica.
        replicas: The number of replicas.
        state: The state in a checkpoint. It may have any type; an unsuitable state gives records whose values are all
            unknown.
    """
    if batches == 0:
        return [Record()] * replicas
    match state:
        case {"version": str(version), "batches": int(number), "digests": list(digests)}:
            same = (version, number, len(digests)) == (__version__, batches, replicas)
            if same and all(map(_is_digest, digests)):
                return [Record(digest, *_positions(state, index)) for index, digest in enumerate(digests)]
    return [Record(None)] * replicas  # another version may encode batches differently


def _positions(state: object, index: int) -> tuple[str, Digest, str]:
    """Return the last three attributes of a replica's :class:`Record`; all are unknown if the checkpoint has none."""
    match state:
        case {"positions": list(positions)} if index < len(positions):
            match positions[index]:
                case [str(position), last, str(position_before)] if _is_digest(last):
                    return position, last, position_before
    return "", None, ""


def _is_digest(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 1 << 32)
