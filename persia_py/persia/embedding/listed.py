"""Lists of names in messages, of bounded length."""

from collections.abc import Collection, Sequence

MOST = 10
"""The default number of names that a message lists."""


def listed(names: Collection[object], most: int = MOST, separator: str = ", ") -> str:
    """Return the first ``most`` names and the number of the other names, or ``none``.

    Parts of a sentence, which may have commas, need ``; `` as the ``separator``.
    """
    first = separator.join(str(name) for name, _ in zip(names, range(most), strict=False))
    end = "" if separator == ", " else separator.rstrip()
    more = f"{end} and {len(names) - most} more" if len(names) > most else ""
    return f"{first}{more}" or "none"


def listed_sizes(sizes: Sequence[tuple[str, int]], expected: int) -> str:
    """Return the batch sizes of parts; of many parts, only the first and those that differ from ``expected``."""
    wrong = [each for each in sizes[1:] if each[1] != expected or each[1] <= 0]
    return listed([f"{name}: {size}" for name, size in (sizes if len(sizes) <= MOST else [sizes[0], *wrong])])
