"""Where the parts of this job are."""

from persia.discovery import nats
from persia.runtime import job, tokens
from persia.runtime.errors import UsageError
from persia.runtime.settings import settings
from persia_core.discovery import Discovery

TRAINER = "persia-trainer"
"""The name that ranks announce."""

_ASK_S = 2.0
"""How long answers are waited for."""


def get_embedding_worker_services() -> list[str]:
    """Return the addresses of this job's middlewares, in order of their index.

    Raises:
        UsageError: ``PERSIA_NATS_URL`` is not set.
        UnreachableError: NATS does not answer.
    """
    found = nats.services(nats_url(), "persia-middleware", job=job.job_name())
    return [service.text("address") for service in found]


def nats_url(given: str | None = None) -> str:
    """Return ``given``, else ``PERSIA_NATS_URL``.

    Raises:
        UsageError: Neither is there.
    """
    url = (given or "").strip() or settings.nats_url
    if url is None:
        raise UsageError("PERSIA_NATS_URL is not set; the embedded mode has no services")
    return url


def connect() -> Discovery:
    """Return a connection to this job's discovery, which may still be on its way.

    Raises:
        UsageError: ``PERSIA_NATS_URL`` is not set.
    """
    return Discovery(nats_url(), job.job_name(), tokens.token_file())


def trainers(found_by: Discovery) -> list[dict[str, str]]:
    """Return what the ranks of this job announce.

    Raises:
        UnreachableError: NATS does not answer.
    """
    return found_by.find(TRAINER, _ASK_S)
