"""``persia train``: train from a persia.yml, test it with one batch, or search over settings."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persia.cli.config import Overrides
from persia.runtime.errors import UsageError

if TYPE_CHECKING:
    from persia.config import Config
    from persia.trainer.run_folder import RunFolder


def _finished(file: Path, folder: "RunFolder", config: "Config", set_: list[str], *, local: bool) -> str:
    """Return the message about a run that has no steps left, with the command that continues its training."""
    from persia.trainer.run_folder import SUMMARY

    summary, stop = folder.read_json(SUMMARY), config.train.early_stop
    if summary.get("early_stopped") and stop is not None:
        said = f"the run has stopped early, at step {summary.get('step')}; nothing was trained"
        change = f"train.early_stop.patience={2 * stop.patience}"
    else:
        said = f"the run is finished: step {summary.get('step')}, data.epochs {config.data.epochs}; nothing was trained"
        change = f"data.epochs={2 * config.data.epochs}"
    key = change.partition("=")[0]
    overrides = [*(each for each in set_ if not each.startswith(key)), change]
    return f"{folder.shown}: {said}\nto continue training: {_again(file, overrides, folder, local=local)}"


def _again(file: Path, overrides: list[str], folder: "RunFolder", *, local: bool) -> str:
    """Return the command that continues a run."""
    options = "".join(f" --set {shlex.quote(each)}" for each in overrides) + (" --local" if local else "")
    return f"persia train {shlex.quote(str(file))}{options} --resume {shlex.quote(folder.shown)}"


def train(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A persia.yml.")],
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="With --resume: the run. Default: run.name, or runs/LATEST.")
    ] = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run after its newest checkpoint.")] = False,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also train a baseline on the rows of the run: lightgbm.")
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Train on one batch, evaluate and save, and leave no file.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Keep the rows in this process, even if PERSIA_NATS_URL is set.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train with N ranks and a server on this host.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V,V",
            help="Train once with each value, and compare the results. Repeatable: trains all combinations of the "
            "values.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Start a --sweep of more than 20 trials.")] = False,
    replace_rows: Annotated[
        bool, typer.Option("--replace-rows", help="With --test on servers: discard the rows that they hold.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show whole tracebacks, and log at level debug.")] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Train in the background, and show the output. On a terminal, Ctrl-C asks whether to end training.",
        ),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record a profile: the times of steps, and what limits them.")
    ] = False,
    sync_cuda: Annotated[
        bool,
        typer.Option(
            "--sync-cuda", help="Wait for each operation of a GPU, so that an error names the one that failed."
        ),
    ] = False,
) -> None:
    """Train a model on rows. Write a run folder with checkpoints, metrics and a report."""
    from persia.cli import train_modes
    from persia.cli.quiet import log_all, only_warnings
    from persia.config import load_config
    from persia.runtime.interruptible import interruptible

    with interruptible():
        from persia.trainer import baselines

    if verbose:
        log_all()
    only_warnings(evaluations=False)
    if run is not None and not resume:
        raise UsageError(
            f"{run}: RUN is only allowed with --resume",
            hint=f"to continue a run: persia train {shlex.join([str(file), '--resume', str(run)])}",
        )
    given = {"--resume": resume, "--baseline": baseline, "--test": test, "--nproc": nproc, "--sweep": sweep}
    train_modes.check_together({name for name, value in given.items() if value})
    train_modes.check_needs(profile=profile, test=test, sweep=bool(sweep), yes=yes, replace_rows=replace_rows)
    if follow:
        raise typer.Exit(train_modes.follow(file, set_ or ()))
    compare = None if baseline is None else baselines.find(baseline)
    if local:
        train_modes.leave_job()
    if sync_cuda:
        train_modes.synchronise_cuda()
    if sweep:
        raise typer.Exit(train_modes.sweep(file, set_ or (), sweep, confirmed=yes, local=local))
    if profile:
        set_ = [*(set_ or ()), *train_modes.profile_option(file, set_ or ())]
    config = load_config(file, set_ or ())
    if test:
        raise typer.Exit(train_modes.test(config, file, nproc, replace_rows=replace_rows))
    if nproc is not None:
        from persia.launch import ranks

        raise typer.Exit(ranks.train(config, file, nproc, name=train_modes.name_of(run, config) if resume else None))
    folder = _train(config, file, run, set_ or [], resume=resume, local=local)
    if folder is not None and compare is not None:
        compare(config, folder)
    if folder is not None:
        _show(config, folder)


def _show(config: "Config", folder: "RunFolder") -> None:
    """Print the results of a run, and the path of its folder."""
    from persia.trainer.profiling import show_profile
    from persia.trainer.progress import show_results
    from persia.trainer.record import STOPPED
    from persia.trainer.run_folder import SUMMARY

    summary = folder.read_json(SUMMARY)
    show_results(summary)
    if summary.get("status") == STOPPED and config.budget is not None:
        typer.echo(
            f"stopped after step {summary['step']}: the run has cost {summary['cost_usd']:.2f} USD, allowed: "
            f"{config.budget.usd:g} (budget.usd)"
        )
        more = f"--resume {shlex.quote(folder.shown)} --set budget.usd={2 * config.budget.usd:g}"
        typer.echo(f"next:  to continue training, repeat the command with {more}")
    if config.profile is not None:
        show_profile(folder)
    typer.echo(folder.shown)


def _train(
    config: "Config", file: Path, run: Path | None, set_: list[str], *, resume: bool, local: bool
) -> "RunFolder | None":
    """Train in this process, and return the run's folder. If the run is interrupted, exit."""
    from persia.runtime.exit_codes import ExitCode
    from persia.runtime.interruptible import interruptible

    with interruptible():
        from persia.trainer import Trainer
        from persia.trainer.operations import effective_batch
        from persia.trainer.progress import Shown
        from persia.trainer.record import STOPPED
        from persia.trainer.run_folder import SUMMARY

    stop = config.train.early_stop
    folder = None
    try:
        with Trainer(config) as trainer, Shown("auc" if stop is None else stop.metric) as shown:
            if resume:
                trainer.resume(run)
                typer.echo(f"resuming {trainer.folder.shown if trainer.folder else run}", err=True)
            reports = trainer.fit()
            folder = trainer.folder
            if trainer.sizing is not None:
                typer.echo(str(trainer.sizing))
            typer.echo(effective_batch(config))
            for report in reports:
                shown.report(report)
        if folder is not None and shown.reports == 0 and folder.read_json(SUMMARY).get("status") != STOPPED:
            typer.echo(_finished(file, folder, config, set_, local=local))
    except (KeyboardInterrupt, SystemExit) as error:
        code = error.code if isinstance(error, SystemExit) else ExitCode.INTERRUPTED
        if folder is not None and code:
            typer.echo(f"next:  {_again(file, set_, folder, local=local)}", err=True)
        sys.exit(code)
    return folder
