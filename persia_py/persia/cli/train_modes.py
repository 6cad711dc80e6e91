"""The modes of ``persia train`` other than training in this process: a test of one batch, several ranks, a sweep."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from persia.config import Config
from persia.config.document import open_document
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.logging import get_logger
from persia.runtime.settings import reload_env, settings

if TYPE_CHECKING:
    from persia.trainer.sweep import Trial

_logger = get_logger("train")

_TOGETHER = ({"--test", "--nproc"}, {"--nproc", "--resume"}, {"--baseline", "--resume"})
"""Options that may be combined; all other options are mutually exclusive."""
FOLLOW = ("--follow", "-f")
"""The options that :func:`follow` removes from the command."""
_JOB = ("PERSIA_NATS_URL", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Variables that make this process a rank of a job."""


def profile_option(file: Path, overrides: Sequence[str]) -> list[str]:
    """Return the override for ``--profile``; none if the configuration already has the block.

    Raises:
        ConfigError: The configuration has errors.
    """
    # the warnings are logged later, when the file is read for training
    config = open_document(file, overrides).checked()
    return [] if config.profile is not None else ["profile={}"]


def check_together(options: set[str]) -> None:
    """Refuse options that exclude each other.

    Raises:
        UsageError: Two options that exclude each other are given.
    """
    if len(options) > 1 and options not in _TOGETHER:
        raise UsageError(f"{' and '.join(sorted(options))} cannot be combined")


def check_needs(*, profile: bool, test: bool, sweep: bool, yes: bool, replace_rows: bool) -> None:
    """Refuse options that would have no effect.

    Raises:
        UsageError: An option would have no effect.
    """
    if profile and (test or sweep):
        raise UsageError(f"--profile and {'--test' if test else '--sweep'} cannot be combined")
    if yes and not sweep:
        raise UsageError("--yes has no effect without --sweep")
    if replace_rows and not test:
        raise UsageError("--replace-rows has no effect without --test")


def follow(file: Path, overrides: Sequence[str]) -> int:
    """Run this command in the background and show its output. When it ends, return its exit code.

    Raises:
        ConfigError: The configuration has errors.
        StorageError: ``run.dir`` cannot be written.
        PersiaError: The operating system refuses to start a process.
    """
    from persia.launch import background

    config = open_document(file, overrides).checked()
    words = [word for word in sys.argv[1:] if word not in FOLLOW]
    return background.start(words, Path(config.run.dir).expanduser()).follow()


def leave_job() -> None:
    """Remove the variables of the surrounding job. This process then keeps the rows itself."""
    for name in _JOB:
        os.environ.pop(name, None)
    reload_env()


def synchronise_cuda() -> None:
    """Make this process and its children wait for each GPU operation. Must run before torch initializes CUDA."""
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    import torch

    torch.backends.cudnn.benchmark = False
    if not torch.cuda.is_available():
        _logger.warning("--sync-cuda has no effect: torch finds no GPU")


def name_of(run: Path | None, config: Config) -> str:
    """Return the name of the run that is resumed with several ranks.

    Raises:
        UsageError: The run does not exist, it was not trained by ranks, or it is not in ``run.dir``.
    """
    from persia.trainer.run_folder import FACTS, find_run

    parent = Path(config.run.dir).expanduser().absolute()
    if run is None and config.run.name is None:
        raise UsageError(
            "--nproc with --resume needs the folder of the run: the newest run may have been trained in one process, "
            "and ranks cannot continue such a run",
            hint=f"specify its folder: --resume {shlex.quote(str(Path(config.run.dir) / 'NAME'))}",
        )
    found = find_run(parent / str(config.run.name) if run is None else run)
    if "checkpoints" not in found.read_json(FACTS):
        raise UsageError(
            f"{found.shown}: the run was trained in one process; ranks cannot continue it",
            hint=f"continue it without --nproc: --resume {shlex.quote(found.shown)}",
        )
    if found.path.parent != parent:
        key = shlex.quote(f"run.dir={found.path.parent}")
        raise UsageError(
            f"{found.shown}: the run is not in run.dir, which is {parent}",
            hint=f"set run.dir to the folder that contains the run: --set {key}",
        )
    return found.path.name


def test(config: Config, file: Path, nproc: int | None, *, replace_rows: bool) -> int:
    """Test a configuration with one batch, in this process, on several ranks, or on the surrounding job's servers."""
    from persia.launch import ranks
    from persia.trainer import one_batch

    began = time.monotonic()
    where, left = "in this process", "no file is left"
    code = 0
    if nproc is not None:
        where = "on 1 rank" if nproc == 1 else f"on {nproc} ranks"
        code = ranks.test(config, file, nproc)
    elif settings.nats_url is not None:
        where, left = "on the servers of the job", "the servers now hold the rows of the test"
        _check_servers(replace_rows=replace_rows)
        one_batch.check_storage(config)
        code = ranks.test_on_servers(config, file)
    else:
        one_batch.run_here(config, str(file))
    if code == 0:
        typer.echo(f"ok: one batch passed {where}, in {time.monotonic() - began:.1f} s; {left}")
    return code


