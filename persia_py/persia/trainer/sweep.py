"""A search over a grid of settings: each combination is a separate run."""

import hashlib
import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persia.config import Config
from persia.config.document import open_document
from persia.runtime.errors import CheckpointError, ConfigError, PersiaError, UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.logging import get_logger
from persia.trainer.budget import BudgetSpentError
from persia.trainer.parts import Parts, metric_names, to_have_valid
from persia.trainer.record import FINISHED
from persia.trainer.run_folder import CONFIG, SUMMARY, RunFolder, check_same
from persia.trainer.state import HIGHER_IS_BETTER
from persia.trainer.trainer import Trainer

_logger = get_logger("trainer")

MANY = 20
"""The maximum number of trials that are started without confirmation."""


@dataclass
class Trial:
    """One combination of settings.

    Attributes:
        settings: The values of the keys that are searched over, as ``KEY=VALUE``.
        config: The complete configuration, from which the name of the run is derived.
        status: The status of the run, such as ``finished`` or ``stopped``; ``failed`` after an error; empty before.
        value: The metric of the validation set; None if it is not defined.
        loss: The loss of the validation set; None if it is not defined.
        error: The reason for the failure; empty if there is none.
        hint: The next step after the failure; empty if there is none.
        reused: Whether the trial had finished before.
        code: The exit code of the error; 0 without one.
    """

    settings: tuple[str, ...]
    config: Config
    status: str = ""
    value: float | None = None
    loss: float | None = None
    error: str = ""
    hint: str = ""
    reused: bool = False
    code: int = 0

    @property
    def folder(self) -> RunFolder:
        """The folder of the trial's run."""
        return RunFolder(Path(self.config.run.dir).expanduser() / str(self.config.run.name))


