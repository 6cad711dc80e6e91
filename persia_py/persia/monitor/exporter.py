"""Serves the metrics of this process on a port, and pushes the metrics of a short run to a gateway.

``PERSIA_METRICS_LISTEN`` is ``HOST:PORT``, or ``off``. If it is not set, a process of a job uses port 9464, or a free
port if 9464 is in use. With a token file it listens on all addresses, without one on loopback. In the embedded mode, or
if the global configuration of the job disables metrics, no port is opened unless the variable is set.
"""

import errno
import ipaddress
import os
import shlex
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.registry import Collector

from persia.monitor import port as metrics_port
from persia.runtime import job
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger, next_step
from persia.runtime.settings import settings
from persia.serving import access
from persia_core.discovery import advertised_host

_logger = get_logger("monitor")

PORT = 9464
"""The default port, which servers also use."""
SHORT_S = 60.0
"""The run time in seconds above which the metrics of a run with a port are not pushed, because Prometheus has scraped
them."""
_LAST_PORT = 65_535
_PUSH_S = 5.0
"""Seconds within which the gateway must respond."""
_VARIABLE = "PERSIA_METRICS_LISTEN"
_GATEWAY = "PERSIA_METRICS_GATEWAY_ADDR"


class Exporter:
    """Serves the metrics of this process until it ends.

    Args:
        collector: The metrics, in addition to those of the process itself.
        name: The name of the process for a gateway, such as ``trainer-0``.
        offset: The number added to the port in ``PERSIA_METRICS_LISTEN``: the local rank.

    Attributes:
        address: The address at which others reach it, ``HOST:PORT``; empty if it has no port.

    Raises:
        UsageError: The address is invalid or in use, or the URL of the gateway contains an ``@``.
        AuthError: Other hosts could reach the port, and there is no token file.
    """

    def __init__(self, collector: Collector, name: str, offset: int = 0) -> None:
        self._name, self._since = name, time.monotonic()
        self._gateway = _gateway()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(collector)
        self.address = ""
        if (place := _place()) is None:
            return
        host, port = place
        port = port + offset if port else 0
        if port > _LAST_PORT:
            raise UsageError(
                f"{_VARIABLE}: local rank {offset} would have port {port}, above {_LAST_PORT}",
                hint=f"choose a port of at most {_LAST_PORT} minus the number of ranks on a host, or port 0, with "
                "which each rank uses a free port",
            )
        try:
            try:
                served = metrics_port.serve(host, port, self.registry)
            except OSError as error:
                if settings.metrics_listen is not None or error.errno != errno.EADDRINUSE:
                    raise
                port = 0
                served = metrics_port.serve(host, port, self.registry)
        except OSError as error:
            free = f", {_VARIABLE}=127.0.0.1:0 for a free port," if port else ","
            raise UsageError(
                f"{_VARIABLE}: cannot listen on {host}:{port}: {error.strerror or error}",
                hint=f"choose another address{free} or {_VARIABLE}=off for no metrics",
            ) from error
        self.address = f"{_reached_by(host)}:{served}"
        _logger.info("serving metrics at http://%s/metrics", self.address)

    def push(self) -> None:
        """Push the metrics to ``PERSIA_METRICS_GATEWAY_ADDR``, if it is set and the run was short or has no port.

        An error is logged, and does not affect the outcome of the run.
        """
        gateway = self._gateway
        if gateway is None or (self.address and time.monotonic() - self._since > SHORT_S):
            return
        try:
            prometheus_client.push_to_gateway(
                gateway, job=run_id(), registry=self.registry, grouping_key={"instance": self._name}, timeout=_PUSH_S
            )
        except Exception as error:  # reading the metrics of a failed run may raise any error, such as one of CUDA
            step = next_step(error)
            if isinstance(error, OSError) and not step:
                step = f"; next: persia doctor --gateway {shlex.quote(gateway)}"
            _logger.warning("%s=%s: cannot push the metrics of this run: %s%s", _GATEWAY, gateway, error, step)
        else:
            _logger.info("metrics of this run pushed to %s", gateway)


Metrics = TypeVar("Metrics", bound=Collector)


class Exported(Generic[Metrics]):
    """The metrics of this process and their port, from the first start until the process ends.

    Args:
        make: Creates the metrics.

    Attributes:
        own: The metrics and their port; None before the first start.
    """

    def __init__(self, make: Callable[[], Metrics]) -> None:
        self._make = make
        self.own: tuple[Metrics, Exporter] | None = None

    def start(self, name: str, offset: int = 0) -> tuple[Metrics, Exporter] | None:
        """Return the metrics and their port; None if none are wanted.

        Args:
            name: As in :class:`Exporter`.
            offset: As in :class:`Exporter`.

        Raises:
            UsageError: The address for metrics is invalid or in use.
            AuthError: Other hosts could reach the port, and there is no token file.
        """
        if not wanted():
            return None
        if self.own is None:
            metrics = self._make()
            self.own = metrics, Exporter(metrics, name, offset)
        return self.own


def wanted() -> bool:
    """Whether this process has a metrics port or a gateway. Otherwise nothing needs to be counted."""
    return settings.metrics_gateway is not None or _place() is not None


def _gateway() -> str | None:
    """Return the push gateway.

    Raises:
        UsageError: The URL of the gateway contains an ``@``, and so a user or a password.
    """
    given = settings.metrics_gateway
    if given is None or "@" not in given:
        return given
    raise UsageError(
        f"{_GATEWAY} contains an @; a URL with a user or a password is not supported",
        hint=f"use a gateway on the network of the job that requires no password: {_GATEWAY}=http://HOST:9091",
    )


def _place() -> tuple[str, int] | None:
    given = settings.metrics_listen
    if given == "off" or (given is None and (settings.nats_url is None or not job.serves_metrics())):
        return None
    if given is None:
        return ("127.0.0.1" if settings.token_file is None else "0.0.0.0"), PORT  # noqa: S104 - as servers do
    return access.address(given, _VARIABLE)


def _reached_by(host: str) -> str:
    """Return the host at which others reach this process."""
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        unspecified = False
    if not unspecified:
        return f"[{host}]" if ":" in host else host
    url = settings.nats_url
    if url is None:
        return os.uname().nodename
    return advertised_host(url, timeout_s=settings.start_timeout)  # NATS may start after this process


def run_id() -> str:
    """Return the name of the job, which is ``persia`` in the embedded mode without ``PERSIA_JOB``."""
    return job.job_name() if settings.nats_url is not None else settings.job or "persia"
