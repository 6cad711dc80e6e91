"""Authentication of callers: the token of the role ``serving``, and TLS, as in the other services."""

import hmac
import ipaddress
import shlex
import ssl

from persia.runtime import tokens
from persia.runtime.errors import AuthError, ConfigError, UsageError
from persia.runtime.settings import settings


def bearer() -> bytes | None:
    """Return the required value of the header ``authorization``; None if there is no token file.

    Raises:
        AuthError: The token file cannot be read, or is too short.
    """
    token = tokens.token("serving")
    return None if token is None else f"Bearer {token}".encode()


def allowed(expected: bytes | None, given: bytes | None) -> bool:
    """Whether a request with this header is authorized. The comparison takes constant time."""
    return expected is None or (given is not None and hmac.compare_digest(expected, given))


def certificate() -> tuple[str, str] | None:
    """Return the files that ``PERSIA_TLS_CERT`` and ``PERSIA_TLS_KEY`` name; None if neither is set.

    Raises:
        ConfigError: Only one is set, a file cannot be read, or the files are not a certificate and its key.
    """
    files = {"PERSIA_TLS_CERT": settings.tls_certificate, "PERSIA_TLS_KEY": settings.tls_key}
    if files == dict.fromkeys(files):
        return None
    for name, path in files.items():
        if path is None:
            other = next(each for each in files if each != name)
            raise ConfigError(
                f"{name} is not set, but {other} is",
                hint=f"export {name}=FILE to serve with TLS, or unset {other}; then start the process again",
            )
        try:
            with open(path, "rb") as file:  # noqa: PTH123
                file.read(1)
        except OSError as error:
            raise ConfigError(
                f"cannot read {name}={path}: {error.strerror}",
                hint=f"set {name} to a file in PEM that this user can read: ls -l {shlex.quote(str(path))}",
            ) from error
    certificate, key = str(files["PERSIA_TLS_CERT"]), str(files["PERSIA_TLS_KEY"])
    try:
        # The empty password prevents a prompt for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load the certificate PERSIA_TLS_CERT={certificate} with the key PERSIA_TLS_KEY={key}: {error}",
            hint="use a certificate in PEM, and its key in PEM without a password",
        ) from error
    return certificate, key


def address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; without a token file, the host must be loopback.

    Raises:
        UsageError: The text is not an address.
        AuthError: Other hosts could reach the address, and there is no token file.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"{option} {text}: expected HOST:PORT with a port up to 65535, such as 127.0.0.1:8000")
    host = host.removeprefix("[").removesuffix("]")
    if settings.token_file is None and not _is_loopback(host):
        raise AuthError(
            f"{option} {text}: refusing to listen without a token: any host on the network could connect",
            hint="set PERSIA_TOKEN_FILE to a file with a secret of at least 32 bytes, or listen on 127.0.0.1",
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
