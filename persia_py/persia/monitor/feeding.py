"""The counters of a data-compose replica."""

import time
from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from persia.monitor.exporter import Exported, Exporter
from persia.monitor.series import DATA, Durations, Families
from persia.runtime.settings import settings


class FeedMetrics(Collector):
    """The metrics of this replica.

    Attributes:
        generation: The generation of the run.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._batches = self._samples = 0
        self._make, self._send = Durations(), Durations()
        self._mark: float | None = None

    def begin(self, generation: int) -> None:
        """Start timing the script, which makes the next batch."""
        self.generation, self._mark = generation, time.monotonic()

    def sent(self, samples: int, began: float) -> None:
        """Count a batch.

        Args:
            samples: The number of samples in the batch.
            began: The time at which sending began, in seconds of ``time.monotonic``.
        """
        now = time.monotonic()
        if self._mark is not None:
            self._make.add(began - self._mark)
        self._send.add(now - began)
        self._batches += 1
        self._samples += samples
        self._mark = now

    def collect(self) -> Iterable[Metric]:
        """Return the current values."""
        found = Families(("replica", str(settings.place.replica_index)))
        found.add(DATA["batches"], self._batches)
        found.add(DATA["samples"], self._samples)
        found.add(DATA["make_duration_seconds"], self._make)
        found.add(DATA["send_duration_seconds"], self._send)
        found.add(DATA["generation"], self.generation)
        return found


_exported = Exported(FeedMetrics)


def start() -> tuple[FeedMetrics, Exporter] | None:
    """Return the metrics of this replica and their port; see :meth:`Exported.start`."""
    return _exported.start(f"data-compose-{settings.place.replica_index}")
