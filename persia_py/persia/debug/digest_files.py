"""Compares the digests of two runs, or of two ranks."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from persia.runtime.errors import DataError, StorageError, UsageError

_COLUMNS = ["step", "name", "md5", "norm"]
_SHARED = ("parameter/", "gradient/")
_SHOWN = 8
"""The maximum number of files that a message lists."""
_PREVIOUS = "-previous"

Line = tuple[str, str]
Digests = dict[tuple[int, str], Line]


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs.

    Attributes:
        rank: The rank, or the two ranks that were compared.
        step: The step of the difference.
        name: The name of the tensor.
        a: MD5 and norm in the first file; None if the file lacks the tensor.
        b: MD5 and norm in the second file; None if the file lacks the tensor.
    """

    rank: str
    step: int
    name: str
    a: Line | None
    b: Line | None

    def __str__(self) -> str:
        """Return the message."""
        texts = ["not recorded" if each is None else f"md5 {each[0]} norm {each[1]}" for each in (self.a, self.b)]
        return f"{self.rank}, step {self.step}: {self.name} differs\n  A: {texts[0]}\n  B: {texts[1]}"


@dataclass(frozen=True)
class Compared:
    """The result of a comparison.

    Attributes:
        first: The first difference over the steps of all ranks; None if all digests are equal.
        tensors: The number of digests that were compared.
        ranks: The ranks that were compared.
        shared_only: Whether two different ranks were compared; in that case only tensors that must be equal on all
            ranks are compared.
        unmatched: The number of steps that were not compared, because only one of the two has them. If several ranks
            were compared, this is the largest number of a rank.
    """

    first: Difference | None
    tensors: int
    ranks: list[str]
    shared_only: bool
    unmatched: int


def diff(a: Path, b: Path) -> Compared:
    """Compare two folders of digests rank by rank, or two files.

    Raises:
        DataError: A file is not a file of digests.
        StorageError: A file cannot be read.
        UsageError: A path does not exist, or the two have no digest in common.
    """
    pairs = _pairs(a, b)
    firsts: list[Difference] = []
    count, unmatched, shared_only = 0, 0, False
    for rank, one, other in pairs:
        different_ranks = _rank(one).removesuffix(_PREVIOUS) != _rank(other).removesuffix(_PREVIOUS)
        shared_only |= different_ranks
        left, right = (_read(path, shared_only=different_ranks) for path in (one, other))
        common = left.keys() & right.keys()
        if not common:
            shared, why = "no tensor", ""
            if different_ranks:
                shared, why = "no parameter and no gradient", "; for two different ranks, only these are compared"
            raise UsageError(f"{one} and {other} have {shared} of the same step in common{why}")
        count += len(common)
        steps = {step for step, _ in left} & {step for step, _ in right}
        unmatched = max(unmatched, len({step for step, _ in left} ^ {step for step, _ in right}))
        order = [*left, *(key for key in right if key not in left)]
        places = {key: place for place, key in enumerate(order)}
        differing = [key for key in order if key[0] in steps and left.get(key) != right.get(key)]
        if differing:
            step, name = min(differing, key=lambda key: (key[0], places[key]))
            firsts.append(Difference(rank, step, name, left.get((step, name)), right.get((step, name))))
    first = min(firsts, key=lambda found: found.step) if firsts else None
    return Compared(first, count, [rank for rank, _, _ in pairs], shared_only, unmatched)


def _pairs(a: Path, b: Path) -> list[tuple[str, Path, Path]]:
    for path in (a, b):
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
    if a.is_file() and b.is_file():
        one, other = _rank(a), _rank(b)
        return [(f"rank {one}" if one == other else f"rank {one} and rank {other}", a, b)]
    if a.is_file() or b.is_file():
        raise UsageError(f"{a} and {b}: expected two folders of digests, or two files")
    names = [{path.name for path in folder.glob("rank-*.csv") if _rank(path).isdecimal()} for folder in (a, b)]
    if not names[0] & names[1]:
        raise UsageError(f"{a} and {b} have no file rank-R.csv in common; PERSIA_DIGEST=N writes such files")
    if names[0] != names[1]:
        only = sorted(names[0] ^ names[1])
        listed = ", ".join(only[:_SHOWN]) + (f" and {len(only) - _SHOWN} more" if len(only) > _SHOWN else "")
        raise UsageError(
            f"{a} and {b} are of runs with different numbers of ranks, or lack a file: only one of them has {listed}"
        )
    return [
        (f"rank {rank}", a / name, b / name)
        for rank, name in sorted((int(_rank(Path(name))), name) for name in names[0])
    ]


def _rank(path: Path) -> str:
    found = re.fullmatch(rf"rank-(\d+)({_PREVIOUS})?\.csv", path.name)
    return path.name if found is None else f"{found[1]}{found[2] or ''}"


def _read(path: Path, *, shared_only: bool) -> Digests:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return _parse(path, csv.reader(file), shared_only=shared_only)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a file of digests: {error}") from error


def _parse(path: Path, lines: Iterator[list[str]], *, shared_only: bool) -> Digests:
    if next(lines, None) != _COLUMNS:
        raise DataError(f"{path}: expected the first line {','.join(_COLUMNS)}, as PERSIA_DIGEST writes it")
    found: Digests = {}
    for number, line in enumerate(lines, 2):
        if len(line) != len(_COLUMNS) or not line[0].isdecimal():
            raise DataError(f"{path}:{number}: expected {','.join(_COLUMNS)}, found {','.join(line)}")
        step, name, md5, norm = line
        if not shared_only or name.startswith(_SHARED):
            found[int(step), name] = (md5, norm)
    return found
