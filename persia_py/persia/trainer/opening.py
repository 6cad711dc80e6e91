"""Opens a run and closes it: its parts, its folder, its training context, and its log. Read :class:`OpenRun` first."""

import contextlib
import os
from typing import Any

import torch

from persia.config import Config
from persia.config.blocks import Paths
from persia.ctx import Checkpoints, TrainCtx
from persia.data import IterableDataset
from persia.features import Transform
from persia.runtime import log_files
from persia.runtime.errors import ConfigError, PersiaError, StorageError
from persia.runtime.logging import get_logger, next_step
from persia.runtime.settings import get_local_rank, get_rank, settings
from persia.trainer import fitting, models, optimizers
from persia.trainer.budget import Budget
from persia.trainer.facts import facts_of
from persia.trainer.fit_once import fit_once
from persia.trainer.job_folder import FITS, JobFolder
from persia.trainer.objective import Objective
from persia.trainer.parallel import option_of
from persia.trainer.parts import Parts, with_train
from persia.trainer.price import Interval
from persia.trainer.record import FINISHED, Record, check_tensorboard
from persia.trainer.run_folder import CONFIG, FACTS, SUMMARY, RunFolder, check_same, json_text, resolved
from persia.trainer.start_rows import load_start_rows, start_folder
from persia.trainer.state import TrainerState
from persia.trainer.step import check_divides
from persia.trainer.validation import Validation, may_continue
from persia_core.engine import Engine

_logger = get_logger("trainer")

FP16_GROWTH = 2000
"""The number of steps without an overflow after which the loss scale is doubled: the default of torch's GradScaler."""


