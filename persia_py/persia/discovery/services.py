"""The addresses of this job's services."""

from persia.discovery import nats
from persia.runtime import job, tokens
from persia.runtime.errors import UnreachableError, UsageError
from persia.runtime.settings import settings, variable
from persia_core.discovery import Discovery

TRAINER = "persia-trainer"
"""The service name of ranks."""

_DEFAULT_WORKER = "embedding_worker:8887"
"""The default address of the middleware in PersiaML's compose file."""

_WITHOUT_NATS = (
    "start NATS, or set PERSIA_NATS_URL to its address; to train without servers, in one process, leave the variable "
    "empty: PERSIA_NATS_URL= python FILE, or PERSIA_NATS_URL= persia-launcher nn-worker FILE"
)

_ASK_S = 2.0
"""The time limit for responses, in seconds."""


def get_embedding_worker_services() -> list[str]:
    """Return the addresses of middlewares.

    If ``EMBEDDING_WORKER_SERVICE`` is set, return its comma-separated addresses. Otherwise, return the addresses of
    this job, sorted by index. If ``PERSIA_NATS_URL`` is not set, return PersiaML's default.

    Raises:
        UnreachableError: NATS does not respond.
        AuthError: NATS refuses the password.
    """
    given = variable("EMBEDDING_WORKER_SERVICE")
    if given is not None or settings.nats_url is None:
        return [address.strip() for address in (given or _DEFAULT_WORKER).split(",") if address.strip()]
    found = nats.services(nats_url(), "persia-middleware", job=job.job_name())
    return [service.text("address") for service in found]


def nats_url(given: str | None = None) -> str:
    """Return ``given`` or, if it is None or empty, ``PERSIA_NATS_URL``.

    Raises:
        UsageError: Neither is set.
    """
    url = (given or "").strip() or settings.nats_url
    if url is None:
        raise UsageError("PERSIA_NATS_URL is not set, so no process of a job can be found; set it to nats://HOST:PORT")
    return url


def connect() -> Discovery:
    """Return a client of this job's discovery. It connects in the background.

    Raises:
        UsageError: ``PERSIA_NATS_URL`` is not set.
    """
    return Discovery(nats_url(), job.job_name(), tokens.token_file())


def wait_connected(discovery: Discovery, limit_s: float) -> None:
    """Wait until NATS responds.

    Raises:
        UnreachableError: NATS does not respond within ``limit_s`` seconds. The hint says how to train without it.
        AuthError: NATS refuses the token.
    """
    try:
        discovery.wait_connected(limit_s)
    except UnreachableError as error:
        error.hint = _WITHOUT_NATS
        raise


def trainers(discovery: Discovery) -> list[dict[str, str]]:
    """Return what the ranks of this job have announced.

    Raises:
        UnreachableError: NATS does not respond.
    """
    return discovery.find(TRAINER, _ASK_S)
