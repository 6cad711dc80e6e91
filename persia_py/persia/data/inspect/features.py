"""The features that are proposed for the columns, with reasons."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia.data.inspect.columns import EPOCHS, Column, numbers_of, snake, times_in
from persia.data.inspect.labels import Label
from persia.data.inspect.roles import Roles
from persia.data.inspect.scan import Table
from persia.data.inspect.signal import LEAK, alone
from persia.data.inspect.sketches import is_list, is_text

DIM = 16
"""The dimension of every feature. A single dimension lets a DLRM compute dot products of them."""
FEW = 256
"""The maximum number of distinct integers that are treated as codes, such as codes of occupations."""
ORDERED = 10
"""From this number of distinct codes on, their order is used too, because they may be amounts."""
MANY = 1_000_000
"""If a column has more ids than this, only ids that occur in at least two batches get rows."""
INTERVALS = 64
"""The number of intervals into which numbers are divided."""
NEAR_UNIQUE = 0.95
"""The number of distinct values per row above which a column identifies the row."""
DAY = 86_400.0

_ID_NAME = re.compile(r"(^|_)(ids?|uid|uuid|guid|key|code|zip|zipcode|sku|hash|num|nr|no)$")
_PEOPLE = re.compile(r"^(user|item|product|movie|film|book|song|artist|ad|advertiser|campaign|site|page|device|shop)$")
_INDEX_NAME = re.compile(r"^(index|idx|unnamed(_[0-9]+)?|row|rowid|row_id|row_number|id|level_[0-9]+|)$")


@dataclass
class Feature:
    """A feature of a proposal.

    Attributes:
        name: The name of the feature.
        keys: Its keys in ``features``.
        reason: The reason for the proposal.
    """

    name: str
    keys: dict[str, Any]
    reason: str


@dataclass
class LeftOut:
    """A column that does not become a feature.

    Attributes:
        column: The name of the column.
        reason: The reason.
        features: How to add it anyway.
        warning: Whether to warn the user about the column.
    """

    column: str
    reason: str
    features: list[Feature]
    warning: bool = False


def propose(table: Table, label: Label, roles: Roles) -> tuple[list[Feature], list[LeftOut], dict[str, float]]:
    """Return the features, the excluded columns, and the AUC of each column that was scored alone."""
    features: list[Feature] = []
    left_out: list[LeftOut] = []
    scores: dict[str, float] = {}
    names = _Names()
    for column in table.columns.values():
        if column.name == label.column:
            continue
        reason = _useless(column, roles)
        if reason is not None:
            left_out.append(LeftOut(column.name, reason, []))
            continue
        made = list(_features(column, names, roles))
        score = alone(column, label.positive)
        if score is not None:
            scores[column.name] = score
        reason = _unwanted(column, roles, score)
        if reason is not None:
            suspect = score is not None and score > LEAK
            left_out.append(LeftOut(column.name, reason, made, suspect))
        elif not made:
            left_out.append(LeftOut(column.name, _unusable(column), []))
        else:
            features += made
    _share_tables(features, table)
    return features, left_out, scores


class _Names:
    """Creates unique names of features, in printable ASCII."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def new(self, wanted: str) -> str:
        name = re.sub(r"[^\x20-\x7e]", "_", wanted).strip()[:60] or "column"
        number = 2
        chosen = name
        while chosen in self._used:
            chosen, number = f"{name}_{number}", number + 1
        self._used.add(chosen)
        return chosen


def _useless(column: Column, roles: Roles) -> str | None:
    """Return the reason why a column cannot be a feature."""
    if column.nulls + column.not_finite == column.rows or not column.distinct:
        return "no row has a value"
    if not column.many and column.exact and column.distinct == 1 and column.missing == 0:
        return f"every row is {column.top[0][0]}"
    if column.name == roles.weight:
        return "by its name it is the weight of a row, which belongs in train.weight"
    return None


def _unusable(column: Column) -> str:
    """Return the reason why a column with values gives no feature."""
    if column.span is not None:
        return "its times cover less than 14 days and at most two hours of the day, so no part of them recurs"
    return f"a column of {column.stored} cannot be a feature"


