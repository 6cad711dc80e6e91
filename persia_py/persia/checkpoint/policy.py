"""The options for the checkpoints of a run: :class:`persia.ctx.Checkpoints`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from persia.backend.base import Backend
from persia.checkpoint import snapshot, storage
from persia.checkpoint.object_store import ObjectStore
from persia.distributed import run
from persia.runtime import job
from persia.runtime.errors import CheckpointError, ConfigError, StorageError, UsageError
from persia.runtime.files import is_url
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia.runtime.stateful import Stateful

_logger = get_logger("checkpoint")

STATE = "state.pt"
"""The file of a checkpoint that holds the states of :class:`Checkpoints`'s ``state``."""


class Checkpoints:
    """Saves a run every ``every`` steps, and resumes it from the newest checkpoint when it is restarted.

    For ``TrainCtx(checkpoints=...)``, on every rank. Each checkpoint is one consistent cut: all ranks are after the
    same step, all pushes are applied, and none is in flight. It holds what :meth:`TrainCtx.dump_checkpoint` saves, and
    the random state of every rank. Training pauses only for the cut; files are written while it continues.

    A run is saved between two steps, after the body of the loop over a :class:`persia.data.DataLoader`. A checkpoint
    therefore includes what the body does after ``backward``, such as a scheduler's step. The run is also saved at the
    end of the loop, and the loop returns when that checkpoint is written. After SIGTERM to any rank, all ranks finish
    the current step, save the run and exit with 75, regardless of where they are in the context: in the loop, in an
    evaluation, or between two loops. Ctrl-C does the same with exit code 130; a second Ctrl-C ends the process
    immediately.

    Args:
        folder: The folder of the checkpoints: a folder ``step-N`` for each, and ``LATEST``, which names the newest. A
            relative one is below ``PERSIA_CKPT_DIR``, if that is set. None, in a job, means a folder of this run: an
            interrupted run resumes in it; a run that starts after the end of another gets a new one.
        every: The number of steps between checkpoints.
        keep_last: The number of checkpoints that are kept; older ones are deleted, but never the newest complete one.
        upload_to: A URL such as ``s3://bucket/prefix``, below which each checkpoint is uploaded when it is written,
            before the next one is. ``keep_last`` applies there too. If the newest replica is newer than the folder's
            checkpoints (after a disk was replaced, for example), the run resumes from it. If no folder is given,
            replicas are below the name of the run; a run whose name was lost with its disk is found by its replicas.
            Credentials come from the environment: see :class:`persia.checkpoint.object_store.ObjectStore`.
        state: Further objects of the run by name, each with ``state_dict`` and ``load_state_dict``. All ranks
            receive what rank 0 saved, with tensors on the CPU.
        allow_previous: If the newest checkpoint is damaged, resume from the newest intact one; a warning names both.
        failing_batches: The treatment of a batch at which training has failed 3 times on one rank, each time after a
            restart of the run. ``stop``: it fails again. ``skip``: all ranks skip the step together, without the body
            of the loop; model and rows stay as they are. Steps that always fail and are less than 100 apart, without a
            checkpoint between them, are not skipped, because the data is unlikely to be the cause. Failures of a batch,
            but not of a part of the system, are recorded with the batch in the folder ``poison`` next to the
            checkpoints, until the step is trained and saved.
        copy_to: The old name of ``upload_to``.

    Attributes:
        saved: The step that was last saved, or resumed from; the same on all ranks.
        written: The step of the newest checkpoint that is known to be written, on rank 0.
        failed: The number of checkpoints that were abandoned; ranks above 0 count one at the next checkpoint.
        not_uploaded: The number of checkpoints that were written but could not be uploaded, on rank 0.
        problem: Why the last checkpoint was abandoned, on rank 0; empty if it was written.
        skipped: The number of steps that this process has skipped because their batch always fails; the same on all
            ranks.

    Raises:
        UsageError: A number is below 1, an object in ``state`` lacks one of the two methods, ``failing_batches`` has
            another value, or ``upload_to`` and ``copy_to`` are both given.
        ConfigError: ``upload_to`` is not the URL of an object store.
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
                raise UsageError(f"Checkpoints({name}={value!r}): want a whole number of at least 1")
        for name, each in (state or {}).items():
            if not isinstance(each, Stateful):
                raise UsageError(
                    f"Checkpoints(state={{{name!r}: ...}}): want an object with state_dict and load_state_dict, "
                    f"got {type(each).__name__}"
                )
        if failing_batches not in {"stop", "skip"}:
            raise UsageError(f"Checkpoints(failing_batches={failing_batches!r}): want 'stop' or 'skip'")
        if folder is None and settings.nats_url is None:
            raise UsageError("Checkpoints(): give a folder; only a job has a default one")
        if upload_to is not None and copy_to is not None:
            raise UsageError("Checkpoints(upload_to=..., copy_to=...): two names of one argument; give upload_to")
        self._upload_to = copy_to if upload_to is None else upload_to
        if self._upload_to is not None:
            ObjectStore(self._upload_to)  # refuses other URLs
        self._given = folder
        self.state = dict(state or {})
        self.every = every
        self.keep_last = keep_last
        self.allow_previous = allow_previous
        self.failing_batches = failing_batches
        self.saved = self.written = 0
        self.failed = 0
        self.not_uploaded = 0
        self.problem = ""
        self.skipped = 0

    @property
    def uncopied(self) -> int:
        """The old name of ``not_uploaded``."""
        return self.not_uploaded

    def begin(self) -> None:
        """Reset the counters of an earlier context."""
        self.saved = self.written = 0

    def name(self) -> str:
        """Return the folder as it was given, or the name of the run."""
        return self._run_name() if self._given is None else os.fspath(self._given)

    def _run_name(self) -> str:
        """Return the name of the current run. One that lost its disk is found by its replicas."""
        upload_to = self._upload_to
        if upload_to is None:
            return job.run_name()
        run.at_finish(self._mark_finished)
        return job.run_name(lambda: _newest_interrupted(ObjectStore(upload_to)))

    def _mark_finished(self) -> None:
        store = self.store()
        if store is not None:
            store.finish_run()

    def folder(self, backend: Backend) -> Path:
        """Return the folder of the checkpoints, which is created if it is missing.

        Raises:
            ConfigError: It cannot be created.
        """
        folder = backend.checkpoint_dir(self.name())
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"checkpoints: {folder}: {error.strerror}") from error
        return folder

    def validate_storage(self) -> None:
        """Try to write where the saves will be, before anything else is done. In a job, rank 0 does so.

        Raises:
            StorageError: The storage cannot be used; the message says why.
        """
        if settings.rank != 0 or is_url(self._given or ""):
            return
        storage.check_root()
        root = settings.checkpoint_root
        if root is not None or self._given is not None:
            storage.validate(Path(root or "", self._given or ""))

    def store(self) -> ObjectStore | None:
        """Return the object store that checkpoints are uploaded to, if any."""
        if self._upload_to is None:
            return None
        whole = self._upload_to if self._given is not None else f"{self._upload_to.rstrip('/')}/{self._run_name()}"
        return ObjectStore(whole)

    def state_in(self, loaded: snapshot.Load) -> dict[str, Any] | None:
        """Return the states of the ``state`` objects in a checkpoint; None if it has none.

        Raises:
            CheckpointError: The checkpoint has other names.
        """
        if STATE not in loaded.names:
            return None
        state = loaded.state(STATE)
        self._check_state(state)
        return state

    def check_has_state(self, loaded: snapshot.Load) -> None:
        """Check that a checkpoint has the states of the ``state`` objects.

        Raises:
            CheckpointError: It has none of them.
        """
        if STATE not in loaded.names:
            self._check_state({})

    def resume(self, step: int, state: dict[str, Any] | None) -> None:
        """Continue after a checkpoint of ``step`` with its :meth:`state_dict`, if known; every rank calls this."""
        if state is not None:
            self._check_state(state)
            for name, each in self.state.items():
                each.load_state_dict(state[name])
        self.saved = self.written = step

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the ``state`` objects, by name."""
        return {name: each.state_dict() for name, each in self.state.items()}

    def _check_state(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state.keys():
            raise CheckpointError(
                f"the checkpoint has the states {', '.join(state) or 'none'}, Checkpoints(state=...) has "
                f"{', '.join(self.state) or 'none'}; give the same"
            )


def _newest_interrupted(store: ObjectStore) -> str | None:
    """Return the newest run of the job that is not finished, by the checkpoints on the disk and the replicas.

    Names of runs end with the time of their start.
    """
    local = job.interrupted_run()
    try:
        replicated = store.interrupted_run(job.job_name())
    except StorageError as error:
        if local is None:
            raise
        _logger.warning("found %s on the disk, without looking for a newer one: %s", local, error)
        return local
    return max((name for name in (local, replicated) if name is not None), default=None)
