"""The status of a job: its processes, their addresses and health, and problems of the job as a whole."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from persia.discovery import nats
from persia.doctor import vocabulary
from persia.feed import channel
from persia.proto import tables_pb2, tables_pb2_grpc

_DEADLINE = 2.0
"""Seconds within which a process must respond."""
_PIPED_COLUMNS = 240
"""The width of the table if the output is not a terminal."""
_NEEDED = ("persia-server", "persia-middleware")
"""Services of which training needs at least one process."""
_SKEW = 1.5
"""The maximum ratio between the rows of one server and the mean of all servers; hashing spreads ids evenly."""
_SKEW_ROWS = 10_000
"""The number of rows on all servers below which a difference is not significant."""
Cause = Literal["absent", "missing", "duplicate", "replicas", "version", "protocol", "generation", "health", "skew"]
"""The kinds of problems of a job. ``absent``: no process of a service has announced itself. ``missing``, ``duplicate``:
the index of a replica has no process, or several. ``replicas``, ``version``, ``protocol``, ``generation``: processes
have different values of it. ``health``: a process does not serve. ``skew``: one server holds many more rows than the
mean."""
_Attribute = Literal["replicas", "version", "protocol", "generation"]
_COUNTED = ("persia-server", "persia-data", "persia-trainer")
"""Services whose replicas have distinct indices. Middlewares are equivalent, and can be scaled while they run."""


@dataclass(frozen=True)
class Process:
    """A process that has announced itself.

    Attributes:
        service: ``persia-server``, ``persia-middleware``, ``persia-trainer`` or ``persia-data``.
        job: The name of the job.
        index: Its index among the replicas.
        replicas: The number of replicas in its configuration.
        address: The address at which it serves; empty if it accepts no connections.
        metrics: The address of its metrics; empty if it has none.
        host: The name of its machine.
        version: The version of persia.
        protocol: The version of the protocol.
        started: The time of its start.
        health: ``serving``, ``not serving``, the error of the health check, or ``announced`` if it has no address.
        generation: The generation of its rows; None unless the process is a server that responded.
        rows: The number of its rows; None unless the process is a server that responded.
        tables: The statistics of its part of each table; empty unless the process is a server that responded.
        payload_bytes: The bytes of weights and optimizer state; None unless the process is a server that responded.
        threads: The torch threads of a rank; None for other processes.
    """

    service: str
    job: str
    index: int
    replicas: int
    address: str
    metrics: str
    host: str
    version: str
    protocol: str
    started: str
    health: str
    generation: int | None
    rows: int | None
    tables: list[dict[str, Any]]
    payload_bytes: int | None = None
    threads: int | None = None

    @property
    def name(self) -> str:
        """The name of the service and the index."""
        return f"{self.service} {self.index}"


@dataclass(frozen=True)
class Problem:
    """A problem of a job.

    Attributes:
        cause: The kind of problem.
        text: The problem, for a user.
    """

    cause: Cause
    text: str


@dataclass(frozen=True)
class Status:
    """The processes of one or all jobs, and the problems that were found."""

    processes: list[Process]
    problems: list[Problem]

    def targets(self) -> str:
        """Return the addresses of metrics as JSON, for Prometheus's ``file_sd_configs``."""
        found = [
            {
                "targets": [one.metrics],
                "labels": {"service": one.service, "replica": str(one.index), "persia_job": one.job},
            }
            for one in self.processes
            if one.metrics
        ]
        return json.dumps(found, indent=1)

    def to_json(self) -> str:
        """Return the status as JSON."""
        processes, problems = [asdict(one) for one in self.processes], [one.text for one in self.problems]
        return json.dumps({"processes": processes, "problems": problems}, indent=1)


def status(url: str, job: str | None) -> Status:
    """Query NATS for the processes, and each process for its health.

    Args:
        url: The URL of NATS.
        job: The job; None means all jobs.

    Raises:
        UnreachableError: NATS does not respond.
        AuthError: NATS refuses the password.
    """
    processes = _ask(nats.services(url, job=job))
    jobs = sorted({one.job for one in processes} | ({job} if job else set()))
    problems: list[Problem] = []
    for name in jobs:
        prefix = "" if len(jobs) == 1 else f"job {name}: "
        of_job = problems_of([one for one in processes if one.job == name])
        problems += [replace(problem, text=prefix + problem.text) for problem in of_job]
    return Status(processes, problems)


def show(found: Status) -> None:
    """Print a table of the processes, the generation of each job, and the problems."""
    jobs = {one.job for one in found.processes}
    table = Table(box=None, pad_edge=False)
    columns = ["service", "replica", "health", "address", "metrics", "host", "version"]
    if any(one.threads is not None for one in found.processes):
        columns.append("threads")
    for column in ["job", *columns] if len(jobs) > 1 else columns:
        table.add_column(column, overflow="fold")
    for one in found.processes:
        replica = f"{one.index} of {one.replicas}"
        cells = [one.service, replica, one.health, one.address, one.metrics, one.host, one.version]
        cells += ["" if one.threads is None else str(one.threads)] if "threads" in columns else []
        table.add_row(*([one.job, *cells] if len(jobs) > 1 else cells))
    wide = None if sys.stdout.isatty() else _PIPED_COLUMNS
    console = Console(highlight=False, markup=False, soft_wrap=True, width=wide)
    if found.processes:
        console.print(table)
    for job in sorted(jobs):
        servers = [one for one in found.processes if one.job == job and one.generation is not None]
        if servers:
            rows = sum(one.rows or 0 for one in servers)
            generation = max(one.generation or 0 for one in servers)
            run = (
                f"generation {generation}, {rows:,} rows on {len(servers)} server{'' if len(servers) == 1 else 's'}"
                if generation
                else "no run has begun"
            )
            console.print(f"{job}: {run}")
            if generation and (parts := [part for one in servers for part in one.tables]):
                vocabulary.show(vocabulary.of_parts(parts))
    for problem in found.problems:
        console.print(f"problem: {problem.text}")


