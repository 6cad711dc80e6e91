"""The addresses of the parts of this job."""

from persia.discovery import nats
from persia.runtime import job, tokens
from persia.runtime.errors import UsageError
from persia.runtime.settings import settings
from persia_core.discovery import Discovery

TRAINER = "persia-trainer"
"""The service name of ranks."""

_ASK_S = 2.0
"""Seconds to wait for answers."""


def get_embedding_worker_services() -> list[str]:
    """Return the addresses of this job's middlewares, sorted by index.

    Raises:
        UsageError: ``PERSIA_NATS_URL`` is not set.
        UnreachableError: NATS does not answer.
    """
    found = nats.services(nats_url(), "persia-middleware", job=job.job_name())
    return [service.text("address") for service in found]


def nats_url(given: str | None = None) -> str:
    """Return ``given``, else ``PERSIA_NATS_URL``.

    Raises:
        UsageError: Neither is given.
    """
    url = (given or "").strip() or settings.nats_url
    if url is None:
        raise UsageError("PERSIA_NATS_URL is not set; embedded mode has no services")
    return url


def connect() -> Discovery:
    """Return a client of this job's discovery. It connects in the background.

    Raises:
        UsageError: ``PERSIA_NATS_URL`` is not set.
    """
    return Discovery(nats_url(), job.job_name(), tokens.token_file())


def trainers(discovery: Discovery) -> list[dict[str, str]]:
    """Return the announcements of this job's ranks.

    Raises:
        UnreachableError: NATS does not answer.
    """
    return discovery.find(TRAINER, _ASK_S)
