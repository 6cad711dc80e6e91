"""The checkpoints of a run: saved as it goes on, by all ranks at one step, and gone on from after a restart."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from persia.checkpoint import rng_state, snapshot
from persia.checkpoint.object_store import Copies
from persia.loop.quarantine import FOLDER, Poison, Work
from persia.runtime import job, preemption, settings
from persia.runtime.contexts import ends_well
from persia.runtime.errors import CheckpointError, ConfigError, PersiaError, StorageError, UsageError
from persia.runtime.logging import get_logger
from persia_core import checkpoint as _core

if TYPE_CHECKING:
    from persia.backend.base import Backend
    from persia.ctx.train import TrainCtx

_logger = get_logger("checkpoint")

RETRY_S = (1.0, 2.0, 4.0)
"""Seconds after which the run is saved again when the disk refused a save, or it broke off."""

MEET_S = 20.0
"""Seconds that ranks wait for each other, to save the run before they leave; a launcher gives them 45 for all of it."""

STATE = "state.pt"
"""The file of a checkpoint that holds the states of :class:`Checkpoints`'s ``state``."""


@runtime_checkable
class HasState(Protocol):
    """What a checkpoint can keep, by torch's convention: a learning-rate scheduler, a counter of one's own."""

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` takes: tensors, numbers, strings, lists and dicts."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""
        ...


class Checkpoints:
    """Saves a run every so many steps, and goes on from the newest save when the run is started again.

    For ``TrainCtx(checkpoints=...)``, on every rank. Each save is one consistent cut: all ranks stand behind the same
    step, the pushes of all are applied and none is on its way. It holds what :meth:`TrainCtx.dump_checkpoint` saves,
    and the random state of every rank. Training stands still for the cut alone: files are written while it goes on.

    A save comes between two steps, after the body of the loop over a :class:`persia.data.DataLoader`, so that what the
    body does behind ``backward`` (a scheduler's step) is part of it. The end of the loop is saved, too, and written
    before anything behind it. SIGTERM to any rank lets all ranks save behind the step they are at, and leave with exit
    code 75, from wherever they are in the context: the loop, an evaluation, or what lies between two loops.

    Args:
        folder: Holds a folder ``step-N`` for each save, and ``LATEST``, which names the newest. A relative one is below
            ``PERSIA_CKPT_DIR``, where that is set. None, in a job, is a folder of the run's own: a run that was
            interrupted goes on in it, one that is started after the end of another has a new one.
        every: Steps from save to save.
        keep_last: Saves that are kept; older ones are deleted, but never the newest whole one.
        copy_to: A URL such as ``s3://bucket/prefix``, below which each save is copied when it is written, before the
            next one is. There, too, ``keep_last`` are kept. Where the store has a newer one than the folder (a new
            disk, say), the run goes on from that. Without a folder given, copies are below the name of the run there.
            Credentials are those of the environment: see :class:`persia.copies.Copies`.
        state: What else belongs to the run, by name, each with ``state_dict`` and ``load_state_dict``. All ranks get
            what rank 0 saved, with tensors on the CPU.
        allow_previous: Where the newest save is damaged, go on from the newest whole one; a warning names both.
        failing_batches: What becomes of a batch at which training has failed 3 times on one rank, each time after the
            run was started again. ``stop``: it fails again. ``skip``: all ranks leave the batches of that step out
            together, without the body of the loop, and model and rows stay as they are; but of steps that always fail
            and are less than 100 apart, without a save between them, none is left out, because it is hardly the data
            then. Failures of a batch, but none of a part of the system, are written down in the folder ``poison``
            beside the saves, with the batch, until the step was trained and saved.

    Raises:
        UsageError: A number below 1, something in ``state`` without the two methods, or another ``failing_batches``.
        ConfigError: ``copy_to`` is no URL of an object store.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every: int = 1000,
        keep_last: int = 3,
        copy_to: str | None = None,
        state: Mapping[str, HasState] | None = None,
        allow_previous: bool = False,
        failing_batches: str = "stop",
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"Checkpoints({name}={value!r}): want a whole number from 1 on")
        for name, each in (state or {}).items():
            if not isinstance(each, HasState):
                raise UsageError(
                    f"Checkpoints(state={{{name!r}: ...}}): {type(each).__name__} has no state_dict and load_state_dict"
                )
        if failing_batches not in {"stop", "skip"}:
            raise UsageError(f"Checkpoints(failing_batches={failing_batches!r}): want 'stop' or 'skip'")
        if folder is None and settings.nats_url() is None:
            raise UsageError("Checkpoints(): give a folder; only a job has one of its own")
        if copy_to is not None:
            Copies(copy_to)  # refuses what is no such URL
        self._given = folder
        self._copy_to = copy_to
        self._state = dict(state or {})
        self.every = every
        self.keep_last = keep_last
        self.allow_previous = allow_previous
        self._tries = 0
        self._again_at: float | None = None  # by the clock, where a save failed
        self._written = 0  # the step of the newest save that is known to be written, on rank 0
        self.saved = 0
        """The step that was last saved, or gone on from: the same on all ranks."""
        self.failed = 0
        """Saves that were given up; other ranks than the first learn of it at the next one."""
        self.uncopied = 0
        """Saves that were written but could not be copied, on rank 0."""
        self.poison = Poison(skip=failing_batches == "skip")
        """What has failed. For :class:`TrainCtx`."""

    @property
    def skipped(self) -> int:
        """Steps that this process has left out because their batch always fails: the same on all ranks."""
        return self.poison.skipped

    def load(self, context: "TrainCtx") -> None:
        """Load the newest save, on rank 0; the other ranks get it at the start of the next training loop.

        Raises:
            CheckpointError: The newest save is damaged, or of another configuration.
            StorageError: This process or a server cannot write where saves are to be.
        """
        folder = self._folder(context)
        try:
            context.common.engine.check_storage(folder)
        except StorageError as error:
            raise StorageError(f"Checkpoint storage validation failed: {error}") from None
        copies = self._copies()
        try:
            newest = _core.latest(folder)
            if copies is not None:
                newest = self._newer_copy(copies, folder, newest)
            if newest is None:
                _logger.info("no checkpoint in %s: training begins", folder)
                return
            loaded = snapshot.Load(newest)
        except CheckpointError as error:
            loaded = self._previous(folder, error)
        if STATE not in loaded.names:
            self._check_state({})
        context.go_on_from(loaded)
        _logger.info("training goes on behind step %d, from %s", loaded.step, loaded.path)

    def learn_failures(self, context: "TrainCtx", fed: Sequence[Work]) -> None:
        """At the start of a training loop, which ``fed`` is ahead of: learn which batches have failed; all ranks do."""
        common = context.common
        name = common.gather("folder of the saves", self._name() if common.writes else None)[0]
        try:
            folder = common.checkpoint_dir(name) / FOLDER
        except UsageError:  # this rank has no such place: it matters once a batch fails here
            folder = None
        self.poison.begin(common, folder, fed)

    def _copies(self) -> Copies | None:
        """Return where saves are copied to."""
        if self._copy_to is None:
            return None
        return Copies(self._copy_to if self._given is not None else f"{self._copy_to.rstrip('/')}/{job.run_name()}")

    def _newer_copy(self, copies: Copies, folder: Path, newest: str | None) -> str | None:
        """Return the newest save in ``folder``, where the store had a newer one."""
        try:
            newer = next(iter(copies.whole()), None)
        except StorageError as error:
            if newest is None:
                raise
            _logger.warning("going on from %s without looking for a newer one: %s", newest, error)
            return newest
        if newest is not None:
            opened = _core.Checkpoint(newest)
            if newer is None or newer.age <= (opened.generation, opened.step):
                return newest
        elif newer is None:
            return None
        _logger.warning("%s is newer than what %s has: it is copied there", f"{copies.url}/{newer.name}", folder)
        copies.get(newer.name, folder / newer.name)
        return os.fspath(folder / newer.name)

    def _previous(self, folder: Path, error: CheckpointError) -> snapshot.Load:
        """Return the newest save that is whole, where the newest of all is damaged."""
        whole = next((each["path"] for each in _core.listing(folder) if each["problem"] is None), None)
        if whole is None:
            raise error
        if not self.allow_previous:
            raise CheckpointError(
                f"{error}\n{whole} is whole: to go on from there, give Checkpoints(allow_previous=True), or remove the "
                "damaged one"
            )
        _logger.warning("going on from %s, because the newer one is damaged: %s", whole, error)
        return snapshot.Load(whole)

    def save_if_due(self, context: "TrainCtx", step: int) -> None:
        """Save the run if it has come by a step of which there is to be a save, since the last one.

        Raises:
            PersiaError: A push of a rank is not applied, or a rank is gone.
        """
        if step // self.every != self.saved // self.every:
            self.save(context, step)

    def save_last(self, context: "TrainCtx", step: int) -> None:
        """Save the run if it is further than its last save, and return when that is written or given up.

        Raises:
            PersiaError: A push of a rank is not applied, or a rank is gone.
        """
        if step != self.saved:
            self.save(context, step)
        while True:
            settled = self._settled(context.common)
            settled, written = context.common.gather("checkpoint written", [settled, self._written])[0]
            self.poison.saved(written)
            if settled is not False:
                return
            self.save(context, step)

    def save(self, context: "TrainCtx", step: int) -> None:
        """Save the run behind ``step``; every rank calls this, and all go on as soon as the cut is made.

        Raises:
            PersiaError: A push of a rank is not applied, or a rank is gone.
        """
        self.saved = step
        common = context.common
        with common.still():
            failed, written = common.gather("checkpoint", [self.failed, self._written])[0]
            if not common.writes:
                self.failed = failed
            states = common.collect(context.rank_state())
            if states is not None:
                self._cut(context, step, states)
            common.gather("checkpoint cut", None)
        self.poison.saved(written)

    def leave_if_asked(self, context: "TrainCtx", left_by: BaseException | None) -> None:
        """At the end of a context that was left by this: save the run and leave, if this process was asked to stop.

        Where the context came to its end on all ranks, they do so, too, if another one was asked.

        Raises:
            SystemExit: It came to its end, and this process is to leave.
        """
        ended = left_by is None or (isinstance(left_by, SystemExit) and ends_well(left_by))
        asked = preemption.stop_asked()
        if ended:
            try:
                asked = any(context.common.gather("end of training", asked))
            except SystemExit:
                asked = True
        if asked and (ended or (isinstance(left_by, SystemExit) and left_by.code == preemption.AGAIN)):
            with preemption.leaving():
                self._save_to_leave(context)
            if ended:
                raise SystemExit(preemption.AGAIN)

    def _save_to_leave(self, context: "TrainCtx") -> None:
        """Save the run if anything was trained, and all ranks come and stand behind the same step."""
        step = context.step
        try:
            if preemption.has_trained():
                steps = context.common.meet(step, MEET_S)
                if min(steps) < max(steps):
                    raise UsageError(f"the ranks are at steps {', '.join(map(str, steps))}")
                self.save_last(context, step)
        except (PersiaError, RuntimeError) as error:  # the second of torch, where another rank ends meanwhile
            _logger.error("SIGTERM: leaving behind step %d, which is not saved: %s", step, error)
        else:
            _logger.info("SIGTERM: leaving behind step %d", step)

    def due_again(self) -> bool:
        """Whether the last save failed and is to be tried again now; only rank 0 knows."""
        return self._again_at is not None and time.monotonic() >= self._again_at

    def _cut(self, context: "TrainCtx", step: int, ranks: list[dict[str, Any]]) -> None:
        """On rank 0: begin a save when the last one is written; it is written in the background."""
        started = time.monotonic()
        context.common.wait_writing()
        if (waited := time.monotonic() - started) > 1.0:
            _logger.warning("training waited %.1f s at step %d until the checkpoint before was written", waited, step)
        self._again_at = None
        states = {rng_state.rank_state(rank): each for rank, each in enumerate(ranks) if rank > 0}
        if self._state:
            states[STATE] = self.state_dict()
        cut_at = time.monotonic()
        try:
            path = self._folder(context) / f"step-{step}"
            save = context.begin_checkpoint(path, states)
        except PersiaError as error:  # whatever it is: training notices by itself where it cannot go on
            self._try_again(step, error)
            return
        stood = time.monotonic() - cut_at
        context.common.writing = snapshot.Writing(save, lambda: self._write(save, path, step, stood))

    def _write(self, save: snapshot.Save, path: Path, step: int, stood: float) -> None:
        """Write it, on a thread of its own."""
        started = time.monotonic()
        try:
            save.write()
        except PersiaError as error:  # a middleware may have died under it
            self._try_again(step, error)
            return
        self._tries = 0
        self._written = step
        _logger.info(
            "checkpoint %s written in %.1f s, training stood still for %.2f s, %d older removed",
            path,
            time.monotonic() - started,
            stood,
            self._tidy(path),
        )
        self._copy(path)

    def _tidy(self, path: Path) -> int:
        """Let ``LATEST`` name a save, and remove older ones; where that fails, the save is none the worse."""
        try:
            _core.publish_latest(path)
        except PersiaError as error:
            _logger.warning("checkpoint %s is written, but not named by LATEST: %s", path, error)
        try:
            return len(_core.prune(path.parent, self.keep_last))
        except PersiaError as error:
            _logger.warning("checkpoint %s is written, but older ones are not removed: %s", path, error)
            return 0

    def _copy(self, path: Path) -> None:
        """Copy a save to the store, and delete older copies; where that fails, the save is none the worse."""
        copies = self._copies()
        if copies is None:
            return
        started = time.monotonic()
        try:
            copies.put(path, path.name)
            deleted = copies.prune(self.keep_last)
        except PersiaError as error:
            self.uncopied += 1
            _logger.error("checkpoint %s is written, but not copied: %s", path, error)
            return
        took = time.monotonic() - started
        _logger.info("checkpoint %s copied to %s in %.1f s, %d older deleted", path, copies.url, took, len(deleted))

    def _try_again(self, step: int, error: Exception) -> None:
        if self._tries == len(RETRY_S):
            self._tries = 0
            self.failed += 1
            _logger.error("checkpoint of step %d given up, training goes on: %s", step, error)
            return
        wait = RETRY_S[self._tries]
        self._tries += 1
        _logger.warning("checkpoint of step %d failed, the run is saved again in %g s: %s", step, wait, error)
        self._again_at = time.monotonic() + wait

    def _settled(self, common: "Backend") -> bool | None:
        """On rank 0: whether the last save is written or given up; if not, it is to be tried again now."""
        if not common.writes:
            return None
        common.wait_writing()
        if self._again_at is None:
            return True
        time.sleep(max(0.0, self._again_at - time.monotonic()))
        return False

    def state_in(self, loaded: snapshot.Load) -> dict[str, Any] | None:
        """Return the states of what was given as ``state``, as a checkpoint has them; None where it has none.

        Raises:
            CheckpointError: It has other names.
        """
        if STATE not in loaded.names:
            return None
        state = loaded.state(STATE)
        self._check_state(state)
        return state

    def go_on(self, step: int, state: dict[str, Any] | None) -> None:
        """Go on behind a save of ``step`` with what :meth:`state_dict` returned, if that is known; all ranks do."""
        if state is not None:
            self._check_state(state)
            for name, each in self._state.items():
                each.load_state_dict(state[name])
        self.saved = self._written = step

    def state_dict(self) -> dict[str, Any]:
        """Return the states of what was given as ``state``, by name."""
        return {name: each.state_dict() for name, each in self._state.items()}

    def _check_state(self, state: dict[str, Any]) -> None:
        if state.keys() != self._state.keys():
            raise CheckpointError(
                f"the checkpoint has the states {', '.join(state) or 'none'}, Checkpoints(state=...) has "
                f"{', '.join(self._state) or 'none'}; give the same"
            )

    def _name(self) -> str:
        return job.run_name() if self._given is None else os.fspath(self._given)

    def _folder(self, context: "TrainCtx") -> Path:
        folder = context.common.checkpoint_dir(self._name())
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"checkpoints: {folder}: {error.strerror}") from error
        return folder
