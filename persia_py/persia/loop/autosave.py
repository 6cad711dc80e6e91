"""Saves checkpoints of a run during training, on all ranks after the same step."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from persia.backend.base import Backend
from persia.checkpoint import retention, rng_state, snapshot
from persia.checkpoint.policy import STATE, Checkpoints
from persia.checkpoint.run_state import RunState
from persia.loop.hooks import Loop
from persia.runtime import flight, preemption
from persia.runtime.contexts import ends_well
from persia.runtime.errors import CheckpointError, PersiaError, StorageError, UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.logging import get_logger, next_step
from persia.runtime.places import Place, Url
from persia_core import checkpoint as _core

_logger = get_logger("checkpoint")

RETRY_S = (1.0, 2.0, 4.0)
"""Seconds after which a failed save is retried."""

MEET_S = 20.0
"""Seconds that ranks wait for each other to save the run before they leave; a launcher gives them 45 s in total."""


class Autosave:
    """A hook of the training loop that saves a run every ``every`` steps, and at the end of each loop.

    A save that fails is retried after 1, 2 and 4 s, at the next step boundary. After the last retry it is abandoned,
    and training continues. All ranks make the cut together, and rank 0 writes the files while training continues. The
    ranks are notified that a checkpoint is written when they make the next checkpoint. They then run ``after_commit``.

    Args:
        checkpoints: The options that the script has set, and the counters that it reads.
        state: The state of the run to save.
    """

    def __init__(self, checkpoints: Checkpoints, state: RunState) -> None:
        self._checkpoints = checkpoints
        self._state = state
        self._backend: Backend = state.backend
        self._loop: Loop | None = None
        self._tries = 0
        self._retry_at: float | None = None  # the time of the next retry after a failed save; on rank 0
        self._folder: Place = Path()  # the folder of the checkpoints, known from the first checkpoint on
        self._is_last = False  # whether no step follows the save

    @property
    def identity(self) -> str:
        """The settings that must be equal on all ranks."""
        return f"Checkpoints(every={self._checkpoints.every})"

    def on_start(self, loop: Loop) -> None:
        """Record the loop."""
        self._loop = loop

    def before_step(self) -> None:
        """Make a checkpoint if a multiple of ``every`` was passed since the last checkpoint."""
        step, every = self._backend.trained_step, self._checkpoints.every
        if step // every != self._checkpoints.saved // every:
            self.save(step)

    def vote(self, fed_batch: object) -> bool:
        """Whether the last save has failed and must be retried; known only on rank 0."""
        del fed_batch
        return self._retry_at is not None and time.monotonic() >= self._retry_at

    def decide(self, step: int, votes: list[bool]) -> bool:
        """Save the run after the last step if a retry is due. This never skips a step."""
        del step
        if any(votes):
            self.save(self._backend.trained_step)
        return False

    def on_end(self, complete: bool) -> None:
        """Save the run at the end of a loop that all ranks have completed."""
        if complete:
            self.save_last()

    def save_last(self) -> None:
        """Save the run if steps were trained since the last save. Return when the save is written or abandoned.

        Raises:
            PersiaError: A push of a rank is not applied, or a rank is lost.
        """
        step = self._backend.trained_step
        self._is_last = True
        try:
            if step != self._checkpoints.saved:
                self.save(step)
            while True:
                mine = [self._settled(), self._checkpoints.written]
                settled, written = self._backend.all_gather("checkpoint written", mine)[0]
                self._committed(written)
                if settled is not False:
                    return
                self.save(step)
        finally:
            self._is_last = False

    def save(self, step: int) -> None:
        """Save the run after ``step``. Every rank calls this, and continues as soon as the cut is made.

        Raises:
            PersiaError: A push of a rank is not applied, or a rank is lost.
        """
        self._checkpoints.saved = step
        backend = self._backend
        with flight.Call(flight.CHECKPOINT, step), backend.quiesce(), self._state.at_end_of_pass():
            failed, written = backend.all_gather("checkpoint", [self._checkpoints.failed, self._checkpoints.written])[0]
            if not backend.is_rank_0:
                self._checkpoints.failed = failed
            self._state.gather_model()
            ranks = backend.gather(self._state.rank_state())
            if ranks is not None:
                self._cut(step, ranks)
            backend.all_gather("checkpoint cut", None)
        self._committed(written)

    def _committed(self, step: int) -> None:
        if self._loop is not None:
            self._loop.committed(step)

    def _cut(self, step: int, ranks: list[dict[str, Any]]) -> None:
        """On rank 0: wait for the previous save, then start one that is written in the background."""
        started = time.monotonic()
        self._backend.join_checkpoint_thread()
        if (waited := time.monotonic() - started) > 1.0:
            line = "training waited %.1f s at step %d until the previous checkpoint was complete"
            _logger.warning(line, waited, step)
        self._retry_at = None
        states = {rng_state.rank_state(rank): each for rank, each in enumerate(ranks) if rank > 0}
        if self._checkpoints.state:
            states[STATE] = self._checkpoints.state_dict()
        cut_at = time.monotonic()
        try:
            self._folder = self._checkpoints.folder(self._backend)
            path = self._folder / f"step-{step}"
            save = self._state.begin_save(path, states)
        except PersiaError as error:  # if training cannot continue, training itself raises the error
            self._retry(step, error)
            return
        paused = time.monotonic() - cut_at
        self._backend.checkpoint_thread = snapshot.Writing(save, lambda: self._write(save, path, step, paused))

    def _write(self, save: snapshot.Save, path: Place, step: int, paused: float) -> None:
        """Write the save, in a separate thread."""
        started = time.monotonic()
        try:
            save.write()
            if self._checkpoints.verify:
                _verify(path)
        except PersiaError as error:  # a middleware may have ended during the save
            self._retry(step, error)
            return
        attempt = self._tries + 1
        self._tries, self._checkpoints.problem = 0, ""
        self._checkpoints.written = step
        _logger.info(
            "checkpoint %s written in %.1f s (attempt=%d), training paused for %.2f s, %d older checkpoints removed",
            path,
            time.monotonic() - started,
            attempt,
            paused,
            self._tidy(path),
        )
        self._upload(path)

    def _tidy(self, path: Place) -> int:
        """Point ``LATEST`` to the save, and delete older ones. If this fails, the save is still valid."""
        try:
            _core.publish_latest(path)
        except PersiaError as error:
            _logger.warning("checkpoint %s is written, but LATEST was not updated: %s%s", path, error, next_step(error))
        try:
            keep, days = self._checkpoints.keep_last, self._checkpoints.keep_days
            if days is None:
                return len(_core.prune(path.parent, keep))
            age = timedelta(days=days)
            return len(retention.prune(path.parent, lambda found: min(keep, retention.kept(found, age))))
        except PersiaError as error:
            line = "checkpoint %s is written, but older checkpoints were not removed: %s%s"
            _logger.warning(line, path, error, next_step(error))
            return 0

    def _upload(self, path: Place) -> None:
        """Upload a save to the object store, and delete older replicas. If this fails, the save is still valid."""
        store = self._checkpoints.store()
        if store is None or isinstance(path, Url):
            return
        started = time.monotonic()
        try:
            store.put(path, path.name)
        except PersiaError as error:
            self._checkpoints.not_uploaded += 1
            _logger.error("checkpoint %s is written, but not uploaded: %s%s", path, error, next_step(error))
            return
        deleted: list[str] = []
        try:
            deleted = store.prune(self._checkpoints.keep_last)
        except PersiaError as error:
            line = "checkpoint %s is uploaded, but older replicas were not deleted: %s%s"
            _logger.warning(line, path, error, next_step(error))
        took = time.monotonic() - started
        _logger.info(
            "checkpoint %s uploaded to %s in %.1f s, %d older replicas deleted", path, store.url, took, len(deleted)
        )

    def _retry(self, step: int, error: Exception) -> None:
        text, attempt = retention.with_space(error, self._folder), self._tries + 1
        hint = next_step(error) if text == str(error) else ""  # the text about a full disk includes the next step
        if self._tries == len(RETRY_S):
            self._tries = 0
            self._checkpoints.failed += 1
            self._checkpoints.problem = text
            what = "abandoned" if self._is_last else "abandoned, training continues"
            _logger.error("checkpoint of step %d %s: %s (attempt=%d)%s", step, what, text, attempt, hint)
            return
        wait = RETRY_S[self._tries]
        self._tries += 1
        line = "checkpoint of step %d failed, retrying in %g s: %s (attempt=%d)%s"
        _logger.warning(line, step, wait, text, attempt, hint)
        self._retry_at = time.monotonic() + wait

    def _settled(self) -> bool | None:
        """On rank 0: whether the last save is written or abandoned. If it must be retried, wait until this is due."""
        if not self._backend.is_rank_0:
            return None
        self._backend.join_checkpoint_thread()
        if self._retry_at is None:
            return True
        time.sleep(max(0.0, self._retry_at - time.monotonic()))
        return False

    def exit_if_requested(self, left_by: BaseException | None) -> None:
        """At the end of a context: save the run and exit, if this process was asked to stop.

        If the block ended normally, all ranks stop if one of them was asked to stop. If the last save was abandoned, it
        is retried, because a run without its last save is not finished.

        Args:
            left_by: The exception that leaves the context, if any.

        Raises:
            SystemExit: The context has reached its end, and this process was asked to stop.
            StorageError: The last save cannot be written.
        """
        ended = left_by is None or (isinstance(left_by, SystemExit) and ends_well(left_by))
        asked, missing = preemption.stop_asked(), False
        if ended:
            try:
                given = self._backend.all_gather("end of training", [asked, self._last_is_missing()])
                asked, missing = (any(votes) for votes in zip(*given, strict=True))
            except SystemExit:
                asked = True
        if asked and (ended or (isinstance(left_by, SystemExit) and left_by.code in _LEAVES)):
            with preemption.leaving():
                self._save_to_leave()
            if ended:
                raise SystemExit(preemption.exit_code())
        elif missing:
            self._save_again()

    def _last_is_missing(self) -> bool:
        """On rank 0: whether the last save was abandoned, or must be retried."""
        if not self._backend.is_rank_0:
            return False
        self._backend.join_checkpoint_thread()
        return self._checkpoints.saved != self._checkpoints.written

    def _save_again(self) -> None:
        """Save the run whose last save is missing. Collective: every rank must call it.

        Raises:
            StorageError: The checkpoint cannot be written in this attempt either.
        """
        step = self._backend.trained_step
        self._tries = 0
        self.save(step)
        self.save_last()
        missing = self._last_is_missing()
        mine = (
            [self._checkpoints.written, self._checkpoints.problem, str(self._checkpoints.name())] if missing else None
        )
        problem = self._backend.all_gather("last checkpoint", mine)[0]
        if problem is not None:
            written, why, folder = problem
            newest = f"the newest in {folder} is of step {written}"
            if not written:
                newest = f"since its last start, the run has written no checkpoint to {folder}"
            raise StorageError(
                f"the run is not finished: its last checkpoint, of step {step}, cannot be written: {why}; {newest}",
                hint="remove the cause (on a full disk, free space), then restart the run, which resumes after its "
                "newest checkpoint",
            )

    def _save_to_leave(self) -> None:
        """Save the run if anything was trained, and if all ranks call this method after the same step."""
        step, why = self._backend.trained_step, preemption.reason()
        try:
            if preemption.has_trained():
                steps = self._backend.all_gather_at_exit(step, MEET_S)
                if min(steps) < max(steps):
                    raise UsageError(f"the ranks are at different steps, from {min(steps)} to {max(steps)}")
                self.save_last()
        except (PersiaError, RuntimeError) as error:  # torch raises RuntimeError if another rank ends during the save
            line = "%s: exiting after step %d, without a checkpoint of this step: %s%s"
            _logger.error(line, why, step, error, next_step(error))
        else:
            _logger.info("%s: exiting after step %d", why, step)


def _verify(path: Place) -> None:
    """Check the hash of every file of a checkpoint. Delete a damaged checkpoint, because no run may resume from it.

    Raises:
        CheckpointError: A file differs.
        StorageError: A file cannot be read. The checkpoint is kept, because it may be intact.
    """
    try:
        _core.Checkpoint(path).verify()
    except CheckpointError as damage:
        damage.hint = f"check the storage of {path.parent}: it lost or changed files of this checkpoint"
        try:
            retention.remove(path)
        except PersiaError as error:
            _logger.warning("checkpoint %s is damaged, but cannot be deleted: %s%s", path, error, next_step(error))
        raise


_LEAVES = (ExitCode.AGAIN, ExitCode.INTERRUPTED)
