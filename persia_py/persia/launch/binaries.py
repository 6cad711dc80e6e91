"""Find and execute the programs of embedding servers and middlewares."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from persia.runtime import tokens
from persia.runtime.errors import UsageError
from persia.runtime.settings import settings, variable

SERVER = "persia-embedding-sharded-server"
MIDDLEWARE = "persia-embedding-sharded-middleware"


_VARIABLES = {
    "--config": "PERSIA_CONFIG",
    "--embedding-config": "PERSIA_EMBEDDING_CONFIG",
    "--global-config": "PERSIA_GLOBAL_CONFIG",
}
"""The variable of each flag of a configuration file."""


def run(
    binary: str, *, port: int, files: Mapping[str, Path | None], index: int, size: int, servers: str | None = None
) -> NoReturn:
    """Replace this process by a server or a middleware.

    Args:
        binary: :data:`SERVER` or :data:`MIDDLEWARE`.
        port: The port to listen on, unless ``PERSIA_LISTEN`` is set. Without a token it is on loopback only.
        files: The configuration file of each flag: ``--config`` or ``--embedding-config`` has the slots,
            ``--global-config`` the limits. None means that of the variable.
        index: The index of this replica.
        size: The number of replicas.
        servers: The addresses of all servers for a middleware, with commas between them; None means those of the global
            configuration, or those that NATS knows.

    Raises:
        UsageError: The binary or a configuration file was not found.
    """
    program = resolve_binary_execute_path(binary)
    host = "0.0.0.0" if tokens.token_file() else "127.0.0.1"  # noqa: S104
    command = [program, "--replica-index", str(index), "--replica-size", str(size)]
    if settings.listen is None:
        command += ["--listen", f"{host}:{port}"]
    if servers is not None:
        command += ["--servers", servers]
    for flag, name in _VARIABLES.items():
        given = files.get(flag)
        if (path := given or variable(name)) is None:
            continue
        if not Path(path).is_file():
            origin = f"{flag} {path}" if given else f"{name}={path}"
            raise UsageError(f"{origin}: no such file (seen from {Path.cwd()})")
        command += [flag, str(path)]  # an env_file of Docker may keep trailing white space in the variable
    os.execv(program, command)  # noqa: S606


def resolve_binary_execute_path(binary_name: str) -> str:
    """Return the path of a program: the one in ``THIRD_PARTY_PATH`` if there is one, else the first on ``PATH``.

    The folder of the running Python counts as the last one of ``PATH``, so that an environment works without being
    activated.

    Raises:
        UsageError: The program is in none of these folders.
    """
    override = os.environ.get("THIRD_PARTY_PATH", "")
    if override:
        candidate = Path(override) / binary_name
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which(binary_name) or shutil.which(binary_name, path=str(Path(sys.executable).parent))
    if found is None:
        raise UsageError(
            f"{binary_name}: neither in THIRD_PARTY_PATH ({override or 'unset'}) nor on PATH "
            "(in a clone, make setup builds persia's own)"
        )
    return found
