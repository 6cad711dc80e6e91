"""Metrics against torchmetrics, and against their formulas over all pairs and rows."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from persia.serving.scores import sigmoid
from persia.trainer import metrics

Floats = npt.NDArray[np.float64]


def rows(count: int = 500, seed: int = 0, distinct: int = 40) -> tuple[Floats, Floats, Floats]:
    """Logits with ties, labels that depend on them, and weights. Some weights are 0."""
    random = np.random.default_rng(seed)
    logits = random.integers(-distinct // 2, distinct // 2, count) / 8
    labels = (random.random(count) < sigmoid(logits)).astype(np.float64)
    return logits, labels, random.integers(0, 4, count).astype(np.float64)


def pairs(scores: Floats, labels: Floats, weights: Floats) -> float:
    """The AUC by its definition: the weighted share of pairs of a positive and a negative that are in order."""
    order = whole = 0.0
    for one, other in itertools.product(range(len(scores)), repeat=2):
        if labels[one] == 1 and labels[other] == 0:
            share = weights[one] * weights[other]
            order += share * ((scores[one] > scores[other]) + 0.5 * (scores[one] == scores[other]))
            whole += share
    return order / whole


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("distinct", [2, 1000])
def test_auc_is_that_of_torchmetrics_and_of_all_pairs(seed: int, distinct: int) -> None:
    logits, labels, weights = rows(300, seed, distinct)
    ones = np.ones(300)
    expected = binary_auroc(torch.sigmoid(torch.from_numpy(logits)), torch.from_numpy(labels).int()).item()
    assert metrics.auc(logits, labels, ones) == pytest.approx(expected, abs=1e-6)
    assert metrics.auc(logits, labels, ones) == pytest.approx(pairs(logits, labels, ones), rel=1e-12)
    assert metrics.auc(logits, labels, weights) == pytest.approx(pairs(logits, labels, weights), rel=1e-12)
    assert metrics.auc(labels, labels, ones) == 1 and metrics.auc(-labels, labels, ones) == 0


def test_a_weight_is_a_number_of_equal_rows() -> None:
    logits, labels, weights = rows()
    repeated = np.repeat(np.arange(len(logits)), weights.astype(int))
    names = ["auc", "log_loss", "ne", "calibration", "gauc"]
    groups = np.arange(len(logits)) % 7
    found = metrics.binary(logits, labels, names, weights, groups)
    expected = metrics.binary(logits[repeated], labels[repeated], names, None, groups[repeated])
    for name in names:
        assert found.values[name] == pytest.approx(expected.values[name], rel=1e-12), name


def test_log_loss_entropy_and_calibration_by_their_formulas() -> None:
    logits, labels, _ = rows()
    scores = 1 / (1 + np.exp(-logits))
    loss = -np.mean(labels * np.log(scores) + (1 - labels) * np.log(1 - scores))
    rate = labels.mean()
    found = metrics.binary(logits, labels, ["log_loss", "ne", "calibration"]).values
    assert found["log_loss"] == pytest.approx(loss, rel=1e-12)
    assert found["ne"] == pytest.approx(loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)), rel=1e-12)
    assert found["calibration"] == pytest.approx(scores.mean() / rate, rel=1e-12)
    constant = np.full(len(labels), math.log(rate / (1 - rate)))
    assert metrics.binary(constant, labels, ["ne"]).values["ne"] == pytest.approx(1, rel=1e-12)


def test_gauc_is_the_weighted_mean_over_groups_with_both_classes() -> None:
    logits, labels, _ = rows(400)
    groups = np.random.default_rng(1).integers(0, 60, 400)
    whole = shares = 0.0
    for group in range(60):
        mine = groups == group
        if 0 < labels[mine].sum() < mine.sum():
            whole += mine.sum() * pairs(logits[mine], labels[mine], np.ones(mine.sum()))
            shares += mine.sum()
    assert shares < 400  # some groups have one class only
    found = metrics.binary(logits, labels, ["gauc"], None, groups).values["gauc"]
    assert found == pytest.approx(whole / shares, rel=1e-12)


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_extreme_logits_are_finite(extreme: float) -> None:
    found = metrics.binary([extreme, 0.0], [0, 1], ["auc", "log_loss", "ne", "calibration"]).values
    assert all(value is not None and math.isfinite(value) for value in found.values())


@pytest.mark.parametrize(
    ("labels", "weights", "name", "why"),
    [
        ([1, 1], None, "auc", "all labels are 1"),
        ([0, 0], None, "ne", "all labels are 0"),
        ([0, 0], None, "calibration", "the mean label is 0"),
        ([0, 1], [1, 0], "auc", "all weights of one class are 0"),
        ([0, 1], [0, 0], "log_loss", "all weights are 0"),
        ([], None, "auc", "there are no rows"),
        ([], None, "log_loss", "there are no rows"),
        ([0, 1], None, "gauc", "train.gauc_group is not set"),
    ],
)
def test_a_metric_that_is_not_defined_says_why(
    labels: list[int], weights: list[float] | None, name: str, why: str
) -> None:
    found = metrics.binary([0.5] * len(labels), labels, [name], weights)
    assert found.values == {name: None} and found.notes == {name: why}


def test_metrics_of_numbers() -> None:
    found = metrics.regression([1.0, 2.0, 6.0], [1.0, 4.0, 4.0], ["auc", "calibration"], [1, 1, 2])
    assert found.values == {"mse": 3.0, "mae": 1.5, "calibration": pytest.approx(15 / 13)}
