"""One training run: its parts are built, and it is trained step by step. Read :meth:`Training.run`."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from persia import distributed
from persia.config import Config
from persia.config.blocks import Paths
from persia.ctx import Checkpoints, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.features import Transform
from persia.runtime.errors import ConfigError, PersiaError, StorageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import get_local_rank, get_rank, get_world_size, settings
from persia.trainer import fitting, models, optimizers, pages
from persia.trainer.batches import TrainingBatches, read_rows
from persia.trainer.evaluation import evaluate
from persia.trainer.facts import facts_of
from persia.trainer.fit_once import fit_once
from persia.trainer.job_folder import FITS, JobFolder
from persia.trainer.limits import Limits, MeanLoss
from persia.trainer.objective import Objective
from persia.trainer.parallel import option_of
from persia.trainer.parts import Part, Parts, group_of, with_train
from persia.trainer.profiling import profiler_of
from persia.trainer.record import FINISHED, Record, check_tensorboard
from persia.trainer.reports import EvaluationReport, StepReport
from persia.trainer.run_folder import CONFIG, FACTS, SUMMARY, RunFolder, check_same, json_text, resolved
from persia.trainer.start_rows import load_start_rows, start_folder
from persia.trainer.state import TrainerState
from persia.trainer.step import Steps, check_divides
from persia.trainer.synthetic import SyntheticBatches
from persia.trainer.validation import Validation, may_continue
from persia_core.engine import Engine

_logger = get_logger("trainer")

EVALUATIONS = 10
"""The default number of evaluations of a run."""
EVALUATE_EVERY = 1000
"""Steps between evaluations if the number of steps is not known."""
FP16_GROWTH = 2000
"""Steps without an overflow after which the scale of the loss is doubled: the default of torch's GradScaler."""


