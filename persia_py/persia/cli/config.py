"""``persia config``: check configuration files, and show a whole configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from persia.cli.keys import KeysCommand
from persia.runtime.errors import ConfigError, UsageError

app = typer.Typer(no_args_is_help=True, help="Check configuration files, show a whole configuration.")

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
            help="persia.yml, embedding_config.yml and global_config.yml, recognised by their content. Default: those "
            "that a job here would read.",
        ),
    ] = None,
    general: Annotated[Path | None, typer.Option("--global", help="A global_config.yml.")] = None,
    overrides: Overrides = None,
    data: Annotated[
        bool, typer.Option("--data/--no-data", help="Read the names and types of the columns of the data, or not.")
    ] = True,
) -> None:
    """Check files, and list every mistake with its place. Slots of several files are compared.

    Of the data of a persia.yml the names and types of columns are read, but no rows.
    """
    from persia.config.files import LIMITS, PERSIA, check_files

    given = [*(files or _found()), *([general] if general is not None else [])]
    if Path("-") in given:
        error = UsageError("-: standard input is not read by this name")
        error.hint = "persia config check /dev/stdin"
        raise error
    checked = check_files(given, overrides or (), {} if general is None else {general: LIMITS})
    for warning in checked.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if checked.mistakes:
        raise ConfigError("\n".join(checked.mistakes))
    for line in checked.summary:
        typer.echo(f"ok: {line}")
    for path in checked.valid[PERSIA] if data else ():
        _check_columns(path, overrides or ())


def _check_columns(path: Path, overrides: Sequence[str]) -> None:
    """Check that the data has the columns that a persia.yml reads, in types that it can use."""
    from persia.config.document import open_document
    from persia.data.records.files import NoFileError
    from persia.trainer.parts import Parts

    config = open_document(path, overrides).config
    if config is None:
        return  # it was valid a moment ago
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
        missing = ConfigError(
            "no persia.yml, neither in PERSIA_CONFIG nor here, and no embedding_config.yml, neither in "
            "PERSIA_EMBEDDING_CONFIG nor in config/"
        )
        missing.hint = "give its path: persia config check FILE"
        raise missing
    return [path for path in found if path is not None]


@app.command("show", cls=KeysCommand)
def config_show(
    file: Annotated[Path | None, typer.Argument(help="Default: PERSIA_CONFIG, else persia.yml.")] = None,
    overrides: Overrides = None,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="Also make the model, and print the number of its weights.")
    ] = False,
) -> None:
    """Print a whole persia.yml with its defaults, and where each value came from."""
    from persia.config.document import open_document
    from persia.config.show import show
    from persia.runtime.config_files import find_persia_yml

    path = file or find_persia_yml()
    if path is None:
        missing = ConfigError("no persia.yml, neither in PERSIA_CONFIG nor in this folder")
        missing.hint = "give its path: persia config show FILE, or make one: persia data inspect FILE"
        raise missing
    document = open_document(path, overrides or ())
    document.findings.raise_if_any()
    for warning in document.findings.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(show(document), nl=False)
    if parameters and document.config is not None:
        from persia.trainer.models import count_parameters

        typer.echo(f"# the model has {count_parameters(document.config):,} weights, rows of embeddings left out")
