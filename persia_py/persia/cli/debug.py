"""``persia debug``: look into a job, and work in its image."""

import typer

from persia.cli import context_shell

app = typer.Typer(no_args_is_help=True, help="Look into a job, and work in its image.")
app.command("shell")(context_shell.shell)
app.command("notebook")(context_shell.notebook)
