"""LightGBM on the rows of a run: the same split, labels, weights and metrics.

Numbers are passed as numbers, and ids and parts of dates as categories. Null, and categories that do not occur in
train, are missing values. Bags, sequences and crosses are excluded, because a tree has no columns for them; the summary
lists them. Training stops early on the validation set, and the test set is scored once.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persia.config import Config
from persia.features import Transform
from persia.runtime.errors import ConfigError
from persia.runtime.logging import get_logger
from persia.trainer import fitting, metrics, pages
from persia.trainer.batches import Rows, read_rows
from persia.trainer.parts import Part, Parts, group_of, metric_names, to_have_valid
from persia.trainer.run_folder import FACTS, SUMMARY, RunFolder

_logger = get_logger("trainer")

NAME = "lightgbm"
ROUNDS, PATIENCE = 2000, 50
"""The maximum number of trees, and of trees without an improvement on the validation set."""
PARAMETERS = {"learning_rate": 0.05, "num_leaves": 63, "min_data_in_leaf": 50, "feature_fraction": 0.8}
"""Parameters that differ from LightGBM's defaults."""
MAX_VALUES = 2_000_000_000
"""The maximum number of training values (rows times columns) that are held in memory."""

_NUMBERS, _CATEGORIES = ("dense", "bucket"), ("id", "date")
_READ_ROWS = 1 << 16

Floats = npt.NDArray[np.float64]


class Columns:
    """The columns of rows that LightGBM uses.

    Args:
        config: The configuration, with the features.
        transform: The transform, which computes ids.

    Attributes:
        numbers: The columns of the files that are used as numbers.
        slots: The features whose ids are categories.
        left_out: The features that are not used.
    """

    def __init__(self, config: Config, transform: Transform) -> None:
        types = dict(config.compiled.types)
        of = {name: config.features[name].get("column", name) for name in types}
        self.numbers = [*dict.fromkeys(of[name] for name, kind in types.items() if kind in _NUMBERS)]
        self.slots = [name for name in transform.slots if types[name] in _CATEGORIES]
        self.left_out = [name for name, kind in types.items() if kind not in (*_NUMBERS, *_CATEGORIES)]
        self._known: list[npt.NDArray[np.uint64]] = []

    def read(self, rows: list[Rows]) -> Floats:
        """Return the values, ``[rows, numbers and slots]``. The first call determines the known categories."""
        ids = [np.concatenate([_single(each, slot) for each in rows]) for slot in self.slots]
        if not self._known:
            self._known = [np.unique(column["id"][column["has"]]) for column in ids]
        found = [np.concatenate([_number(each.table.column(name)) for each in rows]) for name in self.numbers]
        for column, known in zip(ids, self._known, strict=True):
            places = np.searchsorted(known, column["id"])
            places[places == len(known)] = 0
            is_known = column["has"] & (len(known) > 0)
            is_known[is_known] = known[places[is_known]] == column["id"][is_known]
            found.append(np.where(is_known, places, np.nan))
        return np.stack(found, axis=1) if found else np.zeros((sum(len(each.samples) for each in rows), 0))

    @property
    def categorical(self) -> list[int]:
        """The indices of the columns that are categories."""
        return [*range(len(self.numbers), len(self.numbers) + len(self.slots))]


def _single(rows: Rows, slot: str) -> npt.NDArray[Any]:
    """Return the id of each row, and whether the row has one."""
    ids, offsets, _ = rows.samples.ids(slot)
    found = np.zeros(len(rows.samples), [("id", np.uint64), ("has", bool)])
    if offsets is None:
        found["id"], found["has"] = ids, True
    else:
        found["has"] = np.diff(offsets) > 0
        found["id"][found["has"]] = ids[offsets[:-1][found["has"]]]
    return found


def _number(values: pa.Array) -> Floats:
    cast = values.cast(pa.float64()) if not pa.types.is_null(values.type) else pa.nulls(len(values), pa.float64())
    return np.asarray(cast.fill_null(np.nan), np.float64)


