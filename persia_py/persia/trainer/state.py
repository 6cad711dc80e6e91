"""The state of a trainer in a checkpoint, in addition to rows, model, optimizers and the data position."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from persia.config.blocks import EarlyStopBlock
from persia.runtime.errors import CheckpointError
from persia.runtime.logging import get_logger
from persia.trainer.batches import Unusual
from persia.trainer.reports import EvaluationReport

_logger = get_logger("trainer")

HIGHER_IS_BETTER = ("auc", "gauc")


@dataclass
class Best:
    """The best evaluation of the validation set.

    Attributes:
        step: The step of the evaluation.
        metric: The name of the metric.
        value: The value of the metric.
    """

    step: int
    metric: str
    value: float


@dataclass
class RowsAtATime:
    """The number of rows of a batch on which the model runs at a time, after memory ran out with more rows.

    Attributes:
        given: The value in the configuration at that time; None means the whole batch.
        used: The value that is used instead; None if memory never ran out.
    """

    given: int | None = None
    used: int | None = None

    def of(self, given: int | None) -> int | None:
        """Return the number of rows for a configuration. If its value has changed since, the new value is used."""
        return given if self.used is None or given != self.given else self.used

    def use(self, rows: int, given: int | None) -> None:
        """Use fewer rows than the configuration specifies."""
        self.given, self.used = given, rows


@dataclass
class TrainerState:
    """The state of a trainer. It is one of the states of :class:`persia.ctx.Checkpoints`.

    Attributes:
        digest: The digest of the transform; a checkpoint of another transform is refused.
        best: The best evaluation, if early stopping is configured.
        without_improvement: The number of evaluations since the best one.
        stopped: Whether training has stopped early.
        unusual: Counts of unusual values in the rows that were trained on.
        evaluations: The results of the validation set, by step.
        seconds: The duration of training without evaluations, in seconds.
        samples: The number of samples trained in this time.
        micro_batch: The number of rows on which the model runs at a time.
        cost_usd: The cost of the run so far, if a price is configured (``budget``).
    """

    digest: str
    best: Best | None = None
    without_improvement: int = 0
    stopped: bool = False
    unusual: Unusual = field(default_factory=Unusual)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    samples: int = 0
    micro_batch: RowsAtATime = field(default_factory=RowsAtATime)
    cost_usd: float = 0.0

    def judge(self, report: EvaluationReport, stop: EarlyStopBlock) -> bool:
        """Record an evaluation, and return whether it is the best so far. An undefined metric is no improvement."""
        value = report.value(stop.metric)
        sign = 1 if stop.metric in HIGHER_IS_BETTER else -1
        improved = value is not None and (self.best is None or sign * (value - self.best.value) > stop.min_delta)
        if improved and value is not None:
            self.best = Best(report.step, stop.metric, value)
            self.without_improvement = 0
        else:
            self.without_improvement += 1
        self.stopped = self.stopped or self.without_improvement >= stop.patience
        return improved

    def warn_of_empty_features(self, types: Mapping[str, str]) -> None:
        """Log the features that have no value in any trained row.

        Args:
            types: The type of each feature.
        """
        rows, counts = self.unusual.rows, self.unusual.counts
        for name in (name for name, kind in types.items() if kind not in ("bag", "sequence", "cross")):
            if rows and counts.get(name, {}).get("null", 0) == rows:
                _logger.warning(
                    "feature %r is null in all rows that were trained on: correct its column, or remove the feature",
                    name,
                )

    def results(self) -> dict[str, Any]:
        """Return the part of a run's summary that depends on the state.

        ``valid`` has the results of the model in use.
        """
        best = self.best
        used = [each for each in self.evaluations if best is None or each["step"] == best.step]
        return {
            "early_stopped": self.stopped,
            "samples_per_s": round(self.samples / self.seconds) if self.seconds else None,
            "training_seconds": round(self.seconds, 3),
            "unusual": {"rows": self.unusual.rows, "counts": self.unusual.counts},
            "valid": used[-1] if used else None,
            "best": None if best is None else {**vars(best), "checkpoint": f"best/step-{best.step}"},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        best = self.best
        return {
            "digest": self.digest,
            "best": None if best is None else [best.step, best.metric, best.value],
            "without_improvement": self.without_improvement,
            "stopped": self.stopped,
            "rows": self.unusual.rows,
            "unusual": {feature: dict(kinds) for feature, kinds in self.unusual.counts.items()},
            "evaluations": [*self.evaluations],
            "seconds": self.seconds,
            "samples": self.samples,
            "micro_batch": [self.micro_batch.given, self.micro_batch.used],
            "cost_usd": self.cost_usd,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned.

        Raises:
            CheckpointError: The state belongs to a different transform, which gives equal rows different ids or floats.
        """
        if state_dict["digest"] != self.digest:
            raise CheckpointError(
                f"the model of the checkpoint was trained with the transform {state_dict['digest']}, but the current "
                f"transform is {self.digest}: ids, floats or labels would differ",
                hint="restore the transform.json of the checkpoint's run, or start a new run",
            )
        best = state_dict["best"]
        self.best = None if best is None else Best(int(best[0]), str(best[1]), float(best[2]))
        self.without_improvement = int(state_dict["without_improvement"])
        self.stopped = bool(state_dict["stopped"])
        self.unusual = Unusual(int(state_dict["rows"]), {**state_dict["unusual"]})
        self.evaluations = [*state_dict["evaluations"]]
        self.seconds, self.samples = float(state_dict["seconds"]), int(state_dict["samples"])
        # checkpoints of older versions lack the next two values
        self.micro_batch = RowsAtATime(*state_dict.get("micro_batch", (None, None)))
        self.cost_usd = float(state_dict.get("cost_usd", 0.0))
