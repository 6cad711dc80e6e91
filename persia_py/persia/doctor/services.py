"""The services of the job around this process: NATS, servers, middlewares, data-compose and trainers."""

import socket
from collections.abc import Iterator

from persia.doctor import job_status, network
from persia.doctor.check import Check
from persia.doctor.job_status import Process, Status
from persia.runtime.errors import PersiaError, UnreachableError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.job import job_name
from persia.runtime.settings import settings

_TRAINING = ("persia-data", "persia-trainer")
"""Services that are there while a job trains only."""


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
        yield Check("services", "skip", "not asked", "NATS cannot be reached")
        return
    try:
        yield from services(job_status.status(url, job_name()), job_name())
    except PersiaError as error:
        yield Check("services", "fail", str(error), "", error.hint or "persia status", ExitCode(error.exit_code))


def services(found: Status, job: str) -> Iterator[Check]:
    """Yield a check of each kind of service, and one of the problems of the whole job.

    Args:
        found: The status of the job.
        job: Its name.
    """
    for kind in ("persia-server", "persia-middleware", *_TRAINING):
        there = [one for one in found.processes if one.service == kind]
        if not there:
            if kind not in _TRAINING:
                why = f"job {job} cannot train without one"
                yield Check(kind, "fail", "none has announced itself", why, "persia status --all", ExitCode.UNREACHABLE)
            continue
        bad = [one for one in there if one.health not in {"serving", "announced"}]
        if bad:
            yield from _unhealthy(kind, bad)
        else:
            rows = sum(one.rows or 0 for one in there)
            held = f", {rows:,} rows" if kind == "persia-server" else ""
            yield Check(kind, "ok", f"{len(there)} of {max(one.replicas for one in there)}{held}")
    told = ("no persia-server", "no persia-middleware", *(f"{one.name} at {one.address}" for one in found.processes))
    problems = [one for one in found.problems if not one.startswith(told)]
    if problems:
        why = f"the parts of job {job} do not fit together"
        yield Check("job", "fail", "; ".join(problems), why, _remedy(problems), ExitCode.UNREACHABLE)


def _unhealthy(kind: str, bad: list[Process]) -> Iterator[Check]:
    """Yield a check of the processes of one kind that do not serve, for each reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in bad:
        reasons.setdefault(_reason(one), []).append(f"{one.name} at {one.address}: {one.health}")
    for (why, remedy), listed in reasons.items():
        yield Check(kind, "fail", ", ".join(listed), why, remedy, ExitCode.UNREACHABLE)


def _reason(one: Process) -> tuple[str, str]:
    """Return why a process that has announced itself does not answer, and what to do."""
    from persia.distributed.network import is_loopback

    silent = ("it announced itself, but does not serve", f"see its log on host {one.host}")
    host, _, port = one.address.rpartition(":")
    if not port.isdecimal() or host == "unix":
        return silent
    if is_loopback(host) and one.host != socket.gethostname():
        why = f"it is on host {one.host}, and announces a loopback address there, which other hosts cannot reach"
        return (
            why,
            f"on {one.host}: unset PERSIA_SOCKET_IFNAME and PERSIA_ADVERTISE, or correct them, and start it again",
        )
    reached = network.reach(host.strip("[]"), int(port))
    if reached.outcome == "filtered":
        why = f"filtered: a firewall or another network drops packets to {one.address}, or host {one.host} is off"
        remedy = f"let TCP port {port} of {one.host} through (firewall, security group)"
        return why, f"{remedy}; routes and interfaces of this host: persia doctor --only network"
    if reached.outcome == "unresolved":
        return f"the name {host} has no address here: {reached.reason}", f"getent hosts {host}"
    if reached.outcome == "unreachable":
        return f"{host} cannot be reached: {reached.reason}", f"ip route get {reached.address}"
    if reached.outcome == "reached":
        why = "its port accepts connections, but the process does not answer: it is stopped, busy, or is about to end"
        return why, f"see its log on host {one.host}"
    return silent


def _remedy(problems: list[str]) -> str:
    """Return what to do about problems of a whole job."""
    remedies = {
        "is missing": "start the missing part, and see its log",
        " times: ": "stop all but one of the processes with the same number",
        "of replicas": "start all parts with the same number of replicas (REPLICA_SIZE)",
        "of version": "run the same version everywhere; in each environment: persia doctor --only versions",
        "of protocol": "run the same version everywhere; in each environment: persia doctor --only versions",
        "of generation": "a server was restarted: restart the trainers, which resume after the newest checkpoint",
    }
    fitting = dict.fromkeys(text for part, text in remedies.items() if any(part in one for one in problems))
    return "; ".join(fitting) or "see the logs of these parts"


def missing_parts(found: Status) -> None:
    """Refuse a job without a server or a middleware.

    Raises:
        UnreachableError: One of them has not announced itself.
    """
    there = {one.service for one in found.processes}
    absent = [kind for kind in ("persia-server", "persia-middleware") if kind not in there]
    if absent:
        error = UnreachableError(f"no {' and no '.join(absent)} has announced itself; they are needed to train")
        error.hint = "start them, or test without servers: --local; see: persia doctor --only services"
        raise error