def compare(config: Config, folder: RunFolder) -> None:
    """Train LightGBM, and add its results to the summary of a run.

    Raises:
        ConfigError: There is no validation set to stop on, no usable feature, or too much data for memory.
    """
    import lightgbm

    started = time.perf_counter()
    transform, parts = fitting.load(config, folder.path), Parts(config)
    if parts.valid is None:
        raise ConfigError(
            "--baseline lightgbm requires a validation set, to stop early",
            hint=to_have_valid(config.data),
        )
    columns = Columns(config, transform)
    width = len(columns.numbers) + len(columns.slots)
    rows = int(folder.read_json(FACTS)["rows"])
    if not width or rows * width > MAX_VALUES:
        raise ConfigError(
            f"--baseline lightgbm: found {rows:,} rows with {width} usable columns; expected at least 1 column, and at "
            f"most {MAX_VALUES:,} values (rows times columns), because all values are held in memory",
            hint="leave out --baseline, or train a run on fewer rows or columns" if width else "leave out --baseline",
        )
    _logger.info("training lightgbm on %d rows of %d columns", rows, width)
    found = {name: _read(part, transform, config) for name, part in _named(parts)}
    data = {name: columns.read(each) for name, each in found.items()}
    results: dict[str, dict[str, Any]] = {name: {} for name in found if name != "train"}
    trees = {}
    for label, _, kind in config.compiled.labels:
        truth = {name: np.concatenate([each.samples.label(label) for each in rows]) for name, rows in found.items()}
        weights = {name: _weights(rows) for name, rows in found.items()}
        sets = {
            name: lightgbm.Dataset(
                data[name], truth[name], weight=weights[name], categorical_feature=columns.categorical
            )
            for name in ("train", "valid")
        }
        sets["valid"].set_reference(sets["train"])
        booster = lightgbm.train(
            {
                **PARAMETERS,
                "objective": "binary" if kind == "bce" else "regression",
                "metric": "auc" if kind == "bce" else "l2",
                "seed": config.train.seed,
                "deterministic": True,
                "num_threads": config.train.threads,
                "verbosity": -1,
            },
            sets["train"],
            ROUNDS,
            [sets["valid"]],
            callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
        )
        trees[label] = booster.best_iteration
        for name, part in results.items():
            raw = booster.predict(data[name], raw_score=True, num_iteration=booster.best_iteration)
            judged = _judge(kind, raw, truth[name], weights[name], found[name], config)
            part[label] = judged.as_dict()
    summary = folder.read_json(SUMMARY)
    summary["baseline"] = {
        "name": NAME,
        "version": lightgbm.__version__,
        "trees": trees,
        "left_out": columns.left_out,
        "seconds": round(time.perf_counter() - started, 3),
        **results,
    }
    folder.write_json(SUMMARY, summary)
    pages.write(folder, config, status=summary["status"])


def _named(parts: Parts) -> list[tuple[str, Part]]:
    named = (("train", parts.train), ("valid", parts.valid), ("test", parts.test))
    return [(name, part) for name, part in named if part is not None]


def _read(part: Part, transform: Transform, config: Config) -> list[Rows]:
    return [*read_rows(part, transform, _READ_ROWS, weight=config.train.weight, group=group_of(config))]


def _weights(rows: list[Rows]) -> npt.NDArray[np.float32] | None:
    weights = [each.weights for each in rows if each.weights is not None]
    return np.concatenate(weights) if weights else None


def _judge(
    kind: str,
    raw: Floats,
    truth: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32] | None,
    rows: list[Rows],
    config: Config,
) -> metrics.Metrics:
    if kind != "bce":
        return metrics.regression(raw, truth, metric_names(config), weights)
    groups = [each.groups for each in rows if each.groups is not None]
    return metrics.binary(raw, truth, metric_names(config), weights, np.concatenate(groups) if groups else None)
