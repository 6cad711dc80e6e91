"""Reads ids from an encoded batch, to name them in an error.

The layout is that of ``rust_core/engine/src/batch/codec.rs``.
"""

import struct

import numpy as np

_HEAD = struct.Struct("<4sHHIIIII")
"""The header: magic, version, flags, and the numbers of samples, id features, dense inputs, labels and metadata
bytes."""
_LISTS, _WEIGHTED = 1, 2


def sample_ids(encoded: bytes, slot: str, sample: int) -> list[int]:
    """Return the ids of one sample of a slot, in order; empty if the batch has no such slot.

    Args:
        encoded: The result of :meth:`persia.embedding.data.PersiaBatch.to_bytes`.
        slot: The name of the slot.
        sample: The index of the sample, from 0.
    """
    magic, _, _, samples, features, _, _, meta = _HEAD.unpack_from(encoded)
    if magic != b"PBAT":
        raise ValueError(f"expected the result of PersiaBatch.to_bytes, found bytes that begin with {magic!r}")
    at = _HEAD.size + meta
    for _ in range(features):
        (length,) = struct.unpack_from("<H", encoded, at)
        name = encoded[at + 2 : at + 2 + length].decode()
        kind, unique, occurrences = struct.unpack_from("<BII", encoded, at + 2 + length)
        ids_at = at + 2 + length + 9
        inverse_at = ids_at + 8 * unique
        offsets_at = inverse_at + 4 * occurrences
        if name == slot:
            ids = np.frombuffer(encoded, "<u8", unique, ids_at)
            inverse = np.frombuffer(encoded, "<u4", occurrences, inverse_at)
            first, last = sample, sample + 1
            if kind & _LISTS:
                first, last = np.frombuffer(encoded, "<u4", samples + 1, offsets_at)[sample : sample + 2]
            return [int(each) for each in ids[inverse[first:last]]]
        at = offsets_at + 4 * (samples + 1) * bool(kind & _LISTS) + 4 * occurrences * bool(kind & _WEIGHTED)
    return []
