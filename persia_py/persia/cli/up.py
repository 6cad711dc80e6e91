"""``persia up``: run a whole job on this host."""

from pathlib import Path
from typing import Annotated

import typer

from persia.cli.config import Overrides


def up(
    config: Annotated[Path, typer.Argument(help="A persia.yml, or a YAML file that describes the job.")],
    servers: Annotated[int | None, typer.Option(min=1, help="Number of embedding servers. Default: 1.")] = None,
    middlewares: Annotated[int | None, typer.Option(min=1, help="Number of middlewares. Default: 1.")] = None,
    data_compose: Annotated[
        int | None, typer.Option(min=1, help="Number of data-compose replicas. Default: 1.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of trainer ranks. Default: 1.")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="The name of the run. An interrupted run of this name is resumed. Default: run.name, or the time."
        ),
    ] = None,
    set_: Overrides = None,
) -> None:
    """Run a whole job on this host. The options apply to a persia.yml only."""
    from persia.launch import up as local
    from persia.launch.job_config import Sizes

    sizes = Sizes(servers, middlewares, data_compose, ranks, name)
    if set_:
        from persia.launch import ranks as with_overrides

        raise typer.Exit(with_overrides.up(config, set_, sizes))
    raise typer.Exit(local.up(config, sizes))
