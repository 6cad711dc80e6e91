"""Uses the evaluations of the validation set for the best checkpoint and for early stopping."""

import dataclasses
import os
import shlex
import shutil
from pathlib import Path

from persia.checkpoint import retention
from persia.checkpoint.object_store import ObjectStore
from persia.config import Config
from persia.ctx import Checkpoints, TrainCtx
from persia.runtime.errors import PersiaError, StorageError
from persia.runtime.job import MANIFEST
from persia.runtime.logging import get_logger, next_step
from persia.runtime.places import Place, Url
from persia.runtime.settings import get_rank
from persia.trainer.reports import EvaluationReport
from persia.trainer.run_folder import BEST, RunFolder
from persia.trainer.state import TrainerState
from persia_core import checkpoint as _core

_logger = get_logger("trainer")


class Validation:
    """Compares evaluations of the validation set and keeps the best checkpoint, on rank 0.

    Args:
        config: The configuration.
        state: The state of the trainer.
        folder: The run's folder.
        ctx: The training context.
        checkpoints: The checkpoints of the run.
    """

    def __init__(
        self, config: Config, state: TrainerState, folder: RunFolder, ctx: TrainCtx, checkpoints: Checkpoints
    ) -> None:
        self._config = config
        self._stop = config.train.early_stop
        self._state = state
        self._folder = folder
        self._ctx = ctx
        self._checkpoints = checkpoints

    def resume(self, before: Config) -> None:
        """On rank 0, continue with the earlier evaluations in the newest checkpoint, as far as they are still valid.

        Args:
            before: The configuration with which the run was trained so far.
        """
        stop, state, best = self._stop, self._state, self._state.best
        if stop is None:
            if best is not None:
                _logger.warning(
                    "train.early_stop is no longer set: the run uses its last model, and deletes the best checkpoint, "
                    "%s, when it ends; to keep this checkpoint: set train.early_stop",
                    self.checkpoint(best.step),
                )
            self._forget()
        elif best is not None and best.metric != stop.metric:
            _logger.warning(
                "train.early_stop.metric has changed from %s to %s: choosing a new best checkpoint",
                best.metric,
                stop.metric,
            )
            self._forget()
        elif best is not None and not _exists(self.checkpoint(best.step)):
            _logger.warning(
                "the best checkpoint, %s, is missing; a new one is chosen from the evaluations that follow",
                self.checkpoint(best.step),
            )
            self._forget()
        elif state.without_improvement < stop.patience:
            state.stopped = False
        elif state.stopped and may_continue(before, self._config):
            state.stopped, state.without_improvement = False, 0

    def _forget(self) -> None:
        self._state.best, self._state.without_improvement, self._state.stopped = None, 0, False

    def meet(self) -> None:
        """Wait until the pushes of all ranks are applied. Collective: every rank must call it before rank 0 evaluates.

        Ranks push together, so no rank pushes before rank 0 takes the next step. The evaluation and the best checkpoint
        therefore have the same state.
        """
        backend = self._ctx.common_context
        if backend is not None:
            backend.engine.drain()
            self._ctx.gather_model()
            backend.all_gather("evaluation", None)

    def judge(self, report: EvaluationReport) -> EvaluationReport:
        """Record an evaluation on rank 0, and keep the model if it is the best; return the report with ``is_best``."""
        best = self._state.best
        if self._stop is not None and self._state.judge(report, self._stop):
            if self._keep():
                report = dataclasses.replace(report, is_best=True)
            else:
                self._state.best = best
        self._state.evaluations.append(report.results())
        return report

    def agree_to_stop(self) -> None:
        """Record on every rank whether rank 0 stops training, after ``patience`` evaluations without improvement.

        Collective: every rank must call it after the same step.
        """
        backend = self._ctx.common_context
        if self._stop is None or backend is None:
            return
        self._state.stopped = bool(backend.all_gather("early stop", self._state.stopped)[0])
        if self._state.stopped and get_rank() == 0:
            _logger.info(
                "early stop: training ends after %d evaluations without improvement", self._state.without_improvement
            )

    def checkpoint(self, step: int) -> Place:
        """Return the place of the best checkpoint that is saved after ``step``."""
        return self._folder.best / f"step-{step}"

    def _keep(self) -> bool:
        """Save the model as the best one, and return whether this succeeded; otherwise the previous one is kept."""
        folder = self.checkpoint(self._ctx.step)
        try:
            self._ctx.dump_checkpoint(folder)
            _core.publish_latest(folder)
        except StorageError as error:
            _logger.error(
                "cannot save the new best model; the best checkpoint does not change, and training continues: %s%s",
                error,
                next_step(error),
            )
            return False
        self.prune()
        return True

    def end(self) -> None:
        """On rank 0, upload the best checkpoint to ``best`` below the URL of the replicas. A failure is logged.

        If the run ends without a best checkpoint, the best checkpoints of an earlier early stop are deleted.
        """
        best, store = self._state.best, self._checkpoints.store()
        if best is None:
            for path in self._kept().values():
                _delete(path)
        elif store is not None and isinstance(path := self.checkpoint(best.step), Path):
            try:
                ObjectStore(f"{store.url}/{BEST}").put(path, path.name)
            except PersiaError as error:
                _logger.error(
                    "the best checkpoint %s is written, but not uploaded: %s%s", path, error, next_step(error)
                )

    def prune(self) -> None:
        """Delete best checkpoints that no other checkpoint of the run needs.

        Each checkpoint names the best checkpoint at its step. A resumed run therefore needs the newest best checkpoint
        whose step is not after that of the newest checkpoint. The resumed run writes later best checkpoints again.
        """
        best = self._state.best
        if best is None or get_rank() != 0:
            return
        steps = self._kept()
        named = max((step for step in steps if step <= self._checkpoints.written), default=None)
        for step, path in steps.items():
            if step not in (best.step, named):
                _delete(path)
        if best.step in steps:
            _core.publish_latest(steps[best.step])

    def _kept(self) -> dict[int, Place]:
        """Return the existing best checkpoints, by step."""
        where = self._folder.best
        if isinstance(where, Url):
            return {each.step: each.path for each in retention.checkpoints_in(where)}
        return {int(each.name[5:]): each for each in where.glob("step-*") if each.name[5:].isdigit()}


def _exists(path: Place) -> bool:
    if isinstance(path, Path):
        return (path / MANIFEST).exists()
    return bool(_core.listing(path, verify=False))


def _delete(path: Place) -> None:
    """Delete a best checkpoint. If this fails, a warning is logged, and files of the checkpoint remain."""
    try:
        if isinstance(path, Path):
            shutil.rmtree(path)
        else:
            retention.remove(path)
    except PersiaError as error:
        line = "cannot delete the checkpoint %s, which is no longer needed: %s%s"
        _logger.warning(line, path, error, next_step(error))
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # delete as much as possible
        if os.path.lexists(path):
            line = "cannot delete the checkpoint %s, which is no longer needed: %s; next: rm -r %s"
            _logger.warning(line, path, error.strerror or error, shlex.quote(str(path)))


def may_continue(before: Config, now: Config) -> bool:
    """Whether a run that stopped early may continue, because its early stopping has changed, or it has more epochs."""
    return before.train.early_stop != now.train.early_stop or now.data.epochs > before.data.epochs
