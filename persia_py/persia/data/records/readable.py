"""Converts texts to values of a type, where some texts may not be valid."""

import pyarrow as pa
import pyarrow.compute as pc


def read_texts(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, int]:
    """Convert texts to values of a type.

    Return the values, with null for invalid texts, and the number of invalid texts.

    Args:
        values: Texts; null stays null.
        kind: The type.
    """
    if pa.types.is_string(kind):
        return values, 0
    texts = pc.utf8_trim_whitespace(values)
    if is_readable(texts, kind):
        return texts.cast(kind), 0
    encoded = texts.dictionary_encode()
    places = range(len(encoded.dictionary))
    readable = pa.array([is_readable(encoded.dictionary.slice(place, 1), kind) for place in places], pa.bool_())
    kept = readable.take(encoded.indices)  # null for a null text, which stays null and does not count as wrong
    wrong = pc.sum(pc.invert(kept)).as_py() or 0
    return pc.if_else(kept, texts, pa.scalar(None, pa.string())).cast(kind), wrong


def is_readable(texts: pa.Array, kind: pa.DataType) -> bool:
    """Whether all texts are values of a type."""
    try:
        texts.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True
