"""``persia status``: what runs of a job, where, and how healthy it is."""

from typing import Annotated

import typer


def status(
    nats_url: Annotated[str | None, typer.Option(help="Default: PERSIA_NATS_URL.")] = None,
    job: Annotated[str | None, typer.Option(help="Default: PERSIA_JOB, else as configured.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every job on this NATS.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what runs of a job, where, and how healthy. Exits with 1 if something is missing or unwell."""
    from persia.cli import job_status
    from persia.discovery import services
    from persia.runtime.job import job_name

    found = job_status.status(services.nats_url(nats_url), None if every else job or job_name())
    if as_json:
        typer.echo(found.to_json())
    else:
        job_status.show(found)
    raise typer.Exit(1 if found.problems else 0)
