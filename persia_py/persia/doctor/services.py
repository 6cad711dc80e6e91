"""Checks of the services of the surrounding job: NATS, servers, middlewares, data-compose and trainers."""

import socket
from collections.abc import Iterator

from persia.doctor import job_status, network
from persia.doctor.check import Check
from persia.doctor.job_status import Cause, Process, Status
from persia.runtime.errors import PersiaError, UnreachableError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.job import job_name
from persia.runtime.settings import settings

_TRAINING = ("persia-data", "persia-trainer")
"""Services that run only while a job trains."""
_SAME_VERSION = "run the same version everywhere; in each environment: persia doctor --only versions"
_REMEDIES: dict[Cause, str] = {
    "missing": "start the missing process, and see its log",
    "duplicate": "stop all but one of the processes with the same number",
    "replicas": "start all processes with the same number of replicas (REPLICA_SIZE)",
    "version": _SAME_VERSION,
    "protocol": _SAME_VERSION,
    "generation": "a server was restarted: restart the trainers, which resume after the newest checkpoint",
}
"""The remedies for problems of a whole job. Problems with other causes are reported by the check of the service."""


def checks() -> Iterator[Check]:
    """Yield the checks of the services."""
    url = settings.nats_url
    if url is None:
        yield Check("services", "skip", "PERSIA_NATS_URL is not set", "rows are kept in the training process")
        return
    try:
        host, port = network.nats_address(url)
    except ValueError as error:
        yield Check("nats", "fail", f"PERSIA_NATS_URL: {error}", "", "PERSIA_NATS_URL=nats://HOST:4222")
        return
    found = network.endpoint("nats", host, port, what="NATS", start="docker compose up --detach persia_nats_service")
    yield found
    if found.status != "ok":
        yield Check("services", "skip", "not queried", "NATS cannot be reached")
        return
    try:
        yield from services(job_status.status(url, job_name()), job_name())
    except PersiaError as error:
        yield Check("services", "fail", str(error), "", error.hint or "persia status", ExitCode(error.exit_code))


def services(found: Status, job: str) -> Iterator[Check]:
    """Yield a check for each kind of service, and one for the problems of the whole job.

    Args:
        found: The status of the job's processes.
        job: The name of the job.
    """
    for kind in ("persia-server", "persia-middleware", *_TRAINING):
        there = [one for one in found.processes if one.service == kind]
        if not there:
            if kind not in _TRAINING:
                why = f"job {job} needs at least one process of this service"
                yield Check(kind, "fail", "none has announced itself", why, "persia status --all", ExitCode.UNREACHABLE)
            continue
        bad = [one for one in there if one.health not in {"serving", "announced"}]
        if bad:
            yield from _unhealthy(kind, bad)
        else:
            rows = sum(one.rows or 0 for one in there)
            held = f", {rows:,} rows" if kind == "persia-server" else ""
            yield Check(kind, "ok", f"{len(there)} of {max(one.replicas for one in there)}{held}")
    problems = [one for one in found.problems if one.cause in _REMEDIES]
    if problems:
        texts, remedies = (one.text for one in problems), dict.fromkeys(_REMEDIES[one.cause] for one in problems)
        why = f"job {job} needs each process once, with the same versions and settings"
        yield Check("job", "fail", "; ".join(texts), why, "; ".join(remedies), ExitCode.UNREACHABLE)


def _unhealthy(kind: str, bad: list[Process]) -> Iterator[Check]:
    """Yield a check for each reason why processes of one kind do not serve."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in bad:
        reasons.setdefault(_reason(one), []).append(f"{one.name} at {one.address}: {one.health}")
    for (why, remedy), listed in reasons.items():
        yield Check(kind, "fail", ", ".join(listed), why, remedy, ExitCode.UNREACHABLE)


def _reason(one: Process) -> tuple[str, str]:
    """Return why an announced process does not respond, and what to do."""
    from persia.distributed.network import is_loopback

    silent = ("it announced itself, but does not serve", f"see its log on host {one.host}")
    host, _, port = one.address.rpartition(":")
    if not port.isdecimal() or host == "unix":
        return silent
    if is_loopback(host) and one.host != socket.gethostname():
        why = f"it is on host {one.host}, and announces a loopback address there, which other hosts cannot reach"
        return (
            why,
            f"on {one.host}: unset PERSIA_SOCKET_IFNAME and PERSIA_ADVERTISE, or correct them, and restart the process",
        )
    reached = network.reach(host.strip("[]"), int(port))
    if reached.outcome == "filtered":
        why = f"filtered: a firewall or another network drops packets to {one.address}, or host {one.host} is off"
        remedy = f"allow TCP connections to port {port} of {one.host} (firewall, security group)"
        return why, f"{remedy}; routes and interfaces of this host: persia doctor --only network"
    if reached.outcome == "unresolved":
        return f"the name {host} has no address on this host: {reached.reason}", f"getent hosts {host}"
    if reached.outcome == "unreachable":
        return f"{host} cannot be reached: {reached.reason}", f"ip route get {reached.address}"
    if reached.outcome == "reached":
        why = "its port accepts connections, but the process does not respond: it is stopped, busy or about to end"
        return why, f"see its log on host {one.host}"
    return silent


def missing_parts(found: Status) -> None:
    """Check that the job has a server and a middleware.

    Raises:
        UnreachableError: A server or a middleware has not announced itself.
    """
    there = {one.service for one in found.processes}
    absent = [kind for kind in ("persia-server", "persia-middleware") if kind not in there]
    if absent:
        raise UnreachableError(
            f"no {' and no '.join(absent)} has announced itself; a job needs at least one server and one middleware",
            hint=f"start {' and '.join(absent)}, or test without servers: --local; see: persia doctor --only services",
        )
