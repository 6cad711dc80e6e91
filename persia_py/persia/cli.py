"""The ``persia`` command."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import persia
from persia.errors import ConfigError, PersiaError, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train recommender models on embedding servers.",
    rich_markup_mode=None,
)
config_app = typer.Typer(no_args_is_help=True, help="Check configuration files.")
ckpt_app = typer.Typer(no_args_is_help=True, help="Look into checkpoints, offline.")
app.add_typer(config_app, name="config")
app.add_typer(ckpt_app, name="ckpt")


def _version(show: bool) -> None:
    if not show:
        return
    import persia_core

    typer.echo(f"persia {persia.__version__}")
    typer.echo(f"persia_core {persia_core.__version__} from {persia_core.__file__}")
    typer.echo("built: " + ", ".join(f"{key} {value}" for key, value in persia_core.BUILD_INFO.items()))
    raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Versions and how persia_core was built."),
    ] = False,
) -> None:
    del version


@config_app.command("check")
def config_check(
    embedding: Annotated[
        Path | None, typer.Argument(help="embedding_config.yml; default: as a script finds it.")
    ] = None,
    general: Annotated[
        Path | None, typer.Option("--global", help="global_config.yml; default: as a script finds it.")
    ] = None,
) -> None:
    """Check both configuration files; every mistake is listed with its place."""
    from persia.configs import find_config, read_config
    from persia_core import config

    embedding = embedding or find_config("PERSIA_EMBEDDING_CONFIG", "embedding_config.yml")
    general = general or find_config("PERSIA_GLOBAL_CONFIG", "global_config.yml")
    if embedding is None:
        raise ConfigError("no embedding_config.yml: give its path, or set PERSIA_EMBEDDING_CONFIG")
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


@ckpt_app.command("list")
def ckpt_list(
    parent: Annotated[str, typer.Argument(help="A folder of checkpoints, a checkpoint, or s3://bucket/prefix.")],
) -> None:
    """List the checkpoints in a folder, also broken ones with the reason; of an object store, by their manifests."""
    from persia.copies import Copies, is_url
    from persia_core import checkpoint

    if is_url(parent):
        copies = Copies(parent)
        whole = copies.whole()
        if not whole:
            typer.echo(f"{parent}: no checkpoints")
        for each in whole:
            size = f"{each.rows:,} rows  {each.size:,} bytes"
            typer.echo(f"{copies.url}/{each.name}  step {each.age[1]}  {size}  {each.created_at}")
        return
    found = checkpoint.listing(parent)
    if not found:
        typer.echo(f"{parent}: no checkpoints")
    for entry in found:
        if entry["problem"] is None:
            typer.echo(
                f"{entry['path']}  step {entry['step']}  {entry['rows']:,} rows  {entry['bytes']:,} bytes  "
                f"{entry['created_at']}"
            )
        else:
            typer.echo(f"{entry['path']}  BROKEN: {entry['problem']}")


@ckpt_app.command("show")
def ckpt_show(directory: Annotated[str, typer.Argument(help="A checkpoint.")]) -> None:
    """Show what a checkpoint's manifest says, as JSON."""
    from persia_core import checkpoint

    typer.echo(checkpoint.Checkpoint(_folder(directory)).manifest)


@ckpt_app.command("verify")
def ckpt_verify(directory: Annotated[str, typer.Argument(help="A checkpoint.")]) -> None:
    """Check size and hash of every file of a checkpoint."""
    from persia_core import checkpoint

    opened = checkpoint.Checkpoint(_folder(directory))
    opened.verify()
    size = sum(file["bytes"] for file in opened.files)
    typer.echo(f"ok: {directory}: {len(opened.files)} files, {size:,} bytes, step {opened.step}")


def _folder(directory: str) -> str:
    """Return it, if it is no URL."""
    from persia.copies import is_url

    if is_url(directory):
        raise UsageError(f"{directory}: fetch it first, which verifies it: persia ckpt copy {directory} FOLDER")
    return directory


@ckpt_app.command("copy")
def ckpt_copy(
    source: Annotated[str, typer.Argument(help="A checkpoint: a folder, or s3://bucket/prefix/name.")],
    destination: Annotated[str, typer.Argument(help="Where it is to be: the other of the two.")],
) -> None:
    """Copy a checkpoint to an object store or back, verified; whole or not at all."""
    from persia.copies import copy

    copy(source, destination)
    typer.echo(f"ok: {source} is at {destination}, too")


@app.command()
def up(config: Annotated[Path, typer.Argument(help="The job, in YAML.")]) -> None:
    """Run a whole job on this host: NATS, servers, middlewares, data-compose, trainers."""
    from persia.launch import up as launch

    raise typer.Exit(launch.up(config))


@app.command()
def status(
    nats_url: Annotated[str | None, typer.Option(help="Default: PERSIA_NATS_URL.")] = None,
    job: Annotated[str | None, typer.Option(help="Default: PERSIA_JOB, else as configured.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every job on this NATS.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what runs of a job, where, and how healthy. Exits with 1 if something is missing or unwell."""
    from persia import job as jobs
    from persia import service
    from persia import status as statuses

    found = statuses.status(service.nats_url(nats_url), None if every else job or jobs.job_name())
    if as_json:
        typer.echo(found.to_json())
    else:
        statuses.show(found)
    raise typer.Exit(1 if found.problems else 0)


def main() -> None:
    """Run the command; errors end with one message, a hint and the exit code of their class."""
    try:
        app()
    except PersiaError as error:
        typer.echo(f"error: {error}", err=True)
        if error.hint:
            typer.echo(f"next:  {error.hint}", err=True)
        sys.exit(error.exit_code)
