"""The ``persia-launcher`` command, with PersiaML's names for the parts of a job."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from persia.launch import binaries
from persia.launch.entry import entry, number
from persia.launch.script import report
from persia.runtime.errors import PersiaError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Start one part of a job. Options not given come from the environment.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_File = Annotated[str | None, typer.Argument(metavar="[FILE]", help="Script, arguments allowed: 'train.py --lr 1'.")]
_Arguments = Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Of the script.")]
_Index = Annotated[int | None, typer.Option(help="Default: REPLICA_INDEX, else 0.")]
_Size = Annotated[int | None, typer.Option(help="Default: REPLICA_SIZE, else 1.")]
_Slots = Annotated[Path | None, typer.Option(help="Default: PERSIA_EMBEDDING_CONFIG.")]
_General = Annotated[Path | None, typer.Option(help="Default: PERSIA_GLOBAL_CONFIG.")]


@app.command()
def nn_worker(
    file: _File = None,
    arguments: _Arguments = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Ranks here; default: GPU_NUM, one CPU rank when that is 0.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(help="Default: REPLICA_INDEX, else 0.")] = None,
    nnodes: Annotated[int | None, typer.Option(help="Default: REPLICA_SIZE, else 1.")] = None,
) -> None:
    """Train: run the ranks of one trainer replica. FILE defaults to PERSIA_NN_WORKER_ENTRY."""
    from persia.launch import trainer

    script, given = entry(file, arguments or (), variable="PERSIA_NN_WORKER_ENTRY")
    raise typer.Exit(
        trainer.run(
            script,
            given,
            ranks=max(1, number("GPU_NUM", 1)) if nproc_per_node is None else nproc_per_node,
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
) -> None:
    """Send batches: run the script of one data-compose replica. FILE defaults to PERSIA_DATALOADER_ENTRY."""
    from persia.launch import data_loader as loader

    script, given = entry(file, arguments or (), variable="PERSIA_DATALOADER_ENTRY")
    raise typer.Exit(
        loader.run(
            script, given, index=_or(replica_index, "REPLICA_INDEX", 0), size=_or(replica_size, "REPLICA_SIZE", 1)
        )
    )


@app.command()
def embedding_worker(
    port: Annotated[int, typer.Option(help="Where it listens; PERSIA_LISTEN wins.")] = 8887,
    embedding_config: _Slots = None,
    global_config: _General = None,
    replica_index: _Index = None,
    replica_size: _Size = None,
) -> None:
    """Become a middleware, which splits requests over the servers."""
    _become(binaries.MIDDLEWARE, port, embedding_config, global_config, replica_index, replica_size)


@app.command()
def embedding_parameter_server(
    port: Annotated[int, typer.Option(help="Where it listens; PERSIA_LISTEN wins.")] = 8888,
    embedding_config: _Slots = None,
    global_config: _General = None,
    replica_index: _Index = None,
    replica_size: _Size = None,
) -> None:
    """Become an embedding server, which holds a part of the rows."""
    _become(binaries.SERVER, port, embedding_config, global_config, replica_index, replica_size)


def _become(
    binary: str, port: int, slots: Path | None, general: Path | None, index: int | None, size: int | None
) -> NoReturn:
    binaries.run(
        binary,
        port=port,
        embedding_config=slots,
        global_config=general,
        index=_or(index, "REPLICA_INDEX", 0),
        size=_or(size, "REPLICA_SIZE", 1),
    )


def _or(given: int | None, variable: str, default: int) -> int:
    return number(variable, default) if given is None else given


def main() -> None:
    """Run the command; an error ends with one message, a hint and the exit code of its class."""
    try:
        app()
    except PersiaError as error:
        report(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