def _unwanted(column: Column, roles: Roles, score: float | None) -> str | None:
    """Return the reason why a column should not be a feature."""
    if score is not None and score > LEAK:
        return f"alone it predicts the label with AUC {score:.3f}: it is probably known only after the label"
    if column.rows < 20 or column.many or column.kind in ("time", "other", "boolean") or column.span is not None:
        return None
    if column.step is not None and column.unique > NEAR_UNIQUE:
        return f"it counts the rows: consecutive values differ by {abs(column.step)}"
    if column.name == roles.group and roles.transient:
        return "its values do not recur, like those of sessions, so the model knows none of the values of new rows"
    if column.kind in ("text", "integer") and column.unique > NEAR_UNIQUE:
        if column.kind == "text" and _words(column) >= 4:
            return f"free text: {column.distinct:,} different strings of {_words(column):.0f} words"
        named = _INDEX_NAME.match(snake(column.name)) or _ID_NAME.search(snake(column.name))
        if column.kind == "text" or named:
            return (
                f"nearly every row has a different value ({_count(column)} of {column.rows:,}), so a vector is learnt "
                "from one row and does not help with others"
            )
    if column.kind == "text" and _words(column) >= 6 and column.unique > 0.3:
        return f"free text: {_count(column)} different strings of {_words(column):.0f} words"
    return None


def _words(column: Column) -> float:
    texts = column.values.drop_null()[:1000]
    return float(pc.mean(pc.add(pc.count_substring(texts, " "), 1)).as_py() or 0)


def _count(column: Column) -> str:
    return f"{column.distinct:,}" if column.exact else f"about {column.distinct:,}"


def _different(column: Column) -> str:
    return "all equal" if column.distinct == 1 else f"{_count(column)} different ones"


def _features(column: Column, names: _Names, roles: Roles) -> Iterator[Feature]:
    """Yield the features of a column."""
    if column.many:
        yield _bag(column, names)
    elif column.span is not None:
        yield from _dates(column, names)
    elif column.kind in ("text", "boolean") or (column.kind == "integer" and _is_code(column, roles)):
        yield _id(column, names)
        if column.kind == "integer" and column.distinct >= ORDERED and not _is_name(column, roles):
            yield _dense(column, names)
    elif column.kind in ("integer", "number") and column.numbers is not None:
        yield from _number(column, names)


