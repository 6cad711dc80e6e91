"""Embedding servers and middlewares: this process becomes the binary."""

import os
from pathlib import Path
from typing import NoReturn

from persia.launch.entry import check_replica
from persia.launch.host import resolve_binary_execute_path
from persia.runtime import tokens

SERVER = "persia-embedding-sharded-server"
MIDDLEWARE = "persia-embedding-sharded-middleware"


def run(
    binary: str, *, port: int, embedding_config: Path | None, global_config: Path | None, index: int, size: int
) -> NoReturn:
    """Replace this process by a server or a middleware.

    Args:
        binary: :data:`SERVER` or :data:`MIDDLEWARE`.
        port: Where it listens; ``PERSIA_LISTEN`` wins. On loopback only while there is no token.
        embedding_config: None leaves it to the environment.
        global_config: Alike.
        index: Its index among its replicas.
        size: How many replicas there are.

    Raises:
        UsageError: The index is not below the size, or the binary is not there.
    """
    check_replica(index, size)
    program = resolve_binary_execute_path(binary)
    host = "0.0.0.0" if tokens.token_file() else "127.0.0.1"  # noqa: S104
    command = [program, "--replica-index", str(index), "--replica-size", str(size)]
    if not os.environ.get("PERSIA_LISTEN", "").strip():
        command += ["--listen", f"{host}:{port}"]
    for flag, path in (("--embedding-config", embedding_config), ("--global-config", global_config)):
        if path is not None:
            command += [flag, str(path)]
    os.execv(program, command)  # noqa: S606
