"""A training run, step by step. Read :meth:`Training.run` first."""

import contextlib
import shlex
from collections.abc import Iterator
from typing import Any

from persia import distributed
from persia.ctx import eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.distributed.run import identity
from persia.monitor import memory
from persia.runtime.errors import ConfigError, StorageError
from persia.runtime.logging import REPORTS, get_logger
from persia.runtime.places import Place, place
from persia.runtime.settings import get_rank, get_world_size, settings
from persia.trainer import budget, optimizers, pages
from persia.trainer.batches import PREFETCH_IN_JOB, TrainingBatches, read_rows
from persia.trainer.evaluation import evaluate
from persia.trainer.limits import Limits, MeanLoss
from persia.trainer.opening import OpenRun
from persia.trainer.operations import memory_watch_of
from persia.trainer.parts import Part, group_of, to_have_valid
from persia.trainer.profiling import profiler_of
from persia.trainer.record import FINISHED, STOPPED
from persia.trainer.reports import EvaluationReport, StepReport
from persia.trainer.step import Steps
from persia.trainer.synthetic import SyntheticBatches

_logger = get_logger("trainer")
_reports = get_logger(REPORTS)

EVALUATIONS = 10
"""The default number of evaluations of a run."""
EVALUATE_EVERY = 1000
"""The number of steps between evaluations if the length of the run is unknown."""