def _keys(name: str, column: Column, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a feature, with its column if the name differs."""
    kind = keys.pop("type")
    return {"type": kind, **({"column": column.name} if name != column.name else {}), **keys}


def _id(column: Column, names: _Names) -> Feature:
    keys: dict[str, Any] = {"type": "id", "dim": DIM}
    what = f"strings, {_different(column)}" if column.kind == "text" else "true or false"
    reason = f"{what}: each has a separate vector"
    if column.kind == "integer":
        reason = f"integers, {_different(column)}, treated as codes: each has a separate vector"
    if column.distinct > MANY:
        keys["admission"] = {"min_count": 2}
        reason += (
            "; a value gets its vector in the second batch that contains it, so the rarest values take less memory"
        )
    if column.stray is not None:
        text, place = column.stray
        reason += (
            f"; {column.numeric:.1%} are numbers, but {place} is {text!r}: to read the column as numbers, leave such "
            "fields empty"
        )
    elif column.no_time is not None:
        text, place, kind = column.no_time
        reason += f"; they look like times, but {place} is {text!r}, which is not a valid {kind}"
    elif column.kind == "text" and column.declared is None and column.numeric == 1 and column.distinct > FEW:
        reason += "; all are numbers: if their order matters, store them as numbers"
    name = names.new(column.name)
    return Feature(name, _keys(name, column, keys), reason)


def _is_code(column: Column, roles: Roles) -> bool:
    """Whether the integers of a column are codes or identifiers rather than amounts."""
    return (column.exact and column.distinct <= FEW) or _is_name(column, roles)


def _is_name(column: Column, roles: Roles) -> bool:
    """Whether integers are identifiers, judged by the name of the column, or by values that are spread like hashes."""
    name = snake(column.name)
    if column.name in (roles.group, roles.user) or _ID_NAME.search(name) or _PEOPLE.match(name):
        return True
    numbers = column.numbers
    return numbers is not None and numbers.high - numbers.low > 2.0**40 and abs(column.skew) < 1


def _bag(column: Column, names: _Names) -> Feature:
    keys: dict[str, Any] = {"type": "bag"}
    if column.separator is not None:
        keys["separator"] = column.separator
        reason = f"strings of several values with {column.separator!r} between them: the mean of their vectors"
    else:
        mean, longest = column.lengths or (0.0, 0)
        reason = (
            f"lists of {mean:.1f} items on average, at most {longest}; {_count(column)} different items: the mean of "
            "their vectors"
        )
    name = names.new(column.name)
    return Feature(name, _keys(name, column, {**keys, "pooling": "mean", "dim": DIM}), reason)


def _dates(column: Column, names: _Names) -> Iterator[Feature]:
    """Yield the recurring parts of a time: never the year, and the month only if the data covers two years."""
    first, last = column.span or (0.0, 0.0)
    days = (last - first) / DAY
    parts = []
    if _has_hours(column):
        parts.append(("hour", "the hour of the day"))
    if days >= 14:
        parts.append(("weekday", "the day of the week"))
    if days >= 730:
        parts.append(("month", "the month"))
    for part, what in parts:
        keys: dict[str, Any] = {"type": "date", "part": part}
        if column.unit is not None:
            keys["unit"] = column.unit
        name = names.new(f"{column.name}_{part}")
        yield Feature(name, _keys(name, column, {**keys, "dim": DIM}), what)


def _has_hours(column: Column) -> bool:
    seconds = times_of(column)
    seconds = seconds[~np.isnan(seconds)]
    return bool(len(np.unique(seconds % DAY // 3600)) > 2)


def times_of(column: Column) -> npt.NDArray[np.float64]:
    """Return the times of the sample in seconds since 1970; NaN for rows without a time."""
    values = column.values
    if column.unit is not None:
        return numbers_of(values) / EPOCHS[column.unit]
    times = times_in(values) if is_text(values.type) else values.cast(pa.timestamp("us"), safe=False)
    micros = times.cast(pa.int64())
    return numbers_of(micros) / 1e6


def _number(column: Column, names: _Names) -> Iterator[Feature]:
    """Yield two features of a number: an interval, which has its own vector, and a float, which keeps the order."""
    name = names.new(column.name)
    boundaries = _boundaries(column)
    if boundaries is None:
        rule: dict[str, Any] = {"quantiles": INTERVALS}
        reason = (
            f"numbers from {column.quantiles[0]:g} to {column.quantiles[-1]:g}, {_different(column)}: a "
            f"vector for each of {INTERVALS} intervals with equally many rows"
        )
    else:
        rule = {"boundaries": boundaries}
        reason = (
            f"{column.top[0][1]:.0%} of the rows are {column.top[0][0]}, a separate interval; the other numbers are "
            "divided into intervals with equally many rows; each has a vector"
        )
        if len(boundaries) + 1 >= column.distinct:
            reason = f"numbers, {_different(column)}: each has a separate vector"
    yield Feature(name, _keys(name, column, {"type": "bucket", **rule, "dim": DIM}), reason)
    yield _dense(column, names)


def _dense(column: Column, names: _Names) -> Feature:
    keys: dict[str, Any] = {"type": "dense"}
    reason = "the number itself, scaled to mean 0 and standard deviation 1"
    if abs(column.skew) > 2:
        keys["log1p"] = True
        reason = f"the logarithm of the number, scaled; a few values are far from the others (skew {column.skew:.0f})"
    name = names.new(f"{column.name}_dense")
    return Feature(name, _keys(name, column, {**keys, "standardise": True}), reason)


def _boundaries(column: Column) -> list[float] | None:
    """Return explicit boundaries if many quantiles of all rows would be equal, otherwise None.

    If there are at most :data:`INTERVALS` distinct values, each value gets a separate interval. If one value has more
    than a quarter of the rows, this value gets a separate interval, and the other values are divided by their
    quantiles. The sample covers all rows, including valid and test: boundaries depend on the numbers only, not on
    labels.
    """
    values = numbers_of(column.values)
    values = values[~np.isnan(values)]
    different, counts = np.unique(values, return_counts=True)
    if len(different) <= INTERVALS:
        return [_short(number) for number in different[:-1]] if len(different) > 1 else None
    if counts.max() <= len(values) / 4:
        return None
    main = different[counts.argmax()]
    others = values[values != main]
    shares = np.linspace(0, 1, INTERVALS - 1)[:-1]
    bounds = np.unique(np.quantile(others, shares, method="inverted_cdf"))
    below = different[different < main][-1:]
    return sorted({_short(bound) for bound in (*bounds, *below, main)})


def _short(number: float) -> float:
    """Return a number rounded to six significant digits; a whole number below 10^9 is unchanged."""
    if number == int(number) and abs(number) < 1e9:
        return int(number)
    return float(f"{number:.6g}")


def _share_tables(features: list[Feature], table: Table) -> None:
    """Let a bag share the rows of an id feature if most of its items are values of that feature."""
    ids = [feature for feature in features if feature.keys["type"] == "id"]
    for bag in (feature for feature in features if feature.keys["type"] == "bag"):
        column = table.columns[bag.keys.get("column", bag.name)]
        items = _items(column)
        for one in ids:
            other = table.columns[one.keys.get("column", one.name)]
            if is_text(items.type) != is_text(other.values.type) or other.distinct < 10:
                continue
            known = pc.is_in(items, other.values.drop_null().unique().cast(items.type))
            if (pc.mean(known).as_py() or 0) > 0.5:
                bag.keys["table"] = one.name
                bag.reason += f"; most items are values of {one.name}, so both share its vectors"
                break


def _items(column: Column) -> pa.Array:
    values = column.values.drop_null()
    if column.separator is not None:
        values = pc.split_pattern(values, column.separator)
    return pc.list_flatten(values).drop_null() if is_list(values.type) else values
