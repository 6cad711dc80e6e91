"""Where the parts of this job are."""

import os

from persia import job, nats
from persia.errors import UsageError


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
    url = (given or os.environ.get("PERSIA_NATS_URL", "")).strip()
    if not url:
        raise UsageError("PERSIA_NATS_URL is not set; the embedded mode has no services")
    return url
