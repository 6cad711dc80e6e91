"""Exact metrics of predictions over all rows. The docstrings of the functions have the formulas."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from persia.serving.scores import sigmoid

Floats = npt.NDArray[np.float64]


@dataclass
class Metrics:
    """The metrics of one label.

    Attributes:
        rows: The number of rows.
        values: Each metric by name; None if it is not defined.
        notes: The reason why a metric is not defined, by name.
    """

    rows: int
    values: dict[str, float | None] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return all values, JSON-serializable."""
        return {"rows": self.rows, **self.values, **({"notes": self.notes} if self.notes else {})}


class Undefined(Exception):  # noqa: N818  # not an error: a metric may have no value
    """Raised if a metric has no value for these rows; the message gives the reason."""


def binary(
    logits: npt.ArrayLike,
    labels: npt.ArrayLike,
    names: Sequence[str],
    weights: npt.ArrayLike | None = None,
    groups: npt.ArrayLike | None = None,
) -> Metrics:
    """Return metrics of a label with values 0 and 1.

    Args:
        logits: The logit of each row, ``[rows]``.
        labels: 0 or 1 for each row.
        names: The metrics, of ``auc``, ``log_loss``, ``ne``, ``calibration``, ``gauc``.
        weights: The weight of each row; None means 1.
        groups: The group of each row, for ``gauc``.
    """
    scores, truth = _flat(logits), _flat(labels)
    share = np.ones(len(scores)) if weights is None else _flat(weights)
    found = Metrics(len(scores))
    if _set_undefined(found, scores, names):
        return found
    computed = {
        "auc": lambda: auc(scores, truth, share),
        "log_loss": lambda: log_loss(scores, truth, share),
        "ne": lambda: normalized_entropy(scores, truth, share),
        "calibration": lambda: calibration(sigmoid(scores), truth, share),
        "gauc": lambda: grouped_auc(scores, truth, share, groups),
    }
    for name in names:
        _set(found, name, computed[name])
    return found


def regression(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, names: Sequence[str], weights: npt.ArrayLike | None = None
) -> Metrics:
    """Return metrics of a numeric label: ``mse`` and ``mae`` always, ``calibration`` if it is in ``names``."""
    scores, truth = _flat(predictions), _flat(labels)
    share = np.ones(len(scores)) if weights is None else _flat(weights)
    found = Metrics(len(scores))
    if _set_undefined(found, scores, ["mse", "mae", *(name for name in names if name == "calibration")]):
        return found
    _set(found, "mse", lambda: _mean((scores - truth) ** 2, share))
    _set(found, "mae", lambda: _mean(np.abs(scores - truth), share))
    if "calibration" in names:
        _set(found, "calibration", lambda: calibration(scores, truth, share))
    return found


def _set_undefined(metrics: Metrics, scores: Floats, names: Sequence[str]) -> bool:
    """Set all metrics to undefined if a score is NaN or infinite, because sorting treats NaN as the highest score."""
    wrong = int(np.count_nonzero(~np.isfinite(scores)))
    if wrong:
        why = f"{wrong} output{' is' if wrong == 1 else 's are'} NaN or infinite"
        metrics.values.update(dict.fromkeys(names))
        metrics.notes.update(dict.fromkeys(names, why))
    return wrong > 0


def _set(metrics: Metrics, name: str, compute: Any) -> None:
    try:
        metrics.values[name] = float(compute())
    except Undefined as why:
        metrics.values[name], metrics.notes[name] = None, str(why)


def auc(scores: Floats, labels: Floats, weights: Floats) -> float:
    """Return the area under the ROC curve.

    The area is the share of pairs of a positive and a negative row in which the positive row has the higher score.

    A pair of equal scores counts one half. With weights, a pair counts the product of both weights. The value is
    computed from sorted scores in float64, without thresholds (Hanley and McNeil 1982, "The meaning and use of the area
    under a receiver operating characteristic (ROC) curve").

    Raises:
        Undefined: One class has no rows, or all its weights are 0.
    """
    shares, _ = _auc_of_groups(scores, labels, weights, np.zeros(len(scores), np.uint64))
    if not len(shares):
        raise Undefined(_one_class(labels))
    return float(shares[0])


