"""Applies a model to rows: scores and their metrics."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from persia.config import Config
from persia.ctx import EmbeddingCtx
from persia.features import to_batch
from persia.serving import scores
from persia.trainer import metrics
from persia.trainer.batches import Rows, Unusual
from persia.trainer.objective import Objective
from persia.trainer.parts import metric_names
from persia.trainer.reports import EvaluationReport

Item = TypeVar("Item")
Floats = npt.NDArray[np.float32]


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield items while a thread makes the next item."""
    with ThreadPoolExecutor(1, thread_name_prefix="persia-read") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


def outputs_of(ctx: EmbeddingCtx, objective: Objective, rows: Iterator[Rows]) -> Iterator[tuple[Rows, list[Floats]]]:
    """Yield rows with the model's output for each label, ``[rows]``: a logit for ``bce``, a number for ``mse``.

    Args:
        ctx: An evaluation context with the model.
        objective: The labels and their losses.
        rows: The rows.
    """
    for each in ahead(rows):
        output, _ = ctx.forward(to_batch(each.samples, requires_grad=False))
        yield each, [scores.numbers(part) for part in objective.outputs(output)]


def scores_of(objective: Objective, outputs: list[Floats]) -> list[Floats]:
    """Return the score of each label: a probability for ``bce``, the output itself for ``mse``."""
    kinds = [kind for _, _, kind in objective.labels]
    return [scores.score(output, probability=kind == "bce") for kind, output in zip(kinds, outputs, strict=True)]


def evaluate(
    ctx: EmbeddingCtx, objective: Objective, rows: Iterator[Rows], config: Config, part: str, step: int
) -> EvaluationReport:
    """Evaluate a model on labeled rows.

    Args:
        ctx: An evaluation context with the model.
        objective: The labels.
        rows: The rows.
        config: The configuration, which lists the metrics.
        part: The name of the rows.
        step: The step of the model.
    """
    started = time.perf_counter()
    names = metric_names(config)
    labels = [name for name, _, _ in objective.labels]
    outputs: list[list[Floats]] = [[] for _ in labels]
    truth: list[list[Floats]] = [[] for _ in labels]
    weights: list[Floats] = []
    groups: list[npt.NDArray[np.uint64]] = []
    unusual = Unusual()
    for each, output in outputs_of(ctx, objective, rows):
        for place, label in enumerate(labels):
            outputs[place].append(output[place])
            truth[place].append(each.samples.label(label))
        weights += [] if each.weights is None else [each.weights]
        groups += [] if each.groups is None else [each.groups]
        unusual.add(len(each.samples), each.samples.report.counts)
    found: dict[str, metrics.Metrics] = {}
    loss: float | None = 0.0
    share = _joined(weights) if weights else None
    for (label, weight, kind), logits, values in zip(objective.labels, outputs, truth, strict=True):
        whole, target = _joined(logits), _joined(values)
        if kind == "bce":
            group = np.concatenate(groups) if groups else None
            found[label] = metrics.binary(whole, target, [*dict.fromkeys([*names, "log_loss"])], share, group)
            mean = found[label].values["log_loss"]
            if "log_loss" not in names:
                del found[label].values["log_loss"]
                found[label].notes.pop("log_loss", None)
        else:
            found[label] = metrics.regression(whole, target, names, share)
            mean = found[label].values["mse"]
        loss = None if loss is None or mean is None else loss + weight * mean
    report = ctx.evaluation_report
    return EvaluationReport(
        step,
        part,
        found,
        loss,
        unusual,
        report.missing_share,
        {slot: missing for slot, missing in report.slot_shares.items() if missing},
        time.perf_counter() - started,
    )


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
