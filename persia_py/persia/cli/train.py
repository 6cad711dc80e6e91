"""``persia train``: train a persia.yml."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persia.cli.config import Overrides

if TYPE_CHECKING:
    from persia.trainer.run_folder import RunFolder


def _finished(folder: "RunFolder") -> str:
    """Return the message about a run that has no step left."""
    from persia.trainer.run_folder import SUMMARY

    if folder.read_json(SUMMARY).get("early_stopped"):
        return "the run has stopped early; to train on, give it more patience: --set train.early_stop.patience=N"
    return "the run is finished; to train on, give more epochs: --set data.epochs=N"


def train(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A persia.yml.")],
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="With --resume: the run; by default the newest one.")
    ] = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run after its newest checkpoint.")] = False,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also train this model on the same rows: lightgbm.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record some steps, and show their times and what limits them.")
    ] = False,
) -> None:
    """Train a model: rows in, a run folder with checkpoints, metrics and a report out."""
    from persia.cli.quiet import only_warnings
    from persia.config import load_config
    from persia.runtime.errors import UsageError
    from persia.runtime.exit_codes import ExitCode
    from persia.trainer import Trainer, baselines
    from persia.trainer.profiling import show_profile
    from persia.trainer.progress import Shown, show_results
    from persia.trainer.run_folder import SUMMARY

    only_warnings(evaluations=False)
    if run is not None and not resume:
        raise UsageError(f"{run}: to continue a run, use persia train {file} --resume {run}")
    compare = None if baseline is None else baselines.find(baseline)
    config = load_config(file, set_ or ())
    if profile and config.profile is None:
        config = load_config(file, [*(set_ or ()), "profile={}"])
    stop = config.train.early_stop
    folder = None
    try:
        with Trainer(config) as trainer, Shown("auc" if stop is None else stop.metric) as shown:
            if resume:
                trainer.resume(run)
            reports = trainer.fit()
            folder = trainer.folder
            if trainer.sizing is not None:
                typer.echo(str(trainer.sizing))
            for report in reports:
                shown.report(report)
        if folder is None:
            return
        if shown.reports == 0:
            typer.echo(_finished(folder))
        if compare is not None:
            compare(config, folder)
        show_results(folder.read_json(SUMMARY))
        if config.profile is not None:
            show_profile(folder)
        typer.echo(folder.shown)
    except (KeyboardInterrupt, SystemExit) as error:
        code = error.code if isinstance(error, SystemExit) else ExitCode.INTERRUPTED
        if folder is not None and code:
            overrides = "".join(f" --set {each}" for each in set_ or ()) + " --profile" * profile
            typer.echo(f"next:  persia train {file}{overrides} --resume {folder.shown}", err=True)
        sys.exit(code)
