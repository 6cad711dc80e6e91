"""The reports of a training run."""

import math
from dataclasses import dataclass, field
from typing import Any

from persia.trainer.batches import Unusual
from persia.trainer.metrics import Metrics


@dataclass(frozen=True)
class StepReport:
    """The steps since the last report.

    Attributes:
        step: The last step.
        total_steps: The number of steps of the whole run; None if unknown.
        epoch: The epoch of the step, from 1.
        loss: The mean loss of these steps, without steps that were skipped because of NaN or infinity. NaN if all were
            skipped.
        samples_per_s: Samples trained per second, without evaluations.
        learning_rate: The learning rate of the model in the last step.
        staleness: The number of pushes in flight when this report was made.
        shares: The share of the time that was spent in each of :data:`persia.profile.stages.STAGES`.
        grad_norm: The norm of the gradient of the model's weights in the last step, before it is clipped. None if the
            model has no gradient.
        memory: The memory of this process in bytes (``resident``), and on a GPU ``allocated``, ``reserved``,
            ``max_allocated`` and ``max_reserved``.
    """

    step: int
    total_steps: int | None
    epoch: int
    loss: float
    samples_per_s: float
    learning_rate: float
    staleness: int
    shares: dict[str, float]
    grad_norm: float | None = None
    memory: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the line of ``metrics.jsonl``."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "loss": round(self.loss, 6) if math.isfinite(self.loss) else None,
            "samples_per_s": round(self.samples_per_s),
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm if self.grad_norm is not None and math.isfinite(self.grad_norm) else None,
            "staleness": self.staleness,
            "shares": {name: round(share, 3) for name, share in self.shares.items()},
            "memory": self.memory,
        }

    def __str__(self) -> str:
        """Return the report as one line."""
        of = "" if self.total_steps is None else f"/{self.total_steps}"
        limit = max(self.shares, key=lambda name: self.shares[name])
        norm = "" if self.grad_norm is None else f"grad norm {self.grad_norm:.3g}  "
        return (
            f"step {self.step}{of}  epoch {self.epoch}  loss {self.loss:.4f}  {norm}"
            f"{self.samples_per_s:,.0f} samples/s  "
            f"staleness {self.staleness}  limited by {limit} ({self.shares[limit]:.0%})"
        )


@dataclass(frozen=True)
class EvaluationReport:
    """The report of an evaluation.

    Attributes:
        step: The step of the model.
        part: ``valid``, ``test``, or the name of other rows.
        labels: The metrics of each label.
        loss: The loss over all rows, as in training; None without rows, or if an output is NaN or infinite.
        unusual: Counts of unusual values in the rows.
        without_row: The share of looked-up ids that have no row.
        slots_without_row: The share of looked-up ids that have no row, for each slot with such ids, in a sample of the
            batches.
        seconds: The duration, in seconds.
        is_best: Whether it is the best evaluation so far.
        files: The files of the rows, for a report of :meth:`Trainer.evaluate`.
    """

    step: int
    part: str
    labels: dict[str, Metrics]
    loss: float | None
    unusual: Unusual = field(default_factory=Unusual)
    without_row: float = 0.0
    slots_without_row: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    is_best: bool = False
    files: tuple[str, ...] = ()

    def value(self, metric: str) -> float | None:
        """Return a metric of the first label, or the ``loss``; None if it is not defined."""
        if metric == "loss":
            return self.loss
        return next(iter(self.labels.values())).values.get(metric)

    def results(self) -> dict[str, Any]:
        """Return the results, JSON-serializable."""
        return {
            "step": self.step,
            "loss": self.loss,
            "labels": {name: metrics.as_dict() for name, metrics in self.labels.items()},
            "ids_without_row": round(self.without_row, 6),
            "slots_without_row": {slot: round(share, 6) for slot, share in self.slots_without_row.items()},
            "unusual": self.unusual.counts,
            "seconds": round(self.seconds, 3),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the line of ``metrics.jsonl``."""
        results = self.results()
        return {
            "step": results["step"],
            self.part: {"loss": results["loss"], **results["labels"]},
            **({"best": True} if self.is_best else {}),
        }

    def __str__(self) -> str:
        """Return the report as one line."""
        shown = []
        for label, metrics in self.labels.items():
            name = f"{label}: " if len(self.labels) > 1 else ""
            values = [f"{title(each)} {_number(value)}" for each, value in metrics.values.items()]
            shown.append(name + "  ".join(values))
        return f"step {self.step}  {self.part}  " + "  ".join(shown) + ("  best so far" if self.is_best else "")


def title(metric: str) -> str:
    """Return the display name of a metric."""
    names = {"auc": "AUC", "gauc": "GAUC", "ne": "NE", "log_loss": "log-loss", "mse": "MSE", "mae": "MAE"}
    return names.get(metric, metric)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
