"""The series of trainers and data-compose, and their conversion for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper limits of the histogram buckets in seconds, which equal those of servers."""


@dataclass(frozen=True)
class Series:
    """A metric series.

    Attributes:
        name: The name; for a histogram, the suffixes ``_bucket``, ``_sum`` and ``_count`` are added.
        kind: The type of metric.
        help: The description.
        labels: The labels, without ``rank`` or ``replica``, which identify the process.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


class Durations:
    """A histogram of seconds. One thread adds to it, without a lock; any thread may read it."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """The cumulative counts by upper limit."""
        return [*zip([*map(str, BOUNDS), "+Inf"], accumulate([*self.counts]), strict=True)]


class Families:
    """The values of one scrape.

    Args:
        process: The name and the value of the label that identifies this process.
    """

    def __init__(self, process: tuple[str, str]) -> None:
        self._label, self._value = process
        self._found: dict[str, Metric] = {}

    def add(self, series: Series, value: float | Durations, *labels: str) -> None:
        """Add a value.

        Args:
            series: The series.
            value: A number; :class:`Durations` for a histogram.
            *labels: The values of the labels of ``series``.
        """
        if (found := self._found.get(series.name)) is None:
            found = self._found[series.name] = _family(series, [self._label, *series.labels])
        values = [self._value, *labels]
        if isinstance(found, HistogramMetricFamily) and isinstance(value, Durations):
            found.add_metric(values, value.buckets, value.total)
        elif isinstance(found, CounterMetricFamily | GaugeMetricFamily) and not isinstance(value, Durations):
            found.add_metric(values, value)
        else:
            raise TypeError(f"{series.name}: a {series.kind} cannot have a value of type {type(value).__name__}")

    def __iter__(self) -> Iterator[Metric]:
        """Yield the added values, by series."""
        return iter(self._found.values())


def _family(series: Series, labels: list[str]) -> Metric:
    if series.kind == "histogram":
        return HistogramMetricFamily(series.name, series.help, labels=labels)
    if series.kind == "counter":
        return CounterMetricFamily(series.name, series.help, labels=labels)
    return GaugeMetricFamily(series.name, series.help, labels=labels)


def _all(prefix: str, found: Iterable[Series]) -> dict[str, Series]:
    return {each.name.removeprefix(prefix).removesuffix("_total"): each for each in found}


_T = "persia_trainer_"
TRAINER = _all(
    _T,
    (
        Series(f"{_T}step", "gauge", "The last step that was trained"),
        Series(f"{_T}generation", "gauge", "Generation of the run"),
        Series(f"{_T}steps_total", "counter", "Steps of this process"),
        Series(f"{_T}samples_total", "counter", "Samples of the steps of this process"),
        Series(f"{_T}skipped_steps_total", "counter", "Steps that were skipped for NaN or infinity"),
        Series(f"{_T}loss", "gauge", "Loss of the last step"),
        Series(f"{_T}grad_norm", "gauge", "Norm of the gradient of the model's weights in the last step"),
        Series(f"{_T}step_duration_seconds", "histogram", "Time of a step, without evaluations"),
        Series(f"{_T}call_duration_seconds", "histogram", "Time of a call of the training loop", ("call",)),
        Series(
            f"{_T}stage_seconds_total",
            "counter",
            "Time that the loop has spent in each stage: the stage with the most time limits a step",
            ("stage",),
        ),
        Series(f"{_T}engine_seconds_total", "counter", "Time of the engine's threads in each stage", ("stage",)),
        Series(f"{_T}staleness", "gauge", "Batches that are looked up and whose gradients are not applied yet"),
        Series(f"{_T}staleness_limit", "gauge", "Limit of the staleness (K)"),
        Series(f"{_T}ids_total", "counter", "Ids of looked-up batches", ("slot", "kind")),
        Series(f"{_T}lookup_rows_total", "counter", "Unique ids looked up, by outcome", ("outcome",)),
        Series(f"{_T}push_rows_total", "counter", "Rows pushed, by outcome", ("outcome",)),
        Series(f"{_T}checkpoint_age_seconds", "gauge", "Time of the steps since the last checkpoint was written"),
        Series(f"{_T}checkpoint_step", "gauge", "Step of the last checkpoint that was written, or resumed from"),
        Series(f"{_T}checkpoint_interval_steps", "gauge", "Steps between two checkpoints"),
        Series(f"{_T}checkpoint_failures_total", "counter", "Checkpoints that were abandoned after their retries"),
        Series(f"{_T}recovery_duration_seconds", "gauge", "Time from the start of the process to its first step"),
        Series(f"{_T}parameters", "gauge", "Weights of the model on this rank"),
        Series(f"{_T}parameter_bytes", "gauge", "Bytes of the weights of the model on this rank"),
        Series(f"{_T}device_memory_bytes", "gauge", "Memory of this process on its GPU", ("kind",)),
        Series(f"{_T}device_bytes", "gauge", "Memory of the GPU, of all processes", ("kind",)),
    ),
)
"""The series of a rank, by name without prefix and ``_total``. Their label is ``rank``."""

_D = "persia_data_"
DATA = _all(
    _D,
    (
        Series(f"{_D}batches_total", "counter", "Batches sent"),
        Series(f"{_D}samples_total", "counter", "Samples of the batches sent"),
        Series(f"{_D}make_duration_seconds", "histogram", "Time in which the script made a batch"),
        Series(f"{_D}send_duration_seconds", "histogram", "Time of sending a batch, with the wait for room"),
        Series(f"{_D}generation", "gauge", "Generation of the run that the batches are for"),
    ),
)
"""The series of a data-compose replica. Their label is ``replica``."""

PROCESS = {
    "process_resident_memory_bytes": "gauge",
    "process_cpu_seconds_total": "counter",
    "process_start_time_seconds": "gauge",
}
"""The series of prometheus_client that every Python process serves and that docs and dashboards use, with their
types."""
