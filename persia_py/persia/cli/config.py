"""``persia config``: check configuration files, show a whole configuration, and estimate the memory of its pods."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from persia.cli.keys import KeysCommand
from persia.runtime.errors import ConfigError, StorageError, UsageError

app = typer.Typer(
    no_args_is_help=True,
    help="Check configuration files, show a whole configuration, estimate its memory, pick an instance for it.",
)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key, such as train.seed=7; repeatable.")
]
"""The option ``--set`` of every verb that reads a ``persia.yml``."""


@app.command("check", cls=KeysCommand)
def config_check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="persia.yml, embedding_config.yml and global_config.yml, recognized by their content. Default: the "
            "files that a job in the current folder would read.",
        ),
    ] = None,
    general: Annotated[Path | None, typer.Option("--global", help="A global_config.yml.")] = None,
    overrides: Overrides = None,
    data: Annotated[
        bool,
        typer.Option("--data/--no-data", help="Check the names and types of the data columns, or omit this check."),
    ] = True,
) -> None:
    """Check files, and list every error with its location. The slots of all files are compared.

    For a persia.yml, the names and types of the columns of its data are read, but no rows.
    """
    from persia.config.files import LIMITS, PERSIA, check_files

    given = [*(files or _found()), *([general] if general is not None else [])]
    if Path("-") in given:
        raise UsageError(
            "-: expected the path of a file; this name does not mean standard input",
            hint="to check standard input: persia config check /dev/stdin",
        )
    checked = check_files(given, overrides or (), {} if general is None else {general: LIMITS})
    for warning in checked.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if checked.mistakes:
        limits = [] if general is None else ["--global", str(general)]
        changes = [word for each in overrides or () for word in ("--set", each)]
        unread = [] if data else ["--no-data"]
        again = ["persia", "config", "check", *map(str, files or ()), *limits, *changes, *unread]
        raise ConfigError("\n".join(checked.mistakes), hint=f"correct each error, then run: {shlex.join(again)}")
    for line in checked.summary:
        typer.echo(f"ok: {line}")
    for path in checked.valid[PERSIA] if data else ():
        _check_columns(path, overrides or ())


def _check_columns(path: Path, overrides: Sequence[str]) -> None:
    """Check that the data has the columns that a persia.yml reads, with usable types."""
    from persia.config.document import open_document
    from persia.data.records.files import NoFileError
    from persia.trainer.parts import Parts

    config = open_document(path, overrides).config
    if config is None:
        return  # not expected, because the file was valid when it was checked
    try:
        paths = Parts(config).check_columns()
    except NoFileError as error:
        typer.echo(f"warning: {path}: the columns of the data are not checked: {error}", err=True)
        return
    typer.echo(f"ok: {path}: the columns of {len(paths)} data file{'s' if len(paths) > 1 else ''} fit")


def _found() -> list[Path]:
    """Return the files that a job in this folder would read."""
    from persia.runtime.config_files import EMBEDDING_CONFIG, GLOBAL_CONFIG, find_config, find_persia_yml

    found = [
        find_persia_yml(),
        find_config(EMBEDDING_CONFIG, "embedding_config.yml"),
        find_config(GLOBAL_CONFIG, "global_config.yml"),
    ]
    if found[:2] == [None, None]:
        raise ConfigError(
            "no file to check: PERSIA_CONFIG and PERSIA_EMBEDDING_CONFIG are not set, and this folder has neither "
            "persia.yml nor config/embedding_config.yml",
            hint="specify its path: persia config check FILE",
        )
    return [path for path in found if path is not None]


@app.command("show", cls=KeysCommand)
def config_show(
    file: Annotated[
        Path | None, typer.Argument(help="A persia.yml. Default: PERSIA_CONFIG, or persia.yml in this folder.")
    ] = None,
    overrides: Overrides = None,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="Also build the model, and print the number of its weights.")
    ] = False,
) -> None:
    """Print a persia.yml with all defaults, and the source of each value."""
    from persia.config.document import open_document
    from persia.config.show import show

    document = open_document(_path(file, "show"), overrides or ())
    document.findings.raise_if_any()
    for warning in document.findings.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(show(document), nl=False)
    if parameters and document.config is not None:
        from persia.trainer.models import count_parameters

        typer.echo(f"# the model has {count_parameters(document.config):,} weights, not counting embedding rows")


@app.command("sizing", cls=KeysCommand)
def config_sizing(
    file: Annotated[
        Path | None, typer.Argument(help="A persia.yml. Default: PERSIA_CONFIG, or persia.yml in this folder.")
    ] = None,
    servers: Annotated[
        int, typer.Option(min=1, max=256, help="Number of embedding servers (the value of SERVER_REPLICA).")
    ] = 2,
    trainers: Annotated[int, typer.Option(min=1, help="Number of trainer pods (the value of TRAINER_REPLICA).")] = 2,
    ranks: Annotated[
        int, typer.Option(min=1, help="Number of ranks in each trainer pod (the value of GPU_NUM, or 1 without GPUs).")
    ] = 1,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the patch to this file.")
    ] = None,
) -> None:
    """Print the memory that the pods of a job need on Kubernetes, as a Kustomize patch.

    At most the first 131,072 rows of the data are read. If data.train is a path inside the pods, specify the local path
    with --set data.train=PATH. The estimate is the one that a run makes at its start.
    """
    from persia.config.document import open_document
    from persia.runtime.files import write_whole
    from persia.trainer import pod_memory
    from persia.trainer.sizing import shown

    document = open_document(_path(file, "sizing"), overrides or ())
    document.findings.raise_if_any()
    if document.config is None:
        return  # not reached: raise_if_any raises if there is no config
    found, pods = pod_memory.pods_of(document.config, servers, trainers, ranks)
    rows = sum(table.rows for table in found.tables)
    summary = (
        f"# {'' if found.is_exact else 'About '}{rows:,} rows on {servers} server{'s' * (servers != 1)}, "
        f"{shown(found.server)} each; {trainers * ranks} rank{'s' * (trainers * ranks != 1)}, "
        f"{shown(found.trainer)} each."
    )
    text = "\n".join([summary, *pod_memory.patch(pods), ""])
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        write_whole(out, text.encode())
    except OSError as error:
        raise StorageError(f"cannot write the patch to {out}: {error.strerror or error}") from error
    typer.echo(f"{summary.removeprefix('# ')} The patch is in {out}")


def _path(file: Path | None, verb: str) -> Path:
    """Return the persia.yml that was passed, or the one of this folder or job."""
    from persia.runtime.config_files import find_persia_yml

    path = file or find_persia_yml()
    if path is None:
        raise ConfigError(
            "no persia.yml: PERSIA_CONFIG is not set, and this folder has none",
            hint=f"specify its path: persia config {verb} FILE, or create one from your data: persia data inspect DATA "
            "-o persia.yml",
        )
    return path
