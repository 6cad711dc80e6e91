"""The ``persia-launcher`` command, with PersiaML's names for the parts of a job."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from persia.launch import binaries
from persia.launch.user_script import report
from persia.runtime.config_files import persia_config
from persia.runtime.errors import PersiaError, UsageError

_NATS_URL = "nats://persia_nats_service:4222"
"""PersiaML's default, on which its compose files rely."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Start one part of a job. The defaults of options come from the environment. PERSIA_NATS_URL defaults "
    f"to {_NATS_URL}.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_File = Annotated[
    str | None, typer.Argument(metavar="[FILE]", help="A script, with arguments if any: 'train.py --lr 1'.")
]
_Arguments = Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of the script.")]
_Index = Annotated[int | None, typer.Option(help="Index of this replica, from 0. Default: REPLICA_INDEX, or 0.")]
_Size = Annotated[int | None, typer.Option(help="Number of replicas. Default: REPLICA_SIZE, or 1.")]
_Config = Annotated[Path | None, typer.Option(help="The job's persia.yml. Default: PERSIA_CONFIG.")]
_Slots = Annotated[Path | None, typer.Option(help="An embedding_config.yml. Default: PERSIA_EMBEDDING_CONFIG.")]
_General = Annotated[Path | None, typer.Option(help="A global_config.yml. Default: PERSIA_GLOBAL_CONFIG.")]


@app.command()
def nn_worker(
    file: _File = None,
    arguments: _Arguments = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Ranks on this node. Default: GPU_NUM, or 1 if GPU_NUM is 0 or not set.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="Index of this node, from 0. Default: REPLICA_INDEX, or 0.")
    ] = None,
    nnodes: Annotated[int | None, typer.Option(help="Number of nodes. Default: REPLICA_SIZE, or 1.")] = None,
) -> None:
    """Run the ranks of one trainer replica.

    FILE defaults to PERSIA_NN_WORKER_ENTRY. If neither is set, the ranks train from PERSIA_CONFIG.
    """
    from persia.launch import nn_worker

    script, given = _script(file, arguments or (), variable="PERSIA_NN_WORKER_ENTRY")
    raise typer.Exit(
        nn_worker.run(
            script,
            given,
            ranks=max(1, _number("GPU_NUM", 1)) if nproc_per_node is None else nproc_per_node,
            node=_or(node_rank, "REPLICA_INDEX", 0),
            nodes=_or(nnodes, "REPLICA_SIZE", 1),
        )
    )


@app.command()
def data_loader(
    file: _File = None,
    arguments: _Arguments = None,
    replica_index: _Index = None,
    replica_size: _Size = None,
    until_finished: Annotated[
        bool,
        typer.Option(
            "--until-finished",
            help="Exit with code 0 when the run is finished or stopped, and with code 75 if SIGTERM arrives before.",
        ),
    ] = False,
) -> None:
    """Run the data script of one data-compose replica.

    FILE defaults to PERSIA_DATALOADER_ENTRY. If neither is set, the training data of the persia.yml that
    PERSIA_CONFIG names is sent.
    """
    from persia.launch import data_loader

    script, given = _script(file, arguments or (), variable="PERSIA_DATALOADER_ENTRY")
    index, size = _replica(replica_index, replica_size)
    raise typer.Exit(data_loader.run(script, given, index=index, size=size, until_finished=until_finished))


@app.command()
def embedding_worker(
    port: Annotated[int, typer.Option(help="Port to listen on, unless PERSIA_LISTEN is set.")] = 8887,
    config: _Config = None,
    embedding_config: _Slots = None,
    global_config: _General = None,
    replica_index: _Index = None,
    replica_size: _Size = None,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,…",
            help="All servers, in the order of their replica index. Default: infer_config.servers of an infer job; "
            "other jobs find them through NATS.",
        ),
    ] = None,
) -> None:
    """Run a middleware, which splits requests over the servers."""
    files = {"--config": config, "--embedding-config": embedding_config, "--global-config": global_config}
    _become(binaries.MIDDLEWARE, port, files, replica_index, replica_size, servers)


@app.command()
def embedding_parameter_server(
    port: Annotated[int, typer.Option(help="Port to listen on, unless PERSIA_LISTEN is set.")] = 8888,
    config: _Config = None,
    embedding_config: _Slots = None,
    global_config: _General = None,
    replica_index: _Index = None,
    replica_size: _Size = None,
) -> None:
    """Run an embedding server, which holds a range of the shards."""
    files = {"--config": config, "--embedding-config": embedding_config, "--global-config": global_config}
    _become(binaries.SERVER, port, files, replica_index, replica_size)


def _become(
    binary: str,
    port: int,
    files: dict[str, Path | None],
    index: int | None,
    size: int | None,
    servers: str | None = None,
) -> NoReturn:
    index, size = _replica(index, size)
    binaries.run(binary, port=port, files=files, index=index, size=size, servers=servers)


def _replica(given_index: int | None, given_size: int | None) -> tuple[int, int]:
    """Return replica index and number of replicas, from the options, or ``REPLICA_INDEX`` and ``REPLICA_SIZE``."""
    index, size = _or(given_index, "REPLICA_INDEX", 0), _or(given_size, "REPLICA_SIZE", 1)
    if size < 1:
        hint = "correct --replica-size or REPLICA_SIZE"
        raise UsageError(f"the number of replicas is {size}; it must be at least 1", hint=hint)
    if not 0 <= index < size:
        raise UsageError(
            f"the replica index is {index}, but the number of replicas is {size}: indexes go from 0 to {size - 1}",
            hint="correct the index (--replica-index or REPLICA_INDEX) or the size (--replica-size or REPLICA_SIZE)",
        )
    return index, size


def _or(given: int | None, variable: str, default: int) -> int:
    return _number(variable, default) if given is None else given


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise UsageError(f"environment variable {variable}={text!r}: must be an integer of at least 0")
    return int(text)


def _script(given: str | None, arguments: Sequence[str], *, variable: str) -> tuple[Path | None, list[str]]:
    """Return the path of a script and its arguments; None for the built-in one, which reads ``PERSIA_CONFIG``.

    Args:
        given: A path, or a path and arguments as in a shell; None means the content of the variable.
        arguments: Additional arguments, which are appended.
        variable: ``PERSIA_NN_WORKER_ENTRY`` or ``PERSIA_DATALOADER_ENTRY``.

    Raises:
        UsageError: No script is given, or it does not exist.
        ConfigError: The file of ``PERSIA_CONFIG`` does not exist, or is set together with ``PERSIA_EMBEDDING_CONFIG``.
    """
    text = (given or os.environ.get(variable, "")).strip()
    if not text:
        if persia_config() is not None:
            return None, []
        raise UsageError(
            f"no script: FILE is not given, and neither {variable} nor PERSIA_CONFIG is set",
            hint=f"specify FILE, or set {variable}, or PERSIA_CONFIG to the path of a persia.yml",
        )
    if Path(text).is_file():
        return Path(text).resolve(), list(arguments)
    origin = "FILE" if given else variable
    try:
        name, *own = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{origin}={text!r}: expected a path and arguments as in a shell: {error}") from error
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"{origin}: {path}: no such file (working directory: {Path.cwd()})")
    return path.resolve(), [*own, *arguments]


def main() -> None:
    """Run the command. Print an error as one message with the next step, and exit with the code of its class.

    If ``PERSIA_NATS_URL`` is not set, PersiaML's default is used; an empty value means the embedded mode.
    """
    os.environ.setdefault("PERSIA_NATS_URL", _NATS_URL)
    try:
        app()
    except PersiaError as error:
        report(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
