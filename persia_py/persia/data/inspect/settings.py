"""The proposed split and training settings, with reasons."""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from persia.data.inspect.columns import EPOCHS, Column
from persia.data.inspect.features import DAY, Feature, times_of
from persia.data.inspect.roles import Roles, moments
from persia.data.inspect.scan import Table

ROWS_TO_TRAIN = 800_000
"""The total number of rows, over all epochs, on which a model trains. The number of epochs is between 3 and
:data:`MOST_EPOCHS`; it is 1 if the table has at least :data:`LARGE_ROWS` rows."""
MOST_EPOCHS = 8
LARGE_ROWS = 10_000_000
BATCH_BELOW = {2_000_000: 512}
"""The batch size for tables with fewer rows than each key. For larger tables it is :data:`LARGE_BATCH`."""
LARGE_BATCH = 1024
WIDE, RANK = 1024, 64
"""The number of inputs above which the cross network has low-rank matrices, and their rank."""


@dataclass
class Setting:
    """A value of a proposal, and the reason."""

    value: Any
    reason: str


def split(table: Table, roles: Roles, *, has_test: bool) -> Setting:
    """Return the block ``data.split``."""
    if roles.time is not None and not has_test:
        column = table.columns[roles.time]
        valid, test = moments(times_of(column), (0.8, 0.9))
        last = column.span[1] if column.span else test
        if valid < test <= last:
            bounds = {"valid": _bound(column, valid), "test": _bound(column, test)}
            return Setting(
                {"by": "time", "column": roles.time, **bounds},
                f"the last tenth, from {bounds['test']} on, is test, and the tenth before it is valid, so the model is "
                "evaluated on rows that are later than its training rows",
            )
    shares = [0.9, 0.1, 0.0] if has_test else [0.8, 0.1, 0.1]
    if table.expected_rows > 1_000_000:
        shares = [0.95, 0.05, 0.0] if has_test else [0.9, 0.05, 0.05]
    names = ("train", "valid") if has_test else ("train", "valid", "test")
    what = ", ".join(f"{share:.0%} {name}" for name, share in zip(names, shares, strict=False))
    if roles.group is not None:
        reason = f"{what}; all rows of a {roles.group} are in one part"
        return Setting({"by": "hash", "fractions": shares, "group": roles.group}, reason)
    return Setting({"by": "hash", "fractions": shares}, f"{what}; chosen by a hash of file name and row number")


def _bound(column: Column, seconds: float) -> Any:
    """Return a time in the form of ``data.split``, rounded to midnight if the data covers many days."""
    first, last = column.span or (0.0, 0.0)
    if (last - first) / DAY > 60:
        seconds = seconds // DAY * DAY
    if column.unit is not None:
        return int(seconds * EPOCHS[column.unit])
    moment = datetime.fromtimestamp(seconds, timezone.utc).replace(tzinfo=None)
    whole_day = moment.time() == datetime.min.time()
    if column.kind == "text" and " " in str(column.top[0][0]):
        return moment.isoformat(" ")
    return moment.date().isoformat() if whole_day else moment.isoformat()


def model(features: list[Feature]) -> Setting:
    """Return the block ``model``."""
    reason = "a network that multiplies features with each other; their dims may differ"
    dims = [feature.keys.get("dim", 0) for feature in features]
    if len({dim for dim in dims if dim}) == 1:
        reason += ". All have one dim, so `{name: dlrm}` can be tried too"
    keys: dict[str, Any] = {"name": "dcnv2", "cross_layers": 2, "deep_mlp": [128, 64], "dropout": 0.2}
    width = sum(dims) + dims.count(0)
    if width > WIDE:
        keys["low_rank"] = RANK
        reason += f". Full matrices of {width} inputs would be slow, so their rank is {RANK}"
    return Setting(keys, reason)


def batch_size(rows: int) -> Setting:
    """Return ``data.batch_size``."""
    size = next((size for bound, size in BATCH_BELOW.items() if rows < bound), LARGE_BATCH)
    return Setting(size, "rows of a training step: larger ones train faster, smaller ones learn more from each row")


def epochs(rows: int) -> Setting:
    """Return ``data.epochs``."""
    least = 3 if rows < LARGE_ROWS else 1
    number = max(least, min(MOST_EPOCHS, round(ROWS_TO_TRAIN / rows)))
    return Setting(number, f"the maximum number of passes over {rows:,} rows: early_stop may end training earlier")


def train() -> dict[str, Setting]:
    """Return the block ``train``."""
    return {
        "embedding_optimizer": Setting({"name": "adagrad", "lr": 0.1}, "of vectors: rare ids take larger steps"),
        "dense_optimizer": Setting({"name": "adam", "lr": 0.001}, "of the weights of the model"),
        "lr_schedule": Setting("linear", "both learning rates decrease linearly to 0: small last steps are better"),
        "early_stop": Setting(
            {"metric": "auc", "patience": 3},
            "training ends after 3 evaluations of valid without a better AUC; the best model is kept",
        ),
    }
