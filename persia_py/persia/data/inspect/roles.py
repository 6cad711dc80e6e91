"""Columns with a special role: the time, the group of a split, the weight of a row."""

import re
from dataclasses import dataclass

import numpy as np

from persia.data.inspect.columns import Column, snake
from persia.data.inspect.labels import Label
from persia.data.inspect.scan import Table

_WEIGHT = re.compile(r"^((instance|sample|row|case|example|survey|person)_)?(weight|weights|wgt|wt)$|^fnlwgt$")
_GROUP = re.compile(
    r"^(session|visit|query|search|request|impression|slate|group|basket|household|patient)(_?(id|nr|no))?$"
)
_USER = re.compile(r"^(user|customer|member|visitor|client|account)(_?(id|nr|no))?$")


@dataclass
class Roles:
    """The columns with a special role.

    Attributes:
        time: The column that holds the time of a row.
        group: The column by which rows are grouped: equal values stay in one part.
        transient: Whether the values of ``group`` do not recur, like those of a session.
        user: The column that identifies the user.
        weight: The column that holds the weight of a row.
    """

    time: str | None = None
    group: str | None = None
    transient: bool = False
    user: str | None = None
    weight: str | None = None


def find(table: Table, label: Label) -> Roles:
    """Return the columns with a special role."""
    roles = Roles()
    for column in table.columns.values():
        name = snake(column.name)
        if column.name == label.column:
            continue
        if column.span is not None and _is_time(column) and roles.time is None:
            roles.time = column.name
        if _WEIGHT.match(name) and column.numbers is not None and column.numbers.low >= 0 and column.distinct > 2:
            roles.weight = roles.weight or column.name
        repeats = column.kind in ("text", "integer") and 1 < column.distinct < 0.9 * (column.rows - column.nulls)
        if _GROUP.match(name) and repeats and roles.group is None:
            roles.group, roles.transient = column.name, True
        if _USER.match(name) and repeats and roles.user is None:
            roles.user = column.name
    return roles


def _is_time(column: Column) -> bool:
    """Whether rows can be split by this column: every row has a time, and there are enough distinct times."""
    return column.missing == 0 and column.distinct >= 10


def moments(times: np.ndarray, shares: tuple[float, ...]) -> list[float]:
    """Return the times that divide the rows into these shares."""
    known = times[~np.isnan(times)]
    return [float(each) for each in np.quantile(known, shares, method="inverted_cdf")]
