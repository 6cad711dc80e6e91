"""The services of the job around this process: NATS, servers, middlewares, data-compose and trainers."""

from collections.abc import Iterator

from persia.doctor import job_status, network
from persia.doctor.check import Check
from persia.doctor.job_status import Status
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
            listed = ", ".join(f"{one.name} at {one.address}: {one.health}" for one in bad)
            yield Check(
                kind, "fail", listed, "it announced itself, but does not serve", "see its log", ExitCode.UNREACHABLE
            )
        else:
            rows = sum(one.rows or 0 for one in there)
            held = f", {rows:,} rows" if kind == "persia-server" else ""
            yield Check(kind, "ok", f"{len(there)} of {max(one.replicas for one in there)}{held}")
    told = ("no persia-server", "no persia-middleware")
    problems = [one for one in found.problems if not one.startswith(told)]
    if problems:
        yield Check(
            "job",
            "fail",
            "; ".join(problems),
            f"the parts of job {job} do not fit",
            "persia status",
            ExitCode.UNREACHABLE,
        )


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
