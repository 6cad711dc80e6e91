"""``persia train``: train a persia.yml."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persia.cli.config import Overrides

if TYPE_CHECKING:
    from persia.config import Config
    from persia.trainer.run_folder import RunFolder


def _finished(file: Path, folder: "RunFolder", config: "Config", set_: list[str]) -> str:
    """Return the message about a run that has no step left, with the command that trains it further."""
    from persia.trainer.run_folder import SUMMARY

    summary, stop = folder.read_json(SUMMARY), config.train.early_stop
    if summary.get("early_stopped") and stop is not None:
        said = f"it has stopped early, at step {summary.get('step')}; nothing was trained"
        change = f"train.early_stop.patience={2 * stop.patience}"
    else:
        said = f"it is finished: step {summary.get('step')}, data.epochs {config.data.epochs}; nothing was trained"
        change = f"data.epochs={2 * config.data.epochs}"
    key = change.partition("=")[0]
    options = "".join(f" --set {each}" for each in [*(each for each in set_ if not each.startswith(key)), change])
    return f"{folder.shown}: {said}\nto train on: persia train {file}{options} --resume {folder.shown}"


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
) -> None:
    """Train a model: rows in, a run folder with checkpoints, metrics and a report out."""
    from persia.cli.importing import interruptible
    from persia.cli.quiet import only_warnings
    from persia.config import load_config
    from persia.runtime.errors import UsageError
    from persia.runtime.exit_codes import ExitCode

    with interruptible():
        from persia.trainer import Trainer, baselines
        from persia.trainer.progress import Shown, show_results
        from persia.trainer.run_folder import SUMMARY

    only_warnings(evaluations=False)
    if run is not None and not resume:
        raise UsageError(f"{run}: to continue a run, use persia train {file} --resume {run}")
    compare = None if baseline is None else baselines.find(baseline)
    config = load_config(file, set_ or ())
    stop = config.train.early_stop
    folder = None
    try:
        with Trainer(config) as trainer, Shown("auc" if stop is None else stop.metric) as shown:
            if resume:
                trainer.resume(run)
                typer.echo(f"resuming {trainer.folder.shown if trainer.folder else run}", err=True)
            reports = trainer.fit()
            folder = trainer.folder
            for report in reports:
                shown.report(report)
        if folder is None:
            return
        if shown.reports == 0:
            typer.echo(_finished(file, folder, config, set_ or []))
        if compare is not None:
            compare(config, folder)
        show_results(folder.read_json(SUMMARY))
        typer.echo(folder.shown)
    except (KeyboardInterrupt, SystemExit) as error:
        code = error.code if isinstance(error, SystemExit) else ExitCode.INTERRUPTED
        if folder is not None and code:
            overrides = "".join(f" --set {each}" for each in set_ or ())
            typer.echo(f"next:  persia train {file}{overrides} --resume {folder.shown}", err=True)
        sys.exit(code)
