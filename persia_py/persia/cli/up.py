"""``persia up``: run a whole job on this host."""

from pathlib import Path
from typing import Annotated

import typer


def up(config: Annotated[Path, typer.Argument(help="A YAML file that describes the job.")]) -> None:
    """Run a whole job on this host."""
    from persia.launch import up as local

    raise typer.Exit(local.up(config))
