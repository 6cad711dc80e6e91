"""Finds and runs the programs of embedding servers and middlewares."""

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
"""The variable that corresponds to each option for a configuration file."""


def run(
    binary: str, *, port: int, files: Mapping[str, Path | None], index: int, size: int, servers: str | None = None
) -> NoReturn:
    """Replace this process with a server or a middleware.

    Args:
        binary: :data:`SERVER` or :data:`MIDDLEWARE`.
        port: The port to listen on, unless ``PERSIA_LISTEN`` is set. Without a token, the process listens on loopback
            only.
        files: The configuration file for each option: ``--config`` or ``--embedding-config`` has the slots,
            ``--global-config`` the limits. None takes the path from the variable.
        index: The index of this replica.
        size: The number of replicas.
        servers: The comma-separated addresses of all servers, for a middleware; None takes them from the global
            configuration or from NATS.

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
            raise UsageError(
                f"{origin}: no such file (working directory: {Path.cwd()})",
                hint=f"set {flag if given else name} to the path of an existing file",
            )
        command += [flag, str(path)]  # the variable may end in white space, from Docker's env_file
    os.execv(program, command)  # noqa: S606


def resolve_binary_execute_path(binary_name: str) -> str:
    """Return the path of a program: in ``THIRD_PARTY_PATH``, or else in the first folder of ``PATH`` that has it.

    The folder of the running Python counts as the last folder of ``PATH``. A virtual environment therefore works
    without activation.

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
            f"no executable {binary_name} in THIRD_PARTY_PATH ({override or 'not set'}), on PATH or next to "
            f"{sys.executable}",
            hint="install the wheel persia-server of a release, which contains the programs of persia; or in a clone, "
            "run: make setup",
        )
    return found