def grid(options: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the combinations of ``KEY=VALUE,VALUE`` options; each is a tuple of ``KEY=VALUE``.

    Commas in brackets, braces or quotes belong to a value: ``model.deep_mlp=[64,32],[128]`` has two values.

    Raises:
        UsageError: An option has another form, or a key or a value appears twice.
    """
    axes: dict[str, list[str]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        key, values = key.strip(), [value.strip() for value in _split(text)]
        if not equals or not key or not all(values):
            raise UsageError(f"--sweep {option!r}: expected KEY=VALUE,VALUE, such as train.dense_optimizer.lr=0.1,0.01")
        if key in axes:
            raise UsageError(f"--sweep {option!r}: {key} is specified twice; list all its values in one option")
        if repeated := [value for value in values if values.count(value) > 1]:
            raise UsageError(f"--sweep {option!r}: the value {repeated[0]} is given twice")
        if key.split(".")[0] == "run":
            raise UsageError(f"--sweep {option!r}: each trial is a separate run; `run` cannot be searched over")
        axes[key] = values
    return [*itertools.product(*([f"{key}={value}" for value in values] for key, values in axes.items()))]


def _split(text: str) -> list[str]:
    """Split at commas that are neither in brackets nor in quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "[{(":
            depth += 1
        elif sign in ")}]":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += sign
    return parts


def trials(file: Path, overrides: Sequence[str], options: Sequence[str]) -> list[Trial]:
    """Return the trials of a sweep, after checking all of them.

    Args:
        file: The ``persia.yml``.
        overrides: The texts after ``--set``.
        options: The texts after ``--sweep``.

    Raises:
        ConfigError: A combination is not a valid configuration.
        UsageError: An option is invalid, ``data.synthetic`` is true, or a trial has no validation set to compare
            it on.
    """
    found: list[Trial] = []
    warnings: dict[str, None] = {}
    rows: dict[str, Parts] = {}
    for chosen in grid(options):
        document = open_document(file, [*overrides, *chosen])
        config = document.checked()
        warnings |= dict.fromkeys(document.findings.warnings)  # log each warning once, not for each trial
        if config.data.synthetic:
            raise UsageError(
                "--sweep: data.synthetic is true; models cannot be compared on random rows",
                hint="set data.synthetic: false",
            )
        data = config.data.model_dump_json()
        if data not in rows:
            rows[data] = Parts(config)
        if rows[data].valid is None:
            raise UsageError(
                f"--sweep: with {' '.join(chosen)} there is no validation set to compare the trials on; the test set "
                "is not used",
                hint=to_have_valid(config.data),
            )
        name = f"sweep-{_digest(config, rows[data])}"
        found.append(Trial(chosen, config.with_blocks(run=config.run.model_copy(update={"name": name}))))
    for warning in warnings:
        _logger.warning("%s", warning)
    names: dict[str, Trial] = {}
    for trial in found:
        same = names.setdefault(str(trial.config.run.name), trial)
        if same is not trial:
            raise UsageError(f"--sweep: {' '.join(same.settings)} and {' '.join(trial.settings)} are the same settings")
    return found


def _digest(config: Config, parts: Parts) -> str:
    """Return 10 hexadecimal digits that depend on the settings, the folder of the file, and the data files.

    As on resume, data files are identified by name and size. Trials are therefore compared only on the same rows.
    """
    content = config.model_dump(mode="json", by_alias=True, exclude={"run"})
    files = [part.files.sizes for part in (parts.train, parts.valid, parts.test) if part is not None]
    text = json.dumps([str(config.folder), content, files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def metric_of(config: Config) -> str:
    """Return the metric by which trials are compared: that of early stopping, or the first suitable one."""
    stop = config.train.early_stop
    if stop is not None:
        return stop.metric
    _, _, kind = config.compiled.labels[0]
    comparable = (*HIGHER_IS_BETTER, "log_loss", "ne") if kind == "bce" else ()
    return next((name for name in metric_names(config) if name in comparable), "loss")


def run(trial: Trial) -> None:
    """Run a trial to its end, unless it has finished before. An interrupted trial continues.

    An error of opening or training the run is recorded in the trial.

    Raises:
        ConfigError: The folder of the trial has the run of another configuration, or one that cannot be read.
        CheckpointError: The summary of the trial is damaged, or cannot be read.
    """
    folder = trial.folder
    exists = (folder.path / CONFIG).is_file()
    if exists:
        try:
            check_same(folder.shown, folder.config(), trial.config)
            is_finished = folder.read_json(SUMMARY).get("status") == FINISHED
        except CheckpointError as error:
            error.hint = _hint(error, folder)
            raise
        except ConfigError as error:
            error.hint = _from_beginning(folder)
            raise
        if is_finished:
            trial.reused = True
            _judge(trial)
            return
    try:
        if not exists and folder.path.exists():
            raise UsageError(
                f"{folder.shown}: the trial cannot be trained in this folder, because it exists and has no {CONFIG}",
                hint=_from_beginning(folder),
            )
        with Trainer(trial.config) as trainer:
            if exists:
                trainer.resume(folder.path)
            for _ in trainer.fit():
                pass
    except PersiaError as error:
        said = "".join(str(error).splitlines()[:1]) or type(error).__name__
        trial.status, trial.error, trial.code = "failed", said, error.exit_code
        trial.hint = _hint(error, folder)
        return
    except Exception as error:  # an error of the user's model; the other trials still run
        said = "".join(str(error).splitlines()[:1])
        trial.status, trial.error, trial.code = "failed", f"{type(error).__name__}: {said}", ExitCode.FAILED
        return
    _judge(trial)


def _hint(error: PersiaError, folder: RunFolder) -> str:
    """Return the next step after an error of a trial. It replaces hints that assume a run named by the user."""
    if isinstance(error, CheckpointError):
        return "; ".join(filter(None, (error.hint, _from_beginning(folder))))
    if isinstance(error, BudgetSpentError):  # --set in a sweep would define another trial
        run, config = shlex.quote(folder.shown), shlex.quote(f"{folder.shown}/{CONFIG}")
        return f"persia train {config} --resume {run} --set budget.usd=USD; then repeat the sweep"
    return error.hint


def _from_beginning(folder: RunFolder) -> str:
    """Return the next step if the run of a trial cannot be continued. The settings determine the run's name."""
    return f"to train the trial from the beginning: rm -r {shlex.quote(folder.shown)}; then repeat the sweep"


def _judge(trial: Trial) -> None:
    """Read the results of a trial from its summary."""
    summary: dict[str, Any] = trial.folder.read_json(SUMMARY)
    valid = summary.get("valid") or {}
    metric = metric_of(trial.config)
    labels = valid.get("labels") or {}
    first: dict[str, Any] = next(iter(labels.values()), {})
    trial.status, trial.loss = str(summary.get("status")), valid.get("loss")
    trial.value = trial.loss if metric == "loss" else first.get(metric)


def ranked(found: Sequence[Trial]) -> list[Trial]:
    """Return the trials ordered by their metric, best first; those without a value come last."""
    sign = -1 if metric_of(found[0].config) in HIGHER_IS_BETTER else 1

    def key(trial: Trial) -> tuple[bool, float]:
        return trial.value is None, 0.0 if trial.value is None else sign * trial.value

    return sorted(found, key=key)