def _check_servers(*, replace_rows: bool) -> None:
    """Refuse a test that would disturb a run, or replace its rows.

    Raises:
        UsageError: A rank of the job is running, or the servers have rows.
        UnreachableError: NATS or a process of the job is missing.
    """
    from persia.doctor import job_status
    from persia.doctor.services import missing_parts
    from persia.runtime.job import job_name

    url = settings.nats_url
    assert url is not None  # noqa: S101 - the caller has checked it
    job = job_name()
    found = job_status.status(url, job)
    missing_parts(found)
    running = [one for one in found.processes if one.service == "persia-trainer"]
    if running:
        raise UsageError(
            f"job {job}: rank {running[0].index} is training on {running[0].host}; a test would end its run",
            hint="test without servers: --local; or wait until the run has ended: persia status",
        )
    unknown = [one for one in found.processes if one.service == "persia-server" and one.rows is None]
    if unknown and not replace_rows:
        raise UsageError(
            f"job {job}: server {unknown[0].index} does not report its rows, which a test replaces",
            hint="see the health of the server: persia status; if its rows are saved or not needed: --replace-rows",
        )
    rows = sum(one.rows or 0 for one in found.processes)
    if rows and not replace_rows:
        raise UsageError(
            f"job {job}: the servers hold {rows:,} rows, which a test replaces",
            hint="test without servers: --local; if the rows are saved or not needed: --replace-rows",
        )


def sweep(file: Path, overrides: Sequence[str], options: Sequence[str], *, confirmed: bool, local: bool) -> int:
    """Run the trials of a sweep, print them in a table ordered by metric, and return the exit code."""
    from persia.trainer import sweep as sweeps

    if settings.nats_url is not None:
        raise UsageError(
            "--sweep trains in this process, but PERSIA_NATS_URL is set",
            hint="add --local, to keep the rows in this process",
        )
    count = len(sweeps.grid(options))
    if count > sweeps.MANY and not confirmed:
        raise UsageError(
            f"--sweep: {count} trials, but more than {sweeps.MANY} need a confirmation",
            hint="specify fewer values, or confirm: --yes",
        )
    found = sweeps.trials(file, overrides, options)
    given = "".join(f" --set {shlex.quote(each)}" for each in overrides)
    swept = "".join(f" --sweep {shlex.quote(each)}" for each in options)
    command = f"persia train {shlex.quote(str(file))}{given}{' --local' if local else ''}"
    done = 0
    try:
        for done, trial in enumerate(found):
            typer.echo(f"trial {done + 1}/{count}: {' '.join(trial.settings)}")
            sweeps.run(trial)
            typer.echo(f"  {_outcome(trial, sweeps.metric_of(trial.config))}")
    except (KeyboardInterrupt, SystemExit) as error:
        code = error.code if isinstance(error, SystemExit) else ExitCode.INTERRUPTED
        typer.echo(f"interrupted in trial {done + 1} of {count}; finished trials are not repeated", err=True)
        typer.echo(f"next:  {command}{swept}{' --yes' if confirmed else ''}", err=True)
        return int(code or 0)
    best = _show_trials(sweeps.ranked(found), sweeps.metric_of(found[0].config))
    if best is not None:
        chosen = "".join(f" --set {shlex.quote(each)}" for each in best)
        typer.echo(f"next: {command}{chosen}")
    return next((trial.code for trial in found if trial.status == "failed"), 0)


def _outcome(trial: "Trial", metric: str) -> str:
    from persia.trainer.reports import title

    if trial.error:
        return f"failed: {trial.error}" + (f"\n  next:  {trial.hint}" if trial.hint else "")
    value = "-" if trial.value is None else f"{trial.value:.4f}"
    return f"{title(metric)} {value}, {trial.folder.shown}" + (" (finished before)" if trial.reused else "")


def _show_trials(found: "Sequence[Trial]", metric: str) -> tuple[str, ...] | None:
    """Print the table of trials, and return the settings of the best one."""
    from persia.trainer.reports import title

    keys = [each.partition("=")[0] for each in found[0].settings]
    table = Table("", *keys, f"valid {title(metric)}", "valid loss", "status", "run")
    for place, trial in enumerate(found, 1):
        values = [each.partition("=")[2] for each in trial.settings]
        numbers = ["-" if each is None else f"{each:.4f}" for each in (trial.value, trial.loss)]
        table.add_row(str(place), *values, *numbers, trial.status, trial.folder.shown)
    Console().print(table)
    best = found[0]
    return None if best.value is None else best.settings
