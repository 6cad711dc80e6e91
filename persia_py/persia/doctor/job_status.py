"""The status of a job: its processes, their addresses and health, and problems of the job as a whole."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from persia.discovery import nats
from persia.doctor import vocabulary
from persia.feed import channel
from persia.proto import tables_pb2, tables_pb2_grpc

_DEADLINE = 2.0
"""Seconds in which a process has to answer."""
_PIPED_COLUMNS = 240
"""The width of the table if the output is not a terminal."""
_NEEDED = ("persia-server", "persia-middleware")
"""Services of which a trainer needs at least one process."""
_COUNTED = ("persia-server", "persia-data", "persia-trainer")
"""Services whose indices exist once each. Middlewares are equal, and can be scaled while they run."""


@dataclass(frozen=True)
class Process:
    """A process that has announced itself.

    Attributes:
        service: ``persia-server``, ``persia-middleware``, ``persia-trainer`` or ``persia-data``.
        job: The job's name.
        index: Its index among the replicas.
        replicas: The number of replicas in its configuration.
        address: The address at which it serves; empty if it serves nothing.
        metrics: The address of its metrics; empty if it has none.
        host: The name of its machine.
        version: The version of persia.
        protocol: The version of the protocol.
        started: The time of its start.
        health: ``serving``, ``not serving``, the error of the health check, or ``announced`` if it has no address.
        generation: The generation of its rows; None unless it is a server that answered.
        rows: The number of its rows; None unless it is a server that answered.
        tables: The statistics of its part of each table; empty unless it is a server that answered.
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

    @property
    def name(self) -> str:
        """The service's name and the index."""
        return f"{self.service} {self.index}"


@dataclass(frozen=True)
class Status:
    """The processes of one or all jobs, and the problems that were found."""

    processes: list[Process]
    problems: list[str]

    def to_json(self) -> str:
        """Return the status as JSON."""
        return json.dumps({"processes": [asdict(one) for one in self.processes], "problems": self.problems}, indent=1)


def status(url: str, job: str | None) -> Status:
    """Ask NATS for the processes, and each process for its health.

    Args:
        url: The URL of NATS.
        job: The job; None means all jobs.

    Raises:
        UnreachableError: NATS does not answer.
        AuthError: NATS refuses the password.
    """
    processes = _ask(nats.services(url, job=job))
    jobs = sorted({one.job for one in processes} | ({job} if job else set()))
    problems: list[str] = []
    for name in jobs:
        prefix = "" if len(jobs) == 1 else f"job {name}: "
        problems += [prefix + text for text in _problems([one for one in processes if one.job == name])]
    return Status(processes, problems)


def show(found: Status) -> None:
    """Print a table of the processes, the generation of each job, and the problems."""
    jobs = {one.job for one in found.processes}
    table = Table(box=None, pad_edge=False)
    columns = ["service", "replica", "health", "address", "metrics", "host", "version"]
    for column in ["job", *columns] if len(jobs) > 1 else columns:
        table.add_column(column, overflow="fold")
    for one in found.processes:
        replica = f"{one.index} of {one.replicas}"
        cells = [one.service, replica, one.health, one.address, one.metrics, one.host, one.version]
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
                f"generation {generation}, {rows:,} rows on {len(servers)} server(s)"
                if generation
                else "no run has begun"
            )
            console.print(f"{job}: {run}")
            if generation and (parts := [part for one in servers for part in one.tables]):
                vocabulary.show(vocabulary.of_parts(parts))
    for problem in found.problems:
        console.print(f"problem: {problem}")


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
        server: Any = tables_pb2_grpc.EmbeddingServerStub  # generated without types
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
        return None  # the health shows the reason
    return None if not answered else dict(json.loads(answered[0].stats))


def _problems(processes: list[Process]) -> list[str]:
    found = [f"no {service} has announced itself" for service in _NEEDED if not _of(processes, service)]
    for service in _COUNTED:
        found += _gaps(service, _of(processes, service))
    for attribute in ("version", "protocol"):
        found += _disagreement(attribute, processes)
    found += _disagreement("generation", [one for one in processes if one.generation is not None])
    found += [
        f"{one.name} at {one.address}: {one.health}" for one in processes if one.health not in {"serving", "announced"}
    ]
    return found


def _of(processes: Iterable[Process], service: str) -> list[Process]:
    return [one for one in processes if one.service == service]


def _gaps(service: str, processes: list[Process]) -> list[str]:
    found = _disagreement("replicas", processes)
    sizes = {one.replicas for one in processes}
    if len(sizes) == 1:
        there = {one.index for one in processes}
        absent = [str(index) for index in range(sizes.pop()) if index not in there]
        found += [f"{service} {', '.join(absent)} of {processes[0].replicas} is missing"] if absent else []
    for index in sorted({one.index for one in processes}):
        same = [one for one in processes if one.index == index]
        if len(same) > 1:
            where = ", ".join(f"{one.host} {one.address}".strip() for one in same)
            found.append(f"{service} {index} runs {len(same)} times: {where}")
    return found


def _disagreement(attribute: str, processes: Iterable[Process]) -> list[str]:
    holders: dict[str, list[str]] = {}
    for one in processes:
        holders.setdefault(str(getattr(one, attribute)), []).append(one.name)
    if len(holders) < 2:
        return []
    listed = "; ".join(f"{value or 'none'}: {', '.join(names)}" for value, names in sorted(holders.items()))
    return [f"different values of {attribute}: {listed}"]
