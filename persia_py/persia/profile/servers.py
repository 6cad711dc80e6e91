"""The work of each server during a profile: the difference of its metrics between two readings."""

import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from persia.discovery import nats, services
from persia.embedding.listed import listed
from persia.runtime.errors import PersiaError
from persia.runtime.job import job_name
from persia.runtime.logging import get_logger, next_step

_logger = get_logger("profile")

_DEADLINE_S = 2.0
"""Seconds within which a server must return its metrics."""
_READERS = 8
"""The number of servers that are read at the same time."""
_SERIES = {
    ("persia_request_duration_seconds_sum", "lookup"): "lookup_s",
    ("persia_request_duration_seconds_count", "lookup"): "lookups",
    ("persia_request_duration_seconds_sum", "push"): "push_s",
    ("persia_request_duration_seconds_count", "push"): "pushes",
    ("persia_lookup_rows_total", None): "rows",
    ("persia_log_waits_total", None): "log_waits",
}
"""The series and method for each name in the profile."""


@dataclass
class Servers:
    """Reads the metrics of the servers of this job at the start and at the end of the recorded steps.

    A separate thread reads the servers at the start, because training must not wait for them.

    Attributes:
        addresses: The address of the metrics of each server, by its index.
    """

    addresses: dict[int, str]
    _first: dict[int, dict[str, float]] = field(default_factory=dict)
    _reading: threading.Thread | None = None

    @classmethod
    def find(cls) -> "Servers":
        """Query NATS for the servers that serve metrics.

        If NATS does not respond, all servers are omitted. Omitted servers are logged.
        """
        try:
            found = nats.services(services.nats_url(), "persia-server", job=job_name())
        except PersiaError as error:  # a profile without servers is better than none
            _logger.warning("profile: the servers are omitted: %s%s", error, next_step(error))
            return cls({})
        if silent := [each.number("index") for each in found if not each.text("metrics")]:
            _logger.warning(
                "profile: servers that serve no metrics are omitted: %s; next: set enable_metrics: true in "
                "global_config.yml, or PERSIA_METRICS_LISTEN=HOST:PORT for each server",
                listed(silent),
            )
        return cls({each.number("index"): each.text("metrics") for each in found if each.text("metrics")})

    def begin(self) -> None:
        """Start the first reading."""

        def run() -> None:
            self._first = self._read()

        self._reading = threading.Thread(target=run, name="persia-profile-servers", daemon=True)
        self._reading.start()

    def end(self) -> dict[str, dict[str, float]]:
        """Return the work of each server since :meth:`begin`, by its index as text.

        Servers that restarted, or whose metrics could not be read both times, are omitted.
        """
        if self._reading is not None:
            self._reading.join()
            self._reading = None
        found: dict[str, dict[str, float]] = {}
        for index, after in sorted(self._read().items()):
            if (before := self._first.get(index)) is None:
                continue
            if any(after[name] < value for name, value in before.items()):
                _logger.warning("profile: server %d is omitted: it has restarted since the profile began", index)
                continue
            found[str(index)] = {name: round(value - before[name], 6) for name, value in after.items()}
        return found

    def _read(self) -> dict[int, dict[str, float]]:
        with ThreadPoolExecutor(_READERS) as pool:
            found = pool.map(self._read_one, self.addresses.items())
            return {index: values for index, values in found if values is not None}

    def _read_one(self, server: tuple[int, str]) -> tuple[int, dict[str, float] | None]:
        index, address = server
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=_DEADLINE_S) as response:
                return index, parse(response.read().decode())
        except (OSError, ValueError) as error:
            why = error.reason if type(error) is urllib.error.URLError else error
            _logger.warning("profile: server %d is omitted: cannot read http://%s/metrics: %s", index, address, why)
            return index, None


def parse(text: str) -> dict[str, float]:
    """Return the sums that a profile needs from the metrics of a server, in the text format of Prometheus.

    Raises:
        ValueError: The text has another format.
    """
    found = dict.fromkeys(_SERIES.values(), 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = _SERIES.get((sample.name, sample.labels.get("method")))
            if name is not None:
                found[name] += sample.value
    return found


SKEW = 1.5
"""The ratio of the rows looked up on a server to the mean of all servers, above which :func:`blame` names the server.

Hashing spreads ids evenly."""
SLOW = 3.0
"""The ratio between the request times of a server and of the fastest one from which :func:`blame` names the server."""
_NOTICEABLE_S = 0.001
"""The request time in seconds below which a server is not named as slow."""


def blame(servers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a text that names the server that slows down the run, and why; None if no server stands out.

    Args:
        servers: The work of each server, see :meth:`Servers.end`.
    """
    if waits := {name: each["log_waits"] for name, each in servers.items() if each["log_waits"]}:
        name = max(waits, key=lambda each: waits[each])
        return (
            f"server {name} waited {waits[name]:.0f} times for the disk of its log: move its data directory to a "
            "faster disk (persia doctor --measure shows the time of a write)"
        )
    if len(servers) < 2:
        return None
    rows = {name: float(each["rows"]) for name, each in servers.items()}
    mean = sum(rows.values()) / len(rows)
    hot = max(rows, key=lambda name: rows[name])
    if mean and rows[hot] > SKEW * mean:
        return (
            f"server {hot} is asked for {rows[hot] / sum(rows.values()):.0%} of the rows, {rows[hot] / mean:.1f} times "
            "the mean: a few ids occur in most batches, so more servers do not help; give small features a smaller "
            "dim, or hash ids that have a pattern (persia status shows the tables of each server)"
        )
    times = {
        name: (each["lookup_s"] + each["push_s"]) / count
        for name, each in servers.items()
        if (count := each["lookups"] + each["pushes"])
    }
    if len(times) < 2:
        return None
    slow, fast = max(times, key=lambda name: times[name]), min(times.values())
    if times[slow] < max(_NOTICEABLE_S, SLOW * fast):
        return None
    return (
        f"server {slow} takes {1e3 * times[slow]:.1f} ms for a request, the fastest one {1e3 * fast:.1f} ms: see the "
        "processors, the memory and the network of its machine (persia status --watch)"
    )