class Training:
    """A run, from its configuration to its summary. A run that resumes loads its transform, and never fits again.

    Args:
        config: The configuration.
        model: A model in place of that of the configuration.
        source: Files in place of ``data.train``, or a data set; None is ``data.train``, or the stream of a job.
        resumed: The folder of the run to resume; None begins a new one. A job resumes by itself.

    Attributes:
        parts: The rows of train, valid and test.
        folder: The run's folder.
        transform: The transform.
        model: The model.
        objective: The loss.
        is_open: Whether it can train.
        is_finished: Whether it is a resumed run that has no step left.
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
            check_same(self._before, config)
            self._fitted = fitting.fitted_before(config, self.folder, self.parts)
        self.transform: Transform = self._fitted.transform
        self.objective = Objective(config.compiled.labels)
        self._own = source if isinstance(source, IterableDataset) else None
        self._steps_per_epoch = -(-self._fitted.rows // config.step_rows)
        self.total_steps = None if self._own is not None else self._steps_per_epoch * config.data.epochs
        self._build(model)
        if resumed is None:
            start_folder(config, in_job=self._in_job)  # a mistake is found before the folder is created
            self._begin(given=model is not None)
        elif not self._in_job and self._was_finished():
            return
        self._open(resumed is not None)

    def _fit(self) -> fitting.Fitted:
        """Fit the features: in a job one process for all that share its folder."""
        if self._in_job:
            return fit_once(self._config, self.parts, self.folder.path / FITS)
        return fitting.fit(self._config, self.parts)

    def _was_finished(self) -> bool:
        """Whether the run has ended before, and has no step left."""
        summary = self.folder.read_json(SUMMARY)
        left = self.total_steps is None or int(summary.get("step", 0)) < self.total_steps
        if summary.get("early_stopped"):
            left = may_continue(self._before, self._config)
        self.is_finished = summary.get("status") == FINISHED and not left
        return self.is_finished

    def _build(self, model: torch.nn.Module | None) -> None:
        """Make the model and the optimizers, from the seed."""
        train = self._config.train
        steps = self.total_steps
        if steps is None and train.lr_schedule != "constant":
            raise ConfigError(f"train.lr_schedule: {train.lr_schedule} needs a number of steps; a data set has none")
        self.model = models.build(self._config) if model is None else model
        self._device = get_local_rank() if int(os.environ.get("GPU_NUM") or 0) else None
        if self._device is not None:
            self.model.cuda(self._device)
        check_divides(self._config, self.model)
        self._rows_optimizer = optimizers.of_rows(train, steps or 1)
        self._optimizer = optimizers.of_model(train, self.model)
        self._schedule = optimizers.of_torch(optimizers.schedule(train, steps or 1), self._optimizer)
        self._state = TrainerState(self.transform.digest)

    def _begin(self, *, given: bool) -> None:
        """Make the run's folder."""
        if not self._writes:
            return
        facts = facts_of(self._config, self.parts.train.files, self.transform, self._fitted.rows, given=given)
        self.folder.make(self._config, {fitting.FILE: self.transform.to_json(), FACTS: json_text(facts)})

    def _open(self, resumes: bool) -> None:
        """Open the training context, which loads the newest checkpoint."""
        self._is_named, self._last_step = False, 0
        self._record = None if resumes or not self._writes else self._new_record(None)
        try:
            self._enter(resumes)
        except BaseException as error:
            if self._record is not None and not self.is_open:
                self._record.end(error, {})
            self.close(error)
            raise

    def _enter(self, resumes: bool) -> None:
        config, block = self._config, self._config.checkpoint
        saves, upload_to = None, None if config.data.synthetic else block.upload_to  # a job has both
        if not self._in_job:
            saves = self.folder.saves(config)
            upload_to = None if upload_to is None else f"{upload_to.rstrip('/')}/{self.folder.path.name}"
        self._checkpoints = Checkpoints(
            saves,
            every=block.every,
            keep_last=block.keep,
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
        )
        self._validation = Validation(config, self._state, self.folder, self._ctx, self._checkpoints)
        self._ctx.__enter__()
        self.is_open, self._last_step = True, self._ctx.step
        load_start_rows(self._ctx, config, in_job=self._in_job)
        if isinstance(self.folder, JobFolder) and self._writes:
            self.folder.note_checkpoints()
        if resumes and self._writes:
            self._validation.resume(self._before)
            self.folder.write(CONFIG, resolved(config))
            self._record = self._new_record(self._ctx.step)
        self._validation.prune()

    def _name_latest(self) -> None:
        """Name the run in ``LATEST`` as soon as it has a checkpoint."""
        if self._is_named or not self._writes or not (self._checkpoints.written or self._state.best):
            return
        self._is_named = True
        try:
            self.folder.name_latest()
        except StorageError as error:
            _logger.error("LATEST does not name this run, training continues: %s", error)

    def _new_record(self, resumed_step: int | None) -> Record:
        record = Record(self.folder, tensorboard=self._config.run.tensorboard, resumed_step=resumed_step)
        record.summary["rows"]["train"] = self._fitted.rows
        record.write({"total_steps": self.total_steps})
        return record

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return self._ctx.step

    @property
    def engine(self) -> Engine:
        """The engine of the training context."""
        return self._ctx.engine

    def run(self) -> Iterator[StepReport | EvaluationReport]:
        """Train, and yield reports; the last is that of the test part."""
        if self.is_finished:
            return
        yield from self._make_up()
        if not self._state.stopped:
            with profiler_of(self._config, self.folder, self._ctx):
                yield from self._train()
            yield from self._evaluate_end()
        self.save()
        self._name_latest()
        yield from self._finish()

    def _make_up(self) -> Iterator[EvaluationReport]:
        """Evaluate after a resume, if the run was interrupted after a step but before its evaluation.

        Only rank 0 has loaded the checkpoint by now. All ranks get the next action from it.
        """
        step = self._ctx.step
        state = [step, self._state.stopped, step in {each["step"] for each in self._state.evaluations}]
        step, self._state.stopped, is_evaluated = self._gather("start of training", state)
        self._evaluated = step if is_evaluated else 0
        valid = self.parts.valid
        if valid is not None and step and self._is_due(step) and not is_evaluated and not self._state.stopped:
            yield from self._validate(valid)
            self._evaluated = step

    def _gather(self, what: str, mine: Any) -> Any:
        """Return the value of rank 0; every rank calls this."""
        backend = self._ctx.common_context
        return mine if backend is None else backend.all_gather(what, mine)[0]

    def _evaluate_end(self) -> Iterator[EvaluationReport]:
        """Evaluate after the last step, if the data has ended at another step than expected."""
        step, valid = self._ctx.step, self.parts.valid
        if valid is None or not step or step == self._evaluated:
            return
        yield from self._validate(valid)

    def _is_due(self, step: int) -> bool:
        return step % self._evaluate_every == 0 or step == self.total_steps

    def _train(self) -> Iterator[StepReport | EvaluationReport]:
        train, log_every = self._config.train, self._config.run.log_every
        dataset = self._dataset()
        staleness = None if train.reproducible or settings.reproducible else train.staleness
        loader = DataLoader(dataset, reproducible=train.reproducible, embedding_staleness=staleness)
        limits, losses, samples = Limits(loader.staleness), MeanLoss(), 0
        steps = Steps(self._config, self._ctx, self.objective, self._state)
        for batch in loader:
            loss = steps(batch)
            self._learning_rate = float(self._schedule.get_last_lr()[0])
            optimizers.advance(self._schedule, skipped=self._ctx.skipped_steps)
            step = self._last_step = self._ctx.step
            if isinstance(dataset, TrainingBatches):
                dataset.trained(self._state.unusual)
            self._name_latest()
            losses.add(loss)
            samples += batch.batch_size * get_world_size()
            limits.stepped()
            if step % log_every == 0 or step == self.total_steps:
                yield self._report_steps(limits, losses.take(), samples)
                samples = 0
                limits.apart()
            if self.parts.valid is not None and self._is_due(step):
                yield from self._validate(self.parts.valid)
                if self._state.stopped:
                    return
                limits.apart()

    def _report_steps(self, limits: Limits, loss: float, samples: int) -> StepReport:
        stats = self._ctx.engine.stats()
        seconds, shares = limits.take(stats["seconds"])
        self._state.seconds += seconds
        self._state.samples += samples
        step = self._ctx.step
        report = StepReport(
            step,
            self.total_steps,
            (step - 1) // self._steps_per_epoch + 1 if self._own is None else 1,
            loss,
            samples / seconds if seconds else 0.0,
            self._learning_rate,
            int(stats["staleness"]),
            shares,
            self._ctx.grad_norm,
        )
        if self._record is not None:
            self._record.add(report)
        return report

    def _dataset(self) -> IterableDataset:
        if self._own is not None:
            return self._own
        if self._in_job:
            return StreamingDataset(transform=self.transform)
        data, train = self._config.data, self._config.train
        if data.synthetic:
            return SyntheticBatches(self.parts.train, self.transform, self._config, self.total_steps or 0)
        reader = self.parts.train.reader(
            self._config.step_rows,
            shuffle=data.shuffle,
            epochs=data.epochs,
            seed=train.seed,
            window_rows=data.window_rows,
        )
        return TrainingBatches(self.parts.train, reader, self.transform, train.weight)

    @property
    def _evaluate_every(self) -> int:
        given = self._config.train.evaluate_every
        if given is not None:
            return given
        if self.total_steps is None:
            return EVALUATE_EVERY
        return max(1, min(-(-self.total_steps // EVALUATIONS), self._steps_per_epoch))

    def _validate(self, part: Part) -> Iterator[EvaluationReport]:
        """Evaluate the valid part on rank 0, and record the result; every rank calls this after the same step."""
        self._validation.meet()
        self._evaluated = self._ctx.step
        if (record := self._record) is not None:
            report = self._validation.judge(self._evaluate(part, "valid"))
            record.add(report)
            record.write(self._results())
            yield report
        self._validation.agree_to_stop()

    def _evaluate(self, part: Part, name: str) -> EvaluationReport:
        config = self._config
        weight, group = config.train.weight, group_of(config)
        rows = read_rows(part, self.transform, config.data.batch_size, weight=weight, group=group)
        with eval_ctx(model=self.model) as ctx:
            return evaluate(ctx, self.objective, rows, config, name, self._ctx.step)

    def save(self) -> Path:
        """Save the run now, and return the checkpoint; every rank calls this after the same step."""
        self._ctx.save_run()
        mine = None
        if self._writes:  # only rank 0 knows what is written, and where
            path = self.folder.saves(self._config) / f"step-{self._ctx.step}"
            mine = [str(path), self._checkpoints.written == self._ctx.step, self._checkpoints.problem]
        saved, is_written, problem = self._gather("saved run", mine)
        if not is_written:
            raise StorageError(f"{saved}: the checkpoint could not be written: {problem}")
        return Path(saved)

    def _finish(self) -> Iterator[StepReport | EvaluationReport]:
        """Score the test part with the best model, and write the summary and the pages."""
        record, best = self._record, self._state.best
        if record is None:
            return
        self._state.warn_of_empty_features(dict(self._config.compiled.types))
        if best is not None and best.step != self._ctx.step:
            self._ctx.load_checkpoint(self._validation.checkpoint(best.step))
        self._validation.end()
        tested: dict[str, Any] = {}
        if self.parts.test is not None:
            report = self._evaluate(self.parts.test, "test")
            record.add(report)
            tested = {"test": report.results()}
            record.write(tested)
            yield report
        embedding_rows = sum(self._ctx.get_embedding_size())
        record.write({**self._results(), **tested, "embedding_rows": embedding_rows})
        if self._in_job:
            distributed.report({name: value for name, value in record.summary.items() if name != "status"})
        else:
            record.write({"status": FINISHED})
        pages.write(self.folder, self._config, status=FINISHED)

    def _results(self) -> dict[str, Any]:
        """Return the part of the summary that changes while training."""
        return {
            "step": self._last_step,
            "skipped_steps": self._ctx.skipped_steps,
            **self._state.results(),
            # In a job data-compose counts them, and logs them.
            **({"unusual": None} if self._in_job else {}),
        }

    def close(self, error: BaseException | None) -> None:
        """End the context; the summary says how the run ended."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            if self._record is not None:
                with contextlib.suppress(PersiaError):
                    self._record.end(error, self._results())
        finally:
            kind = None if error is None else type(error)
            try:
                self._ctx.__exit__(kind, error, None if error is None else error.__traceback__)
            finally:
                self._name_latest()