class OpenRun:
    """A run that is prepared for training, unless it is a finished run that is resumed.

    A resumed run loads its transform, and never fits it again.

    Args:
        config: The configuration.
        model: The model to use instead of that of the configuration.
        source: Files to use instead of ``data.train``, or a data set; None means ``data.train``, or the stream of a
            job.
        resumed: The folder of the run to resume; None starts a new run. A job resumes automatically.

    Attributes:
        parts: The training, validation and test rows.
        folder: The run's folder.
        transform: The transform.
        model: The model.
        objective: The loss.
        is_open: Whether the run can train.
        is_finished: Whether it is a resumed run without remaining steps.
    """

    is_open = False
    is_finished = False

    def __init__(
        self,
        config: Config,
        model: torch.nn.Module | None,
        source: Paths | IterableDataset | None,
        resumed: RunFolder | None,
    ) -> None:
        self._config = config = config if isinstance(source, IterableDataset) else with_train(config, source)
        self._budget = Budget(config.budget)  # starts the clock: fitting counts towards the cost
        self._in_job = settings.nats_url is not None
        self._writes = get_rank() == 0
        folder = resumed or (None if self._in_job else RunFolder.new(config))
        if folder is not None and not self._in_job:
            folder.check_storage(config)
        self.parts = Parts(config)
        if config.run.tensorboard:
            check_tensorboard()
        self.parts.check_not_empty()
        self.folder = folder or JobFolder.new(config)
        if isinstance(self.folder, JobFolder) and self.folder.is_interrupted:
            resumed = self.folder
        if resumed is None:
            self._fitted = self._fit()
        else:
            self._before = self.folder.config()
            check_same(self.folder.shown, self._before, config)
            self._fitted = fitting.fitted_before(config, self.folder, self.parts)
        self.transform: Transform = self._fitted.transform
        self.objective = Objective(config.compiled.labels)
        self._own = source if isinstance(source, IterableDataset) else None
        self._steps_per_epoch = -(-self._fitted.rows // config.step_rows)
        self.total_steps = None if self._own is not None else self._steps_per_epoch * config.data.epochs
        self._build(model)
        if resumed is None:
            start_folder(config, in_job=self._in_job)  # finds an error before the folder is created
            self._begin(given=model is not None)
        elif not self._in_job and self._was_finished():
            return
        self._open(resumed is not None)

    def _fit(self) -> fitting.Fitted:
        """Fit the features. In a job, only one of the processes that share the folder fits them."""
        if self._in_job:
            return fit_once(self._config, self.parts, self.folder.path / FITS)
        return fitting.fit(self._config, self.parts)

    def _was_finished(self) -> bool:
        """Whether the run has ended before, and has no steps left."""
        summary = self.folder.read_json(SUMMARY)
        left = self.total_steps is None or int(summary.get("step", 0)) < self.total_steps
        if summary.get("early_stopped"):
            left = may_continue(self._before, self._config)
        self.is_finished = summary.get("status") == FINISHED and not left
        return self.is_finished

    def _build(self, model: torch.nn.Module | None) -> None:
        """Create the model and the optimizers, from the seed."""
        train = self._config.train
        steps = self.total_steps
        if steps is None and train.lr_schedule != "constant":
            text = "needs the number of steps, which is not known for a data set that is passed to fit"
            raise ConfigError(f"train.lr_schedule: {train.lr_schedule} {text}", hint="set train.lr_schedule: constant")
        self.model = models.build(self._config) if model is None else model
        self._device = get_local_rank() if int(os.environ.get("GPU_NUM") or 0) else None
        if self._device is not None:
            self.model.cuda(self._device)
        check_divides(self._config, self.model)
        self._rows_optimizer = optimizers.of_rows(train, steps or 1)
        self._optimizer = optimizers.of_model(train, self.model)
        self._schedule = optimizers.of_torch(optimizers.schedule(train, steps or 1), self._optimizer)
        self._state = TrainerState(self.transform.digest)
        self._interval = Interval(self._config.price, self._config.checkpoint.every)

    def _begin(self, *, given: bool) -> None:
        """On rank 0, create the folder of a new run."""
        if not self._writes:
            return
        facts = facts_of(self._config, self.parts.train.files, self.transform, self._fitted.rows, given=given)
        self.folder.make(self._config, {fitting.FILE: self.transform.to_json(), FACTS: json_text(facts)})

    def _open(self, resumes: bool) -> None:
        """Open the training context, which loads the newest checkpoint."""
        self._is_named, self._last_step = False, 0
        self._log = contextlib.ExitStack()
        if not self._in_job:  # in a job, the launcher or the Docker engine keeps the output of each process
            self._log.enter_context(log_files.kept(self.folder.path))
        self._record = None
        try:
            if self._writes and not resumes:
                self._record = self._new_record(None)
            self._enter(resumes)
        except BaseException as error:
            if self._record is not None and not self.is_open:
                self._end_record(self._record, error, {})
            self.close(error)
            self._end_log(error)
            raise

    def _enter(self, resumes: bool) -> None:
        config, block = self._config, self._config.checkpoint
        # In a job, Checkpoints chooses the folders.
        saves, upload_to = None, None if config.data.synthetic else block.upload_to
        if not self._in_job:
            saves = self.folder.saves(config)
            upload_to = None if upload_to is None else f"{upload_to.rstrip('/')}/{self.folder.path.name}"
        self._checkpoints = Checkpoints(
            saves,
            every=block.every,
            keep_last=block.keep,
            keep_days=block.keep_days,
            verify=block.verify,
            upload_to=upload_to,
            allow_previous=block.allow_previous,
            state={"trainer": self._state, "schedule": self._schedule},
        )
        self._ctx = TrainCtx(
            self._rows_optimizer,
            self._optimizer,
            FP16_GROWTH,
            distributed_option=option_of(config),
            precision=config.precision,
            nonfinite=config.train.nonfinite,
            clip_norm=config.train.clip_norm,
            model=self.model,
            embedding_config=optimizers.NEW_ROWS,
            device_id=self._device,
            checkpoints=self._checkpoints,
            configuration=models.slots_of(config),
            hooks=[
                *([] if config.budget is None else [self._budget]),
                *([] if config.price is None else [self._interval.of(self._checkpoints)]),
            ],
        )
        self._validation = Validation(config, self._state, self.folder, self._ctx, self._checkpoints)
        self._ctx.__enter__()
        self.is_open, self._last_step = True, self._ctx.step
        load_start_rows(self._ctx, config, in_job=self._in_job)
        if isinstance(self.folder, JobFolder) and self._writes:
            self.folder.note_checkpoints()
        if resumes and self._writes:
            self._budget.spent_before = max(
                self._state.cost_usd, float(self.folder.read_json(SUMMARY).get("cost_usd") or 0.0)
            )
            self._validation.resume(self._before)
            self.folder.write(CONFIG, resolved(config))
            self._record = self._new_record(self._ctx.step)
        self._validation.prune()

    def _name_latest(self) -> None:
        """On rank 0, point ``LATEST`` to the run as soon as it has a checkpoint."""
        if self._is_named or not self._writes or not (self._checkpoints.written or self._state.best):
            return
        self._is_named = True
        try:
            self.folder.name_latest()
        except StorageError as error:
            _logger.error("cannot point LATEST to this run; the run is not affected: %s%s", error, next_step(error))

    def _new_record(self, resumed_step: int | None) -> Record:
        record = Record(self.folder, tensorboard=self._config.run.tensorboard, resumed_step=resumed_step)
        record.summary["rows"]["train"] = self._fitted.rows
        record.write({"total_steps": self.total_steps})
        return record

    @property
    def step(self) -> int:
        """The last trained step."""
        return self._ctx.step

    @property
    def engine(self) -> Engine:
        """The engine of the training context."""
        return self._ctx.engine

    @property
    def wrapped_model(self) -> torch.nn.Module | None:
        """The model in the wrapper that averages its gradients over the ranks."""
        return self._ctx.model

    def _results(self) -> dict[str, Any]:
        """Return the part of the summary that changes while training."""
        return {
            "step": self._last_step,
            "skipped_steps": self._ctx.skipped_steps,
            **self._state.results(),
            **({} if self._config.budget is None else {"cost_usd": round(self._budget.spent, 4)}),
            # In a job, data-compose counts and logs unusual values.
            **({"unusual": None} if self._in_job else {}),
        }

    def close(self, error: BaseException | None) -> None:
        """End the context, and record in the summary how the run ended."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            if self._record is not None:
                self._end_record(self._record, error, self._results())
        finally:
            kind = None if error is None else type(error)
            try:
                self._ctx.__exit__(kind, error, None if error is None else error.__traceback__)
            finally:
                self._name_latest()
                self._end_log(error)

    @staticmethod
    def _end_record(record: Record, error: BaseException | None, results: dict[str, Any]) -> None:
        """Record how the run ended. A failure is only logged, because it must not hide the error of the run."""
        try:
            record.end(error, results)
        except PersiaError as failure:
            _logger.error("cannot record in the summary how the run ended: %s%s", failure, next_step(failure))

    def _end_log(self, error: BaseException | None) -> None:
        """Close the log file of the run. Its last line is the error, if any."""
        trace = None if error is None else error.__traceback__
        self._log.__exit__(None if error is None else type(error), error, trace)
