"""Chooses the label."""

import math
import re
import shlex
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia.data.inspect.columns import Column, numbers_of, snake
from persia.data.inspect.scan import Table
from persia.embedding.listed import listed
from persia.runtime.errors import DataError, UsageError

_NAMES = (
    r"label|labels|target|y|outcome|response|clicked|click|clicks|is_click|converted|conversion|is_conversion|"
    r"purchased|bought|liked|like|is_like|churn|churned|won|success|default|defaulted|fraud|is_fraud|survived"
)
_LABEL_NAME = re.compile(rf"^({_NAMES})$")
_RATING_NAME = re.compile(r"^(rating|ratings|stars|score|grade)$")
_POSITIVE = ("1", "true", "yes", "y", "t", "click", "clicked", "positive", "pos", "won", "success", "bought")
_NUMBERS = ("integer", "number", "boolean")
"""The kinds of columns whose two values can be those of a label."""
_OPERATION = re.compile(r"^(?P<column>.+?)(?P<operation>[>=])(?P<value>[^>=]*)$")


@dataclass
class Label:
    """The label of a proposal.

    Attributes:
        column: The column of the label.
        keys: The keys of the label in ``labels``, apart from the column.
        reason: The reason for the choice.
        positive: Whether the label is 1, for each row of the sample.
        doubts: Why another column or another value may be meant, and how to specify it; for warnings.
    """

    column: str
    keys: dict[str, Any]
    reason: str
    positive: npt.NDArray[np.bool_]
    doubts: tuple[str, ...] = ()


def choose(table: Table, given: str | None) -> Label:
    """Return the label given as ``COL``, ``COL=VALUE`` or ``COL>NUMBER``, or the only column that looks like one.

    Raises:
        UsageError: The column does not exist, no column looks like a label, or several do.
        DataError: The column has only one value, or values that need a rule to become a label.
    """
    if given is None:
        return _guess(table)
    name, operation, value = given, "", ""
    if given not in table.columns and (found := _OPERATION.match(given)):
        name, operation, value = found["column"].strip(), found["operation"], found["value"].strip()
    if name not in table.columns:
        lower = {column.lower(): column for column in table.columns}
        near = get_close_matches(name.lower(), lower, 1)
        also = f" (did you mean {lower[near[0]]!r}?)" if near else f"; the columns are {listed(table.columns)}"
        raise UsageError(f"--label {given}: no column {name!r}{also}")
    column = table.columns[name]
    if operation == ">":
        return _greater(column, value, "as given by --label")
    if operation == "=":
        return _equal(column, value, "as given by --label")
    return _of(column, "given by --label")


def _guess(table: Table) -> Label:
    named = [column for column in table.columns.values() if _LABEL_NAME.match(snake(column.name))]
    binary = [column for column in named if _is_binary(column)]
    ratings = [column for column in table.columns.values() if _RATING_NAME.match(snake(column.name)) and column.numbers]
    others = [column for column in table.columns.values() if column.kind in _NUMBERS and _is_binary(column)]
    texts = [column for column in table.columns.values() if column.kind == "text" and _is_binary(column)]
    if len(binary) == 1:
        return _guessed(binary[0], f"its name, and {_positives(binary[0])}", [*named, *ratings])
    if len(named) == 1 and not binary:
        return _guessed(named[0], "its name", [*ratings, *others, *texts])
    if not named and len(ratings) == 1:
        return _guessed(ratings[0], "its name", [*others, *texts])
    if not named and not ratings and len(others) == 1:
        which = "a column of two numbers" if texts else "the only column of two values"
        return _guessed(others[0], f"{which}, and {_positives(others[0])}", texts)
    found = binary or named or ratings or others
    if found:
        candidates = ", ".join(repr(column.name) for column in found[-10:])
        raise UsageError(
            f"cannot determine which column is the label; candidates: {candidates}",
            hint=f"specify the label: persia data inspect FILE --label {shlex.quote(found[-1].name)}",
        )
    raise UsageError(
        f"no column looks like a label; the columns are {listed(table.columns)}",
        hint="specify the label: --label COL, --label 'COL>NUMBER' or --label COL=VALUE",
    )


def _guessed(column: Column, reason: str, others: list[Column]) -> Label:
    """Return the label for a column, with a doubt if other columns may be the label too."""
    label = _of(column, reason)
    names = list(dict.fromkeys(repr(other.name) for other in others if other is not column))
    if names:
        doubt = f"it was guessed, and may also be {listed(names)}: specify the label, --label COL"
        label.doubts = (doubt, *label.doubts)
    return label


def _with_other(column: Column, label: Label, positive: str, negative: str) -> Label:
    """Add the doubt that the other of two values may be meant."""
    other = f"--label {shlex.quote(f'{column.name}={negative}')}"
    label.doubts += (f"{positive} counts as 1, which was guessed; to count {negative} as 1: {other}",)
    return label


