"""The proposed split and training settings, with reasons."""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from persia.data.inspect.columns import EPOCHS, Column
from persia.data.inspect.features import DAY, Feature, times_of
from persia.data.inspect.roles import Roles, moments
from persia.data.inspect.scan import Table

ROWS_TO_TRAIN = 800_000
"""The number of rows for training in total, in 3 to :data:`MOST_EPOCHS` epochs; one epoch beyond :data:`LARGE_ROWS`."""
MOST_EPOCHS = 8
LARGE_ROWS = 10_000_000
BATCH_BELOW = {2_000_000: 512}
"""The batch size for tables with fewer rows; :data:`LARGE_BATCH` for larger tables."""
LARGE_BATCH = 1024
WIDE, RANK = 1024, 64
"""For more inputs than this, the cross network has low-rank matrices."""


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
                "the last tenth of the rows is test, the tenth before valid: a model is judged on later rows",
            )
    shares = [0.9, 0.1, 0.0] if has_test else [0.8, 0.1, 0.1]
    if table.expected_rows > 1_000_000:
        shares = [0.95, 0.05, 0.0] if has_test else [0.9, 0.05, 0.05]
    what = "valid is a part of the training file, chosen by a hash" if has_test else "chosen by a hash"
    if roles.group is not None:
        reason = f"{what} of {roles.group}, so that its rows are in one part"
        return Setting({"by": "hash", "fractions": shares, "group": roles.group}, reason)
    return Setting({"by": "hash", "fractions": shares}, f"{what} of the file's name and the number of the row")


def _bound(column: Column, seconds: float) -> Any:
    """Return a time in the form of ``data.split``, at midnight if there are many days."""
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
    reason = "its cross network multiplies features of any dims, and floats too"
    dims = [feature.keys.get("dim", 0) for feature in features]
    if len({dim for dim in dims if dim}) == 1:
        reason += "; all have one dim, so `name: dlrm` is possible"
    keys: dict[str, Any] = {"name": "dcnv2", "cross_layers": 2, "deep_mlp": [128, 64], "dropout": 0.2}
    width = sum(dims) + dims.count(0)
    if width > WIDE:
        keys["low_rank"] = RANK
        reason += f"; {width} inputs, so matrices of rank {RANK} save time"
    return Setting(keys, reason)


def batch_size(rows: int) -> Setting:
    """Return ``data.batch_size``."""
    size = next((size for bound, size in BATCH_BELOW.items() if rows < bound), LARGE_BATCH)
    return Setting(size, "larger batches train faster, smaller ones learn more from each row")


def epochs(rows: int) -> Setting:
    """Return ``data.epochs``."""
    least = 3 if rows < LARGE_ROWS else 1
    number = max(least, min(MOST_EPOCHS, round(ROWS_TO_TRAIN / rows)))
    return Setting(number, f"for {rows:,} rows; early_stop ends training before if valid no longer improves")


def train(size: int) -> dict[str, Setting]:
    """Return the block ``train``.

    Args:
        size: Rows of a batch. The gradient of a mean over it is inversely proportional to it.
    """
    start = float(f"{1e-6 * (1024 / size) ** 2:.1g}")
    return {
        "embedding_optimizer": Setting(
            {"name": "adagrad", "lr": 0.1, "initial_accumulator_value": start, "vectorwise_shared": True},
            "rows of rare ids take large steps; the start is below the squared gradients of a batch",
        ),
        "dense_optimizer": Setting({"name": "adam", "lr": 0.001}, "of the model's weights"),
        "lr_schedule": Setting("linear", "small steps at the end lower the noise"),
        "early_stop": Setting({"metric": "auc", "patience": 3}, "the model of the best evaluation is kept"),
    }
