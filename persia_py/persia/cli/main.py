"""The ``persia`` command."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import persia
from persia.cli import ckpt, config, data, debug, profile
from persia.cli.doctor import doctor
from persia.cli.dump import dump
from persia.cli.evaluate import evaluate
from persia.cli.export import export
from persia.cli.keys import KeysCommand
from persia.cli.logs import logs
from persia.cli.pick import config_pick
from persia.cli.predict import predict
from persia.cli.quiet import log_all
from persia.cli.serve import serve
from persia.cli.status import status
from persia.cli.train import train
from persia.cli.up import up
from persia.launch.user_script import report
from persia.runtime import own_frames
from persia.runtime.errors import PersiaError
from persia.runtime.exit_codes import ExitCode

TRAIN, SERVE, RUN = "Train", "Serve", "Run"
"""The groups of commands in the help."""


class _Groups(TyperGroup):
    """A command group whose help lists each command under the ``rich_help_panel`` with which it was added."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the lists of commands."""
        groups: dict[str, list[tuple[str, Any]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                groups.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, command))
        width = formatter.width - 6 - max(len(name) for commands in groups.values() for name, _ in commands)
        for group, commands in groups.items():
            with formatter.section(group):
                formatter.write_dl([(name, command.get_short_help_str(width)) for name, command in commands])


app = typer.Typer(
    cls=_Groups,
    add_completion=False,
    no_args_is_help=True,
    help="Train recommender models on embedding servers.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data", rich_help_panel=TRAIN)  # the help lists commands in this order
app.command(cls=KeysCommand, rich_help_panel=TRAIN)(train)
app.command("eval", rich_help_panel=TRAIN)(evaluate)
app.command(rich_help_panel=TRAIN)(predict)
app.command(rich_help_panel=SERVE)(export)
app.command(rich_help_panel=SERVE)(serve)
app.command(rich_help_panel=RUN)(up)
app.command(rich_help_panel=RUN)(status)
app.command(rich_help_panel=RUN)(logs)
app.command(rich_help_panel=RUN)(doctor)
app.command(rich_help_panel=RUN)(dump)
config.app.command("pick", cls=KeysCommand)(config_pick)
app.add_typer(config.app, name="config", rich_help_panel=RUN)
app.add_typer(profile.app, name="profile", rich_help_panel=RUN)
app.add_typer(ckpt.app, name="ckpt", rich_help_panel=RUN)
app.add_typer(debug.app, name="debug", rich_help_panel=RUN)


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
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show versions, and how persia_core was built."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show whole tracebacks, and log at level debug: LOG_LEVEL=DEBUG.")
    ] = False,
) -> None:
    del version
    if verbose:
        log_all()


def main() -> None:
    """Run the command. Print an error as one message with the next step, and exit with the code of its class.

    An error that is not one of Persia often comes from the user's model: print its cause and the user's stack frames.
    """
    try:
        app(prog_name="persia")
    except PersiaError as error:
        report(error)
        sys.exit(error.exit_code)
    except Exception as error:
        own_frames.write(error)
        sys.exit(ExitCode.FAILED)
