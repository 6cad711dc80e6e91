"""``persia doctor``: check this machine, the job and a configuration, and suggest the next step."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A persia.yml. Default: PERSIA_CONFIG, or persia.yml in this folder."),
    ] = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Run ten steps, from the model alone to all ranks; the last ones train.")
    ] = False,
    until: Annotated[int, typer.Option(min=1, max=10, metavar="N", help="With --ladder: the last step to run.")] = 10,
    nproc: Annotated[int | None, typer.Option(min=1, help="With --ladder: the number of ranks.")] = None,
    only: Annotated[str | None, typer.Option(metavar="NAME,…", help="Run these checks only, such as gpu,disk.")] = None,
    folder: Annotated[
        list[str] | None,
        typer.Option("--dir", help="Check whether this folder, or s3://bucket/prefix, can be written. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    env: Annotated[
        bool, typer.Option("--env", help="Print versions and variables, to be pasted into a report.")
    ] = False,
    diff_env: Annotated[
        bool, typer.Option("--diff-env", help="Compare the installed packages with those of the image.")
    ] = False,
    matrix: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Connect N ranks to each other. Run the command on every rank with RANK set. Without RANK, the "
            "command starts all ranks on this host.",
        ),
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="URL", help="Check what this Prometheus scrapes, and which series are absent.")
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Check the groups of this push gateway, and push a test value to it."),
    ] = None,
    image: Annotated[bool, typer.Option("--image", help="Run the checks of versions and GPUs in the image.")] = False,
    stack: Annotated[
        bool, typer.Option("--stack", help="Check names, ports and ranks from inside each container of the stack.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure disks, and with --matrix each connection.")
    ] = False,
) -> None:
    """Check versions, GPUs, network, services, disks and a configuration. For each problem, print the next command."""
    from persia.cli import doctor_views
    from persia.cli.quiet import only_warnings
    from persia.runtime.config_files import find_persia_yml
    from persia.runtime.errors import UsageError

    only_warnings()
    chosen = [
        name
        for name, value in {
            "--ladder": ladder,
            "--env": env,
            "--diff-env": diff_env,
            "--image": image,
            "--stack": stack,
            "--matrix": matrix,
            "--prometheus" if prometheus else "--gateway": prometheus or gateway,
        }.items()
        if value
    ]
    if len(chosen) > 1:
        raise UsageError(f"{', '.join(chosen)} are mutually exclusive")
    if env:
        doctor_views.environment()
        return
    if diff_env:
        raise typer.Exit(doctor_views.differences())
    if image:
        raise typer.Exit(doctor_views.image(as_json=as_json))
    if stack:
        raise typer.Exit(doctor_views.stack(as_json=as_json))
    if matrix is not None:
        raise typer.Exit(doctor_views.matrix(matrix, as_json=as_json, measure=measure))
    if prometheus or gateway:
        raise typer.Exit(doctor_views.metrics(prometheus, gateway, as_json=as_json))
    path = config or find_persia_yml()
    if ladder:
        if path is None:
            raise UsageError(
                "--ladder: no persia.yml: CONFIG is not given, PERSIA_CONFIG is not set, and this folder has none",
                hint="specify its path: persia doctor --ladder FILE, or create one from your data: "
                "persia data inspect DATA -o persia.yml",
            )
        raise typer.Exit(doctor_views.ladder(path, until=until, nproc=nproc))
    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    raise typer.Exit(doctor_views.checks(path, names, folder or [], as_json=as_json, measure=measure))
