"""``persia status``: show the processes of a job."""

from typing import Annotated

import typer


def status(
    nats_url: Annotated[str | None, typer.Option(help="Default: PERSIA_NATS_URL.")] = None,
    job: Annotated[str | None, typer.Option(help="Default: PERSIA_JOB, else the name in global_config.yml.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every job of this NATS server.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the processes of a job. Exit with 1 if one is missing or unhealthy."""
    from persia.discovery import services
    from persia.doctor import job_status
    from persia.runtime.errors import UsageError
    from persia.runtime.job import job_name

    try:
        url = services.nats_url(nats_url)
    except UsageError as error:
        error.hint = "set it as the job has it, or run: persia status --nats-url nats://HOST:4222"
        raise
    found = job_status.status(url, None if every else job or job_name())
    if as_json:
        typer.echo(found.to_json())
    else:
        job_status.show(found)
    raise typer.Exit(1 if found.problems else 0)
