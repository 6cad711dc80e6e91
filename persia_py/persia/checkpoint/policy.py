"""What a script wants of the checkpoints of its run: :class:`persia.ctx.Checkpoints`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from persia.backend.base import Backend
from persia.checkpoint import snapshot
from persia.checkpoint.object_store import ObjectStore
from persia.runtime import job
from persia.runtime.errors import CheckpointError, ConfigError, UsageError
from persia.runtime.settings import settings
from persia.runtime.stateful import Stateful

STATE = "state.pt"
"""The file of a checkpoint that holds the states of :class:`Checkpoints`'s ``state``."""


class Checkpoints:
    """Saves a run every so many steps, and resumes it from the newest save when it is started again.

    For ``TrainCtx(checkpoints=...)``, on every rank. Each save is one consistent cut: all ranks are after the same
    step, the pushes of all are applied and none is on its way. It holds what :meth:`TrainCtx.dump_checkpoint` saves,
    and the random state of every rank. Training pauses for the cut alone: files are written while it continues.

    A save comes between two steps, after the body of the loop over a :class:`persia.data.DataLoader`, so that what the
    body does after ``backward`` (a scheduler's step) is part of it. The end of the loop is saved too, and written
    before the loop returns. After SIGTERM to any rank, all ranks save the run after the step they are at and leave with
    exit code 75, from wherever they are in the context: the loop, an evaluation, or between two loops. Ctrl-C does the
    same with exit code 130; a second Ctrl-C ends the process at once.

    Args:
        folder: Holds a folder ``step-N`` for each save, and ``LATEST``, which names the newest. A relative one is below
            ``PERSIA_CKPT_DIR``, where that is set. None, in a job, is a folder of the run's own: an interrupted run
            resumes in it, a run that is started after the end of another has a new one.
        every: Steps from save to save.
        keep_last: Saves that are kept; older ones are deleted, but never the newest whole one.
        upload_to: A URL such as ``s3://bucket/prefix``, below which each save is uploaded when it is written, before
            the next one is. There, too, ``keep_last`` are kept. Where the store has a newer one than the folder (a new
            disk, say), the run resumes from that. Without a folder given, replicas are below the name of the run.
            Credentials are those of the environment: see :class:`persia.checkpoint.object_store.ObjectStore`.
        state: What else belongs to the run, by name, each with ``state_dict`` and ``load_state_dict``. All ranks get
            what rank 0 saved, with tensors on the CPU.
        allow_previous: Where the newest save is damaged, resume from the newest whole one; a warning names both.
        failing_batches: What becomes of a batch at which training has failed 3 times on one rank, each time after a
            restart of the run. ``stop``: it fails again. ``skip``: all ranks skip the step together, without the body
            of the loop; model and rows stay as they are. Steps that always fail and are less than 100 apart, without a
            save between them, are not skipped: the data is hardly the cause. Failures of a batch, but not of a part of
            the system, are recorded in the folder ``poison`` beside the saves, with the batch, until the step was
            trained and saved.
        copy_to: The old name of ``upload_to``.

    Attributes:
        saved: The step that was last saved, or resumed from; the same on all ranks.
        written: The step of the newest save that is known to be written, on rank 0.
        failed: Saves that were given up; other ranks than the first learn of it at the next save.
        not_uploaded: Saves that were written but could not be uploaded, on rank 0.
        skipped: Steps that this process has skipped because their batch always fails; the same on all ranks.

    Raises:
        UsageError: A number below 1, something in ``state`` without the two methods, another ``failing_batches``, or
            both ``upload_to`` and ``copy_to``.
        ConfigError: ``upload_to`` is no URL of an object store.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every: int = 1000,
        keep_last: int = 3,
        upload_to: str | None = None,
        state: Mapping[str, Stateful] | None = None,
        allow_previous: bool = False,
        failing_batches: str = "stop",
        copy_to: str | None = None,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"Checkpoints({name}={value!r}): want a whole number from 1 on")
        for name, each in (state or {}).items():
            if not isinstance(each, Stateful):
                raise UsageError(
                    f"Checkpoints(state={{{name!r}: ...}}): {type(each).__name__} has no state_dict and load_state_dict"
                )
        if failing_batches not in {"stop", "skip"}:
            raise UsageError(f"Checkpoints(failing_batches={failing_batches!r}): want 'stop' or 'skip'")
        if folder is None and settings.nats_url is None:
            raise UsageError("Checkpoints(): give a folder; only a job has one of its own")
        if upload_to is not None and copy_to is not None:
            raise UsageError("Checkpoints(upload_to=..., copy_to=...): two names of one argument; give upload_to")
        self._upload_to = copy_to if upload_to is None else upload_to
        if self._upload_to is not None:
            ObjectStore(self._upload_to)  # refuses what is no such URL
        self._given = folder
        self.state = dict(state or {})
        self.every = every
        self.keep_last = keep_last
        self.allow_previous = allow_previous
        self.failing_batches = failing_batches
        self.saved = self.written = 0
        self.failed = 0
        self.not_uploaded = 0
        self.skipped = 0

    @property
    def uncopied(self) -> int:
        """The old name of ``not_uploaded``."""
        return self.not_uploaded

    def begin(self) -> None:
        """Forget the saves of an earlier context."""
        self.saved = self.written = 0

    def name(self) -> str:
        """Return the folder as it was given, or the name of the run."""
        return job.run_name() if self._given is None else os.fspath(self._given)

    def folder(self, backend: Backend) -> Path:
        """Return the folder of the saves; made if missing.

        Raises:
            ConfigError: It cannot be made.
        """
        folder = backend.checkpoint_dir(self.name())
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"checkpoints: {folder}: {error.strerror}") from error
        return folder

    def store(self) -> ObjectStore | None:
        """Return where saves are uploaded to, if anywhere."""
        if self._upload_to is None:
            return None
        whole = self._upload_to if self._given is not None else f"{self._upload_to.rstrip('/')}/{job.run_name()}"
        return ObjectStore(whole)

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

    def check_has_state(self, loaded: snapshot.Load) -> None:
        """Check that a save has the states of what was given as ``state``.

        Raises:
            CheckpointError: It has none of them.
        """
        if STATE not in loaded.names:
            self._check_state({})

    def resume(self, step: int, state: dict[str, Any] | None) -> None:
        """Continue after a save of ``step`` with what :meth:`state_dict` returned, if that is known; all ranks do."""
        if state is not None:
            self._check_state(state)
            for name, each in self.state.items():
                each.load_state_dict(state[name])
        self.saved = self.written = step

    def state_dict(self) -> dict[str, Any]:
        """Return the states of what was given as ``state``, by name."""
        return {name: each.state_dict() for name, each in self.state.items()}

    def _check_state(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state.keys():
            raise CheckpointError(
                f"the checkpoint has the states {', '.join(state) or 'none'}, Checkpoints(state=...) has "
                f"{', '.join(self.state) or 'none'}; give the same"
            )
