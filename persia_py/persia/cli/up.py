"""``persia up``: run a whole job on this host."""

from pathlib import Path
from typing import Annotated

import typer


def up(config: Annotated[Path, typer.Argument(help="The job, in YAML.")]) -> None:
    """Run a whole job on this host: NATS, servers, middlewares, data-compose, trainers."""
    from persia.launch import up as launch

    raise typer.Exit(launch.up(config))