class Training(OpenRun):
    """A run, from its configuration to its summary. Its steps are in the order of :meth:`run`."""

    def run(self) -> Iterator[StepReport | EvaluationReport]:
        """Train, and yield reports; at the end of the run, the last is that of the test set, if there is one."""
        if self.is_finished:
            if not (self.folder.path / pages.PAGE).exists():  # for example because the disk was full at the end
                pages.write(self.folder, self._before, status=FINISHED)
            return
        self._report_no_valid()
        yield from self._make_up()
        if not self._state.stopped:
            memory = memory_watch_of(self._config, self.folder.path, self._ctx)
            prices = (self._interval.polled() if self._writes else None) or contextlib.nullcontext()
            with profiler_of(self._config, self.folder, self._ctx), memory, prices:
                yield from self._train()
            if self._is_cut_short:
                self._stop(budget.REASON)
                return
            yield from self._evaluate_end()
        self.save()
        self._name_latest()
        yield from self._finish()

    @property
    def _is_cut_short(self) -> bool:
        """Whether the budget ends the run before its last step; equal on all ranks."""
        return self._budget.is_spent and self._ctx.step != self.total_steps

    def _stop(self, reason: str) -> None:
        """Save the run and end it early. The run can be resumed."""
        self.save()
        self._name_latest()
        distributed.stop(reason)
        if self._record is not None:
            of_job = identity() if self._in_job else {}  # data-compose looks for the summary of its job
            self._record.write({**self._results(), **of_job, "status": STOPPED, "reason": reason})
            pages.write(self.folder, self._config, status=STOPPED)

    def _report_no_valid(self) -> None:
        """On rank 0, log that training is not evaluated, if there is no validation set."""
        if self.parts.valid is not None or not self._writes:
            return
        every, step = self._config.train.evaluate_every, to_have_valid(self._config.data)
        if every is None:
            _logger.info("no evaluation during training, because there is no validation set; to evaluate: %s", step)
        else:
            line = "train.evaluate_every=%d has no effect, because there is no validation set; next: %s"
            _logger.warning(line, every, step)

    def _make_up(self) -> Iterator[EvaluationReport]:
        """Evaluate after a resume, if the run was interrupted after a step but before its evaluation.

        When this method is called, only rank 0 has loaded the checkpoint. All ranks get the next action from rank 0.
        """
        step = self._ctx.step
        evaluated = step in {each["step"] for each in self._state.evaluations}
        state = [step, self._state.stopped, evaluated, self._budget.spent_before]
        step, self._state.stopped, is_evaluated, spent = self._gather("start of training", state)
        self._budget.check_left(spent)
        self._evaluated = step if is_evaluated else 0
        valid = self.parts.valid
        if valid is not None and step and self._is_due(step) and not is_evaluated and not self._state.stopped:
            yield from self._validate(valid)
            self._evaluated = step

    def _gather(self, what: str, mine: Any) -> Any:
        """Return the value of rank 0. Collective: every rank must call it."""
        backend = self._ctx.common_context
        return mine if backend is None else backend.all_gather(what, mine)[0]

    def _evaluate_end(self) -> Iterator[EvaluationReport]:
        """Evaluate after the last step, unless this step was already evaluated."""
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
        is_first = True
        for batch in loader:
            if is_first:
                self._check_rows(batch.batch_size)
                is_first = False
            loss = steps(batch)
            self._learning_rate = float(self._schedule.get_last_lr()[0])
            optimizers.advance(self._schedule, skipped=self._ctx.skipped_steps)
            step = self._last_step = self._ctx.step
            if isinstance(dataset, TrainingBatches):
                dataset.trained(self._state.unusual)
            self._name_latest()
            self._state.cost_usd = self._budget.spent
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
            if self._budget.is_spent:
                return

    def _check_rows(self, mine: int) -> None:
        """Check that the ranks together have at most the rows of a step. All ranks call this before their first step.

        Raises:
            ConfigError: The ranks have more rows, because the sender of the batches has another configuration.
        """
        if self._own is not None:
            return
        backend = self._ctx.common_context
        given = [mine] if backend is None else backend.all_gather("rows of a step", mine)
        if sum(given) > self._config.step_rows:
            raise ConfigError(
                f"a step has {sum(given):,} rows ({', '.join(f'{each:,}' for each in given)} by rank), but "
                f"data.batch_size and train.accumulate allow {self._config.step_rows:,}",
                hint="give data-compose and the trainers the same persia.yml",
            )

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
            memory.used(self._device),
        )
        _reports.info("step", extra={"step": step, "loss": report.as_dict()["loss"], "rank": get_rank()})
        if self._record is not None:
            self._record.add(report)
        return report

    def _dataset(self) -> IterableDataset:
        if self._own is not None:
            return self._own
        data = self._config.data
        if self._in_job:
            return StreamingDataset(data.prefetch or PREFETCH_IN_JOB, self.transform)
        if data.synthetic:
            return SyntheticBatches(self.parts.train, self.transform, self._config, self.total_steps or 0)
        return TrainingBatches.of_config(self._config, self.parts.train, self.transform)

    @property
    def _evaluate_every(self) -> int:
        given = self._config.train.evaluate_every
        if given is not None:
            return given
        if self.total_steps is None:
            return EVALUATE_EVERY
        return max(1, min(-(-self.total_steps // EVALUATIONS), self._steps_per_epoch))

    def _validate(self, part: Part) -> Iterator[EvaluationReport]:
        """Evaluate and record the validation set on rank 0. Collective: every rank must call it after the same step."""
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

    def save(self) -> Place:
        """Save the run now, and return the checkpoint. Collective: every rank must call it after the same step."""
        self._ctx.save_run()
        mine = None
        if self._writes:  # only rank 0 knows the written checkpoint
            path = self.folder.saves(self._config) / f"step-{self._ctx.step}"
            mine = [str(path), self._checkpoints.written == self._ctx.step, self._checkpoints.problem]
        saved, is_written, problem = self._gather("saved run", mine)
        if not is_written:
            folder = shlex.quote(str(place(saved).parent))
            raise StorageError(
                f"cannot write the checkpoint {saved}: {problem}",
                hint=f"the log has each attempt; to check the storage: persia doctor --only disk --dir {folder}",
            )
        return place(saved)

    def _finish(self) -> Iterator[StepReport | EvaluationReport]:
        """Score the test set with the best model, and write the summary and the pages."""
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
