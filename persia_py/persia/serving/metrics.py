"""The metrics of a serving process, for Prometheus."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
"""The format of :meth:`Metrics.text`."""

APIS = ("score", "rest", "grpc")
"""The APIs: ``POST /score``, and the two forms of the Open Inference Protocol."""

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Metrics:
    """Counters and histograms, in a separate registry.

    Attributes:
        requests: The number of requests, by ``api`` and ``outcome``, which is a kind of error or ``ok``.
        request_seconds: Time from the arrival of a request to its response, by ``api``.
        waiting: The number of accepted requests without a response.
        waiting_bytes: The size of these requests, in bytes.
        batch_rows: The number of rows in a batch.
        batch_seconds: The time from the transform of a batch's rows to their scores.
        rows: The number of scored rows.
        ids: The number of unique ids in batches.
        unseen_ids: The number of these ids without a row, such as those that did not occur in training; their vectors
            are zeros.
        unusual: The number of unusual values in rows, by ``feature`` and ``kind``.
        reloads: The number of attempts to load a bundle after the first, by ``outcome``.
        ready: 1 while clients should send requests, otherwise 0.
        bundle: 1, with the identity of the served bundle as a label.
        bundle_age: The time since the served bundle was exported, in seconds.
        bundle_load_age: The time since the process began to serve this bundle, in seconds.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        name = "persia_serving_"
        self._requests = Counter(f"{name}requests", "Requests by their outcome", ("api", "outcome"), registry=registry)
        seconds = Histogram(
            f"{name}request_duration_seconds",
            "Time from the arrival of a request to its response",
            ("api",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_seconds = {api: seconds.labels(api) for api in APIS}
        self._ok = {api: self._requests.labels(api, "ok") for api in APIS}
        self.waiting = Gauge(f"{name}waiting_requests", "Requests without a response", registry=registry)
        self.waiting_bytes = Gauge(
            f"{name}waiting_bytes", "Bytes of the requests without a response", registry=registry
        )
        self.batch_rows = Histogram(f"{name}batch_rows", "Rows of a batch", buckets=_ROWS, registry=registry)
        self.batch_seconds = Histogram(
            f"{name}batch_seconds", "Time that scoring a batch took", buckets=_SECONDS, registry=registry
        )
        self.rows = Counter(f"{name}rows", "Scored rows", registry=registry)
        self.ids = Counter(f"{name}ids", "Unique ids of batches", registry=registry)
        self.unseen_ids = Counter(f"{name}unseen_ids", "Unique ids of batches that have no row", registry=registry)
        self.unusual = Counter(
            f"{name}unusual_values", "Values that a feature replaced", ("feature", "kind"), registry=registry
        )
        self.reloads = Counter(
            f"{name}reloads", "Attempts to load a bundle after the first", ("outcome",), registry=registry
        )
        for outcome in ("ok", "failed"):
            self.reloads.labels(outcome)
        self._ready = Gauge(f"{name}ready", "1 while clients should send requests", registry=registry)
        self._bundle = Gauge(f"{name}bundle", "The served bundle", ("bundle",), registry=registry)
        self._bundle_age = Gauge(
            f"{name}bundle_age_seconds", "Time since the served bundle was exported", registry=registry
        )
        self._bundle_load_age = Gauge(
            f"{name}bundle_load_age_seconds", "Time since the process began to serve this bundle", registry=registry
        )

    def answered(self, api: str, outcome: str, seconds: float) -> None:
        """Record that a request has received its response."""
        (self._ok[api] if outcome == "ok" else self._requests.labels(api, outcome)).inc()
        self.request_seconds[api].observe(seconds)

    def is_ready(self, ready: Callable[[], bool]) -> None:
        """Report what a function returns: whether clients should send requests."""
        self._ready.set_function(lambda: float(ready()))

    def serves(self, identity: str, exported_at: float) -> None:
        """Record which bundle is served from now on.

        Args:
            identity: The unique name of the bundle.
            exported_at: The time at which it was exported, as Unix time. The age of a bundle that another machine
                exported is only as accurate as the clocks of both machines. The age is never negative.
        """
        began = time.monotonic()
        self._bundle.clear()
        self._bundle.labels(identity).set(1)
        self._bundle_age.set_function(lambda: max(0.0, time.time() - exported_at))
        self._bundle_load_age.set_function(lambda: time.monotonic() - began)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)
