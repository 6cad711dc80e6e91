"""``persia status``: the processes of a job, once or as a table that is refreshed."""

from pathlib import Path
from typing import Annotated

import typer


def status(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="With --watch: a run of `persia train`, such as runs/LATEST.")
    ] = None,
    nats_url: Annotated[str | None, typer.Option(help="The address of NATS. Default: PERSIA_NATS_URL.")] = None,
    job: Annotated[
        str | None, typer.Option(help="The job. Default: PERSIA_JOB, or the name in global_config.yml.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every job of this NATS server.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    targets: Annotated[
        bool, typer.Option("--targets", help="Print the addresses of metrics, for file_sd_configs of Prometheus.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show resource usage and progress until Ctrl-C.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="With --watch: print CSV.")] = False,
    samples: Annotated[int | None, typer.Option("-l", min=1, help="With --watch: end after this many samples.")] = None,
    seconds: Annotated[
        float | None, typer.Option("-n", min=0.1, help="With --watch: seconds between samples. Default: 2.")
    ] = None,
) -> None:
    """Show the processes of a job. Exit with 1 if there is a problem, such as a missing process.

    With --watch or --targets, a problem does not change the exit code.
    """
    from persia.runtime.errors import UsageError

    if not watch:
        given = {"RUN": run is not None, "--csv": as_csv, "-l": samples is not None, "-n": seconds is not None}
        if wrong := [name for name, is_given in given.items() if is_given]:
            raise UsageError(f"persia status: {', '.join(wrong)}: only allowed with --watch")
        if targets:
            raise typer.Exit(_targets(nats_url, job, every=every))
        raise typer.Exit(_show(nats_url, job, every=every, as_json=as_json))
    if as_json or every or targets:
        name = "--json" if as_json else "--all" if every else "--targets"
        instead = "; use --csv" if as_json else ""
        raise UsageError(f"persia status: {name} is not allowed with --watch{instead}")
    _watch(run, nats_url, job, as_csv=as_csv, samples=samples, seconds=2.0 if seconds is None else seconds)


def _targets(nats_url: str | None, job: str | None, *, every: bool) -> int:
    """Print the addresses of metrics; return 0."""
    from persia.doctor import job_status
    from persia.runtime.job import job_name

    typer.echo(job_status.status(_url(nats_url), None if every else job or job_name()).targets())
    return 0


def _show(nats_url: str | None, job: str | None, *, every: bool, as_json: bool) -> int:
    """Show the status, and return the exit code."""
    from persia.doctor import job_status
    from persia.runtime.job import job_name

    found = job_status.status(_url(nats_url), None if every else job or job_name())
    if as_json:
        typer.echo(found.to_json())
    else:
        job_status.show(found)
    return 1 if found.problems else 0


def _watch(
    run: Path | None, nats_url: str | None, job: str | None, *, as_csv: bool, samples: int | None, seconds: float
) -> None:
    from persia.cli import watch
    from persia.runtime.job import job_name, run_dir

    if run is not None:
        folder = watch.run_folder(run)
        watched = watch.Watch(lambda: watch.of_run(folder), folder)
    else:
        url, name = _url(nats_url), job or job_name()
        watched = watch.Watch(lambda: watch.of_job(url, name), run_dir())
    (watch.write_csv if as_csv else watch.show)(watched, seconds, samples)


def _url(given: str | None) -> str:
    from persia.discovery import nats, services
    from persia.runtime.errors import UsageError

    try:
        return services.nats_url(given)
    except UsageError as error:
        error.hint = (
            f"for a stack of docker compose: {nats.IN_CONTAINER}; "
            "for a running job of persia up: . runs/NAME/job.env; for another job: persia status --nats-url "
            "nats://HOST:4222; for a run of `persia train`: persia status --watch runs/LATEST"
        )
        raise
