"""Tokens: one secret in a file, from which a token for each role is derived."""

import hashlib
import os
from pathlib import Path
from typing import Literal

from persia.runtime.errors import AuthError
from persia.runtime.settings import settings

Role = Literal["trainer", "data", "middleware", "admin", "nats", "serving"]
LEAST_SECRET = 32
"""The minimum size of a secret, in bytes."""
MOST_FILE = 4096
"""The maximum size of a token file, in bytes; servers have the same limit."""


def secret(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a token file, without trailing white space.

    Raises:
        AuthError: The file cannot be read, has more than :data:`MOST_FILE` bytes, or its secret has less than
            :data:`LEAST_SECRET`.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise AuthError(
            f"cannot read token file {path}: {error.strerror}; PERSIA_TOKEN_FILE sets its path",
            hint="correct the path, or let the user of this process read the file",
        ) from error
    if len(content) > MOST_FILE:
        raise AuthError(
            f"token file {path}: {len(content)} bytes, expected at most {MOST_FILE}; PERSIA_TOKEN_FILE sets its path",
            hint="check that this is the token file, or create a shorter secret",
        )
    content = content.rstrip()
    if len(content) < LEAST_SECRET:
        raise AuthError(
            f"token file {path}: a secret of {len(content)} bytes, expected at least {LEAST_SECRET}; PERSIA_TOKEN_FILE "
            "sets its path",
            hint="create a secret with: head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n'; every process of the job "
            "needs the same",
        )
    return content


def role_token(content: bytes, role: Role) -> str:
    """Return the token of a role: 64 hexadecimal digits."""
    return hashlib.sha256(f"persia role {role} ".encode() + content).hexdigest()


def token_file() -> str | None:
    """Return the path in ``PERSIA_TOKEN_FILE``; None if it is not set."""
    return settings.token_file


def token(role: Role) -> str | None:
    """Return the token of a role, derived from the file in ``PERSIA_TOKEN_FILE``; None if that is not set.

    Raises:
        AuthError: The file cannot be read, or its content is too short or too long.
    """
    path = token_file()
    return None if path is None else role_token(secret(path), role)
