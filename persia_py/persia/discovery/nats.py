"""Queries NATS once for the services of a job: connect, query, close."""

import contextlib
import json
import os
import socket
import ssl
import time
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from persia.runtime.errors import AuthError, UnreachableError, UsageError
from persia.runtime.settings import in_container, settings
from persia.runtime.tokens import token

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nats imports pkg_resources, which is deprecated
    from pynats import NATSClient
    from pynats.client import NATSMessage
    from pynats.exceptions import NATSError, NATSUnexpectedResponse

KINDS = ("persia-server", "persia-middleware", "persia-data", "persia-trainer")
"""The service names of Persia's processes."""

_CONNECT = 3.0
"""The time limit for connecting and logging in, in seconds."""
_FIRST = 1.0
"""The time limit for the first response, in seconds."""
_QUIET = 0.5
"""The time limit for each further response, in seconds."""
_LONGEST = 3.0
"""The time limit for all responses, in seconds."""
_NEXT = "start NATS, or correct its address (PERSIA_NATS_URL)"
_STATUS_IN_CONTAINER = "docker compose run --rm --no-deps trainer persia status"
IN_CONTAINER = f"{_STATUS_IN_CONTAINER} (other commands likewise)"
"""The form of a command that reaches the processes of a stack, run in the folder of ``docker-compose.yaml``."""
_CA = "that of PERSIA_TLS_CA, or, if this variable is not set, one that this system trusts"
_USER = "persia"
_DEFAULT_PORT = 4222


@dataclass(frozen=True)
class Service:
    """A process that has announced itself.

    Attributes:
        kind: ``persia-server``, ``persia-middleware``, ``persia-trainer`` or ``persia-data``.
        id: Its id on NATS, which is new at every start.
        metadata: Its metadata. All values are text.
    """

    kind: str
    id: str
    metadata: dict[str, str]

    def text(self, key: str) -> str:
        """Return a value of the metadata; empty if it does not exist."""
        return self.metadata.get(key, "")

    def number(self, key: str, default: int = -1) -> int:
        """Return a value as a number; ``default`` if it is not a number."""
        text = self.text(key)
        return int(text) if text.isdecimal() else default


def status_command() -> str:
    """Return, for a message, the ``persia status`` command that reaches the processes of the job from this process."""
    has_stack = Path("docker-compose.yaml").is_file()
    return "persia status" if in_container() or settings.nats_url or not has_stack else _STATUS_IN_CONTAINER


def services(url: str, kind: str | None = None, *, job: str | None = None) -> list[Service]:
    """Return the services that respond, sorted by kind and index.

    Args:
        url: ``nats://host:port`` or ``tls://host:port``.
        kind: One of :data:`KINDS`; None means all.
        job: The job; None means all jobs.

    Raises:
        UsageError: The URL has another form.
        UnreachableError: NATS does not respond.
        AuthError: NATS refuses the password.
    """
    found: dict[str, Service] = {}
    for payload in _ask(url, "$SRV.INFO" + (f".{kind}" if kind else "")):
        service = _parse(payload)
        if service is not None and (job is None or service.text("job") == job):
            found[service.id] = service
    return sorted(found.values(), key=lambda service: (service.kind, service.number("index"), service.id))