def _is_binary(column: Column) -> bool:
    return column.exact and column.distinct == 2 and not column.many


def _positives(column: Column) -> str:
    return f"its values are {' and '.join(value for value, _ in column.top)}"


def _of(column: Column, reason: str) -> Label:
    """Return the label for a column that was specified without a rule."""
    if column.many or column.kind in ("list", "time", "other"):
        what = column.stored if column.separator is None else f"strings of several values ({column.separator!r})"
        raise DataError(
            f"label {column.name!r}: a column of {what} cannot be a label; each row needs one number or string",
            hint="specify another column: --label COL",
        )
    if column.exact and column.distinct < 2:
        only = column.top[0][0] if column.top else "null"
        raise DataError(
            f"label {column.name!r}: the rows read have only the value {only}; training needs different labels",
            hint="specify another column, --label COL; or read more rows, --rows N",
        )
    if column.kind == "boolean":
        return Label(column.name, {}, reason, np.asarray(column.values.fill_null(False)))
    if column.kind == "text":
        return _of_texts(column, reason)
    values = numbers_of(column.values)
    if column.numbers and column.distinct == 2:
        if (column.numbers.low, column.numbers.high) == (0, 1):
            return Label(column.name, {}, reason, values == 1)
        low, high = f"{column.numbers.low:g}", f"{column.numbers.high:g}"
        label = _equal(column, high, f"{reason}; a label is 1 or 0, and {high} is 1")
        return label if column.numbers.low <= 0 else _with_other(column, label, high, low)
    known = values[~np.isnan(values)]
    bounds = np.unique(np.quantile(known, np.linspace(0, 1, 101), method="inverted_cdf"))[:-1]
    shares = np.array([(known > bound).mean() for bound in bounds])
    bound = bounds[np.abs(shares - 0.5).argmin()]
    several = f"it has {column.distinct:,} values, so a label is 1 above {bound:g}, which divides the rows most evenly"
    return _greater(column, f"{bound:g}", f"{reason}; {several}")


def _of_texts(column: Column, reason: str) -> Label:
    if column.distinct > 2:
        frequent = ", ".join(f"{value} ({share:.0%})" for value, share in column.top)
        what = f"{column.distinct:,} different strings, the most frequent: {frequent}; a label has exactly two"
        raise DataError(
            f"label {column.name!r}: {what}",
            hint=f"specify the value to predict: --label {shlex.quote(f'{column.name}={column.top[-1][0]}')}",
        )
    values = [value for value, _ in column.top]
    known = next((value for value in values if value.strip().lower() in _POSITIVE), None)
    positive = values[-1] if known is None else known
    label = _equal(column, positive, f"{reason}; a label is 1 or 0, and {positive!r} is 1")
    return label if known is not None else _with_other(column, label, positive, values[0])


def _greater(column: Column, value: str, reason: str) -> Label:
    bound = _number(value)
    if bound is None:
        raise UsageError(f"--label '{column.name}>{value}': {value!r} is not a finite number")
    if column.numbers is None:
        raise UsageError(f"--label '{column.name}>{value}': the column is {column.stored}, expected numbers")
    return _checked(column, {"greater_than": _plain(bound)}, reason, numbers_of(column.values) > bound)


def _equal(column: Column, value: str, reason: str) -> Label:
    if column.kind == "text":
        return _checked(column, {"equals": value}, reason, _true(pc.equal(column.values, value)))
    if column.kind == "boolean":
        wanted = {"true": True, "1": True, "false": False, "0": False}.get(value.lower())
        if wanted is None:
            raise UsageError(
                f"--label {column.name}={value}: the column is {column.stored}, expected true, false, 1 or 0"
            )
        return _checked(column, {"equals": wanted}, reason, _true(pc.equal(column.values, wanted)))
    number = _number(value)
    if number is None:
        raise UsageError(f"--label {column.name}={value}: the column is {column.stored}, expected a finite number")
    return _checked(column, {"equals": _plain(number)}, reason, numbers_of(column.values) == number)


def _number(text: str) -> float | None:
    """Return the finite number in a text; None if the text is not one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _true(values: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(values.fill_null(False))


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number


def _checked(column: Column, keys: dict[str, Any], reason: str, positive: npt.NDArray[np.bool_]) -> Label:
    if positive.all() or not positive.any():
        rule = " ".join(f"{key} {value}" for key, value in keys.items())
        values = ", ".join(value for value, _ in column.top)
        which = "all" if positive.all() else "no"
        raise DataError(
            f"label {column.name!r} ({rule}): {which} rows of the sample have the label 1; frequent values are "
            f"{values}",
            hint="specify another column or rule: --label COL, --label 'COL>NUMBER' or --label COL=VALUE",
        )
    return Label(column.name, keys, reason, positive)