def _auc_of_groups(
    scores: Floats, labels: Floats, weights: Floats, groups: npt.NDArray[np.uint64]
) -> tuple[Floats, Floats]:
    """Return the AUC and the weight of each group that has rows in both classes."""
    if not len(scores):
        return np.zeros(0), np.zeros(0)
    order = np.lexsort((scores, groups))
    scores, groups, labels, weights = scores[order], groups[order], labels[order], weights[order]
    positive, negative = weights * labels, weights * (1 - labels)
    begins = np.append(True, groups[1:] != groups[:-1])  # the first row of each group
    starts = np.flatnonzero(begins)
    ends = np.flatnonzero(np.append(begins[1:] | (scores[1:] != scores[:-1]), True))  # the last row of each score
    group = np.cumsum(begins)[ends] - 1
    positives = np.diff(np.cumsum(positive)[ends], prepend=0.0)
    passed = np.cumsum(negative)
    negatives = np.diff(passed[ends], prepend=0.0)
    below = passed[ends] - (passed - negative)[starts][group]  # negatives of the group up to this score
    pairs = np.bincount(group, positives * (below - negatives / 2))
    both = np.add.reduceat(positive, starts) * np.add.reduceat(negative, starts)
    known = both > 0
    return pairs[known] / both[known], np.add.reduceat(weights, starts)[known]


def log_loss(logits: Floats, labels: Floats, weights: Floats) -> float:
    """Return the mean of ``-y ln p - (1 - y) ln (1 - p)`` with ``p = sigmoid(logit)``, computed from the logits.

    Raises:
        Undefined: There are no rows, or all weights are 0.
    """
    return _mean(np.maximum(logits, 0) - logits * labels + np.log1p(np.exp(-np.abs(logits))), weights)


def normalized_entropy(logits: Floats, labels: Floats, weights: Floats) -> float:
    """Return the log loss divided by that of always predicting the mean label.

    With the mean label ``p``: ``log_loss / (-p ln p - (1 - p) ln (1 - p))``. A value below 1 is better than the mean
    label. See He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", equation 1.

    Raises:
        Undefined: One class has no rows, or all its weights are 0.
    """
    loss, rate = log_loss(logits, labels, weights), _mean(labels, weights)
    if not 0 < rate < 1:
        raise Undefined(_one_class(labels))
    return float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def calibration(predictions: Floats, labels: Floats, weights: Floats) -> float:
    """Return the mean prediction divided by the mean label (He et al. 2014, section 2.1). 1 means no bias.

    Raises:
        Undefined: There are no rows, all weights are 0, or the mean label is 0.
    """
    mean = _mean(labels, weights)
    if mean == 0:
        raise Undefined("the mean label is 0")
    return _mean(predictions, weights) / mean


def grouped_auc(scores: Floats, labels: Floats, weights: Floats, groups: npt.ArrayLike | None) -> float:
    """Return the mean AUC within groups, such as users, weighted by the rows of each group (or their weights).

    Groups with rows in only one class are excluded (Zhu et al. 2017, "Optimized Cost per Click in Taobao Display
    Advertising", equation 16, which weights by impressions).

    Raises:
        Undefined: No group has rows in both classes, or there are no groups.
    """
    if groups is None:
        raise Undefined("train.gauc_group is not set")
    found, shares = _auc_of_groups(scores, labels, weights, np.asarray(groups, np.uint64).reshape(-1))
    if not len(found):
        raise Undefined("no group has rows of both classes")
    return _mean(found, shares)


def _mean(values: Floats, weights: Floats) -> float:
    total = weights.sum()
    if not total:
        raise Undefined("there are no rows" if not len(weights) else "all weights are 0")
    return float((values * weights).sum() / total)


def _one_class(labels: Floats) -> str:
    if not len(labels):
        return "there are no rows"
    return f"all labels are {labels[0]:g}" if (labels == labels[0]).all() else "all weights of one class are 0"


def _flat(values: npt.ArrayLike) -> Floats:
    return np.asarray(values, np.float64).reshape(-1)
