"""gRPC connections between the processes of a job: addresses, role tokens, TLS, limits."""

import hmac
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from persia.feed.protocol import MAX_BATCH_BYTES, MAX_REPLICAS
from persia.runtime import tokens
from persia.runtime.errors import AuthError, ConfigError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_BATCH_BYTES + 4096),
    ("grpc.max_send_message_length", MAX_BATCH_BYTES + 4096),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CLIENT_OPTIONS = [*_OPTIONS, ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_REPLICAS),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
"""The options of a gRPC server."""
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_LOG_INTERVAL_S = 1.0
"""Seconds between two log lines about refused calls, because unauthenticated peers must not fill the log."""
_logger = get_logger("feed")

BAD_CERTIFICATE = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
"""Texts in the details of connection errors that a retry does not resolve: another CA, or a peer without TLS."""


def connect(address: str) -> grpc.Channel:
    """Return a channel to ``host:port`` or ``unix:/path``, with TLS when ``PERSIA_TLS_CA`` is set.

    Raises:
        ConfigError: The CA's file cannot be read.
    """
    if address.startswith("unix:"):
        # By default gRPC sends the path as the host name, which other HTTP/2 servers refuse.
        return grpc.insecure_channel(address, options=[*_CLIENT_OPTIONS, ("grpc.default_authority", "localhost")])
    if settings.tls_ca is None:
        return grpc.insecure_channel(address, options=_CLIENT_OPTIONS)
    credentials = grpc.ssl_channel_credentials(_content("PERSIA_TLS_CA", settings.tls_ca))
    name = ("grpc.ssl_target_name_override", settings.tls_name)
    return grpc.secure_channel(address, credentials, options=[*_CLIENT_OPTIONS, name])


def metadata(role: tokens.Role) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call made by this role.

    Raises:
        AuthError: The token file cannot be read.
    """
    token = tokens.token(role)
    return (("persia-role", role), *((("authorization", f"Bearer {token}"),) if token else ()))


def server_credentials() -> grpc.ServerCredentials | None:
    """Return the certificate that ``PERSIA_TLS_CERT`` and ``PERSIA_TLS_KEY`` name; None if neither is set.

    Raises:
        ConfigError: Only one is set, or a file cannot be read.
    """
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, other = ("KEY", "CERT") if certificate is None else ("CERT", "KEY")
        raise ConfigError(f"PERSIA_TLS_{given} is set, but PERSIA_TLS_{other} is not", hint="set both, or neither")
    return grpc.ssl_server_credentials([(_content("PERSIA_TLS_KEY", key), _content("PERSIA_TLS_CERT", certificate))])


class AuthInterceptor(grpc.ServerInterceptor):
    """Refuses calls of other roles and, if there is a token file, calls without the token of the role."""

    def __init__(self, role: tokens.Role) -> None:
        self._role = role
        self._token = tokens.token(role)
        self._logged_at = -_LOG_INTERVAL_S

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of the call, or one that refuses it."""
        given = dict(handler_call_details.invocation_metadata or ())
        handler = continuation(handler_call_details)
        if handler is None or str(handler_call_details.method).startswith(_OPEN_TO_ALL):
            return handler
        if given.get("persia-role") != self._role:
            return self._refusal(handler, grpc.StatusCode.PERMISSION_DENIED, f"expected a process of role {self._role}")
        expected, found = f"Bearer {self._token}".encode(), str(given.get("authorization", "")).encode()
        if self._token is not None and not hmac.compare_digest(expected, found):
            return self._refusal(handler, grpc.StatusCode.UNAUTHENTICATED, f"no valid token of role {self._role}")
        return handler

    def _refusal(self, handler: Any, code: grpc.StatusCode, message: str) -> Any:
        def refuse(_request: Any, context: grpc.ServicerContext) -> None:
            if time.monotonic() - self._logged_at >= _LOG_INTERVAL_S:
                self._logged_at = time.monotonic()
                _logger.warning("refused a call of %s: %s", context.peer(), message)
            context.abort(code, message)

        kind = "stream" if handler.request_streaming else "unary"
        kind += "_stream" if handler.response_streaming else "_unary"
        return getattr(grpc, f"{kind}_rpc_method_handler")(refuse)


def auth_error(address: str, details: str | None) -> AuthError:
    """Return the error for a call that a peer refused because of the caller's role or token."""
    given = tokens.token_file() or "not set"
    return AuthError(f"{address} refuses this process: {details} (PERSIA_TOKEN_FILE: {given})")


def certificate_error(address: str, details: str | None) -> AuthError:
    """Return the error for a peer whose certificate cannot be verified."""
    given = settings.tls_ca or "not set"
    return AuthError(
        f"cannot open a TLS connection to {address}: {details} (PERSIA_TLS_CA: {given})",
        hint="check that the certificate of the peer has not expired, and that PERSIA_TLS_CA is the CA that signed it; "
        "a peer without TLS needs PERSIA_TLS_CERT and PERSIA_TLS_KEY",
    )


def _content(variable: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{variable}={path}: {error.strerror}", hint=f"set {variable} to a file that this process can read"
        ) from error
