"""``persia config``: check configuration files."""

from pathlib import Path
from typing import Annotated

import typer

from persia.runtime.errors import ConfigError, UsageError

app = typer.Typer(no_args_is_help=True, help="Check configuration files.")


@app.callback()
def _config() -> None:
    pass


@app.command("check")
def config_check(
    embedding: Annotated[
        Path | None, typer.Argument(help="Default: PERSIA_EMBEDDING_CONFIG, else config/embedding_config.yml.")
    ] = None,
    general: Annotated[
        Path | None, typer.Argument(help="Default: PERSIA_GLOBAL_CONFIG, else config/global_config.yml.")
    ] = None,
    option: Annotated[Path | None, typer.Option("--global", help="The second file, as an option.")] = None,
) -> None:
    """Check both configuration files, and list every mistake with its place."""
    from persia.runtime.config_files import find_config, read_config
    from persia_core import config

    if general is not None and option is not None:
        raise UsageError(f"two global configurations, {general} and {option}: give one")
    general = general or option
    embedding = embedding or find_config("PERSIA_EMBEDDING_CONFIG", "embedding_config.yml")
    general = general or find_config("PERSIA_GLOBAL_CONFIG", "global_config.yml")
    if embedding is None:
        missing = ConfigError("no embedding_config.yml, neither in PERSIA_EMBEDDING_CONFIG nor in config/")
        missing.hint = "give its path: persia config check FILE"
        raise missing
    mistakes: list[str] = []
    warnings: list[str] = []
    summary: list[str] = []
    try:
        slots = config.parse_embedding_config(*read_config(embedding))
        warnings += slots.warnings
        summary.append(f"{embedding}: {len(slots.slots)} slots in {len(slots.tables)} tables")
        for (table, _), settings in zip(slots.tables, slots.settings, strict=True):
            if settings:
                summary.append(f"  {table}: {', '.join(settings)}")
    except ConfigError as error:
        mistakes.append(str(error))
    if general is not None:
        try:
            values = config.parse_global_config(*read_config(general))
            warnings += values.warnings
            summary.append(f"{general}: capacity {values.capacity:,} rows")
        except ConfigError as error:
            mistakes.append(str(error))
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    for line in summary:
        typer.echo(f"ok: {line}")
