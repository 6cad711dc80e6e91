"""``persia profile``: the step times of a run, its bottleneck, and the memory of training."""

from pathlib import Path
from typing import Annotated

import typer

from persia.cli.config import Overrides

app = typer.Typer(no_args_is_help=True, help="Show step times, what limits a run, and the memory of training.")

Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The folder of a run that was trained with a profile, or of a profile."),
]


@app.command("steps")
def profile_steps(run: Run) -> None:
    """Show the time of each part of a step on each rank: share, median and 99th percentile."""
    from persia.profile import report

    report.show_steps(report.read(_folder(run)))


@app.command("report")
def profile_report(run: Run) -> None:
    """Show the share of each stage. The last line names the bottleneck of the run and the key to change."""
    from persia.profile import report

    report.show_report(report.read(_folder(run)))


@app.command("memory")
def profile_memory(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A persia.yml, or the folder of a run with `profile.memory`.")
    ],
    set_: Overrides = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the record.")] = Path("memory"),
    native: Annotated[bool, typer.Option(help="Record the frames of compiled code too.")] = False,
) -> None:
    """Show which operations of a run allocated most memory.

    For a persia.yml, train under memray, a package that must be installed, and show host memory.
    """
    from persia.profile import memory, report

    if file.is_dir() or file.name == "LATEST":
        typer.echo(report.memory_tables(_folder(file)))
        return
    overrides = [word for each in set_ or () for word in ("--set", each)]
    raise typer.Exit(memory.record(["train", str(file), *overrides], out, native=native))


def _folder(run: Path) -> Path:
    """Return the folder of a run. ``LATEST`` next to runs points to the newest run."""
    from persia.profile.profiler import FOLDER
    from persia.trainer.run_folder import find_run

    is_profile = any(run.glob("rank-*.json")) or (run / FOLDER).is_dir()
    return run if is_profile else find_run(run).path