def _ask(url: str, subject: str) -> list[bytes]:
    answers: list[bytes] = []

    def note(message: NATSMessage) -> None:
        answers.append(message.payload)

    target, shown = _target(url)
    client = NATSClient(
        target,
        name="persia status",
        socket_timeout=_CONNECT,
        tls_verify=True,
        tls_cacert=settings.tls_ca,
    )
    try:
        _check_listens(target)
        client.connect()
        client.ping()  # the error callback reports a refused password
        inbox = f"_INBOX.persia.{uuid.uuid4().hex}"
        client.subscribe(inbox, callback=note)
        client.publish(subject, reply=inbox)
        _gather(client, answers)
    except NATSUnexpectedResponse as error:
        text = error.line.decode(errors="replace").strip()
        if "Authorization" in text:
            hint = "correct the user and password in the address of NATS" if urlsplit(url).username else None
            raise AuthError(f"NATS at {shown} refuses {_credentials(url)}", hint=hint) from error
        raise UnreachableError(f"NATS at {shown} sent an unexpected response: {text!r}", hint=_NEXT) from error
    except (OSError, NATSError) as error:
        text = str(error) or type(error).__name__
        failed, hint = f"NATS at {shown} is not reachable", _next(error, urlsplit(target).hostname or "")
        if isinstance(error, ssl.SSLError):
            failed = f"cannot establish TLS with NATS at {shown}"
            hint = f"check that the certificate of NATS has not expired, and that its CA is {_CA}"
        elif isinstance(error, FileNotFoundError | PermissionError) and not _is_readable(settings.tls_ca):
            failed = f"cannot establish TLS with NATS at {shown}"
            hint = f"correct the path in PERSIA_TLS_CA ({settings.tls_ca}), or the permissions of this file"
        raise UnreachableError(f"{failed}: {text}", hint=hint) from error
    finally:
        _close(client)
    return answers


def _next(error: Exception, host: str) -> str:
    """Return the next step. For a stack of docker compose, it is the command that works outside a container."""
    if in_container():
        return _NEXT
    if isinstance(error, socket.gaierror) and "." not in host:
        return f"{host} may be a service of docker compose, whose name resolves only in a container: {IN_CONTAINER}"
    if Path("docker-compose.yaml").is_file():
        return f"{_NEXT}; for the stack of this folder: {IN_CONTAINER}"
    return _NEXT


def _check_listens(target: str) -> None:
    """Connect once, because the library does not close the socket of a connection that fails.

    Raises:
        OSError: Nothing listens at the address.
    """
    parts = urlsplit(target)
    with socket.socket() as once:  # the library uses IPv4 only
        once.settimeout(_CONNECT)
        once.connect((parts.hostname, parts.port))


def _close(client: NATSClient) -> None:
    """Close a client. It may never have connected, or NATS may have closed its connection."""
    with contextlib.suppress(OSError, AttributeError):
        client.close()
    for name in ("_socket_file", "_socket"):  # the library leaves these open if NATS has closed the connection
        if (left := getattr(client, name, None)) is not None:
            left.close()


def _is_readable(path: str | None) -> bool:
    return path is None or os.access(path, os.R_OK)


def _gather(client: NATSClient, answers: list[bytes]) -> None:
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline:
        client._socket.settimeout(_QUIET if answers else _FIRST)  # the library uses one timeout for all steps
        try:
            client.wait(count=1)
        except TimeoutError:
            return


def _target(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    try:
        port = parts.port or _DEFAULT_PORT
    except ValueError:
        port = 0
    if parts.scheme not in {"nats", "tls"} or not parts.hostname or not port:
        raise UsageError(
            f"address of NATS {url.rpartition('@')[2]!r}: expected nats://HOST:PORT or tls://HOST:PORT",
            hint="correct PERSIA_NATS_URL, or the option --nats-url",
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    address = f"{host}:{port}"
    password = token("nats")
    user = f"{_USER}:{password}@" if password else ""
    if parts.username:
        user = f"{parts.username}:{parts.password or ''}@"
    return f"{parts.scheme}://{user}{address}", address


def _credentials(url: str) -> str:
    """Return, as part of a message, how this process logs in to NATS."""
    if urlsplit(url).username:
        return "the user and password in its address"
    if token("nats"):
        return "the password derived from PERSIA_TOKEN_FILE"
    return "a connection without a password, and PERSIA_TOKEN_FILE is not set"


def _parse(payload: bytes) -> Service | None:
    try:
        content = json.loads(payload)
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("metadata"), dict):
        return None
    kind = str(content.get("name", ""))
    if kind not in KINDS:
        return None
    metadata = {str(key): str(value) for key, value in content["metadata"].items()}
    return Service(kind, str(content.get("id", "")), metadata)