def _ask(services: Iterable[nats.Service]) -> list[Process]:
    pending = [(service, *_calls(service)) for service in services]
    processes = []
    for service, connection, health, stats in pending:
        rows = _stats(stats)
        processes.append(
            Process(
                service=service.kind,
                job=service.text("job"),
                index=service.number("index"),
                replicas=service.number("replicas"),
                address=service.text("address"),
                metrics=service.text("metrics"),
                host=service.text("host"),
                version=service.text("version"),
                protocol=service.text("protocol"),
                started=service.text("started"),
                health=_health(health),
                generation=None if rows is None else int(rows.get("generation", 0)),
                rows=None if rows is None else sum(rows["rows"]),
                threads=service.number("threads", 0) or None,
                payload_bytes=None if rows is None else int(rows.get("payload_bytes", 0)),
                tables=[] if rows is None else rows.get("tables", []),
            )
        )
        if connection is not None:
            connection.close()
    return processes


def _calls(service: nats.Service) -> tuple[grpc.Channel | None, Any, Any]:
    """Start the calls to a process: its health and, if it is a server, its statistics."""
    address = service.text("address")
    if not address:
        return None, None, None
    connection = channel.connect(address)
    health = health_pb2_grpc.HealthStub(connection).Check.future(health_pb2.HealthCheckRequest(), timeout=_DEADLINE)
    stats = None
    if service.kind == "persia-server":
        server: Any = tables_pb2_grpc.EmbeddingServerStub  # the generated code has no types
        stats = server(connection).Stats.future(
            tables_pb2.StatsRequest(), timeout=_DEADLINE, metadata=channel.metadata("admin")
        )
    return connection, health, stats


def _health(call: Any) -> str:
    if call is None:
        return "announced"
    try:
        answer = call.result()
    except grpc.RpcError as error:
        return str(error.code().name).lower().replace("_", " ")
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)).lower().replace("_", " ")


def _stats(call: Any) -> Mapping[str, Any] | None:
    if call is None:
        return None
    try:
        answered = call.result().answered
    except grpc.RpcError:
        return None  # the health check shows most reasons, but not a refused token
    return None if not answered else dict(json.loads(answered[0].stats))


def problems_of(processes: list[Process]) -> list[Problem]:
    """Return the problems of a job, from its processes."""
    absent = [service for service in _NEEDED if not _of(processes, service)]
    found = [Problem("absent", f"no {service} has announced itself") for service in absent]
    for service in _COUNTED:
        found += _gaps(service, _of(processes, service))
    found += _disagreement("version", processes) + _disagreement("protocol", processes)
    found += _disagreement("generation", [one for one in processes if one.generation is not None])
    bad = [one for one in processes if one.health not in {"serving", "announced"}]
    found += [Problem("health", f"{one.name} at {one.address}: {one.health}") for one in bad]
    return found + _skewed([one for one in processes if one.rows is not None])


def _skewed(servers: list[Process]) -> list[Problem]:
    """Return a problem if a server holds many more rows than the mean."""
    held = {one.name: one.rows or 0 for one in servers}
    total = sum(held.values())
    if len(held) < 2 or total < _SKEW_ROWS:
        return []
    name = max(held, key=lambda each: held[each])
    skew = held[name] * len(held) / total
    if skew <= _SKEW:
        return []
    text = f"{name} holds {held[name]:,} of {total:,} rows, {skew:.1f} times the mean of {len(held)} servers"
    return [Problem("skew", text)]


def _of(processes: Iterable[Process], service: str) -> list[Process]:
    return [one for one in processes if one.service == service]


def _gaps(service: str, processes: list[Process]) -> list[Problem]:
    found = _disagreement("replicas", processes)
    sizes = {one.replicas for one in processes}
    if len(sizes) == 1:
        there = {one.index for one in processes}
        absent = [str(index) for index in range(sizes.pop()) if index not in there]
        if absent:
            verb = "is" if len(absent) == 1 else "are"
            text = f"{service} {', '.join(absent)} of {processes[0].replicas} {verb} missing"
            found.append(Problem("missing", text))
    for index in sorted({one.index for one in processes}):
        same = [one for one in processes if one.index == index]
        if len(same) > 1:
            where = ", ".join(f"{one.host} {one.address}".strip() for one in same)
            found.append(Problem("duplicate", f"{service} {index} runs {len(same)} times: {where}"))
    return found


def _disagreement(attribute: _Attribute, processes: Iterable[Process]) -> list[Problem]:
    holders: dict[str, list[str]] = {}
    for one in processes:
        holders.setdefault(str(getattr(one, attribute)), []).append(one.name)
    if len(holders) < 2:
        return []
    listed = "; ".join(f"{value or 'none'}: {', '.join(names)}" for value, names in sorted(holders.items()))
    return [Problem(attribute, f"different values of {attribute}: {listed}")]
