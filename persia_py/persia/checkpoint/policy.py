"""The options for the checkpoints of a run: :class:`persia.ctx.Checkpoints`."""

import os
from collections.abc import Mapping
from typing import Any

from persia.backend.base import Backend
from persia.checkpoint import snapshot, storage
from persia.checkpoint.object_store import ObjectStore
from persia.checkpoint.retention import MAX_DAYS
from persia.distributed import run
from persia.embedding.listed import listed
from persia.runtime import job
from persia.runtime.errors import ConfigError, ForeignCheckpointError, StorageError, UsageError
from persia.runtime.files import is_url
from persia.runtime.logging import get_logger, next_step
from persia.runtime.places import Place, Url, below, check_scheme, check_slashes
from persia.runtime.settings import settings
from persia.runtime.stateful import Stateful

_logger = get_logger("checkpoint")

STATE = "state.pt"
"""The file of a checkpoint that holds the states of :class:`Checkpoints`'s ``state``."""


class Checkpoints:
    """Saves a run every ``every`` steps, and resumes it from the newest checkpoint when it is restarted.

    Pass it as ``TrainCtx(checkpoints=...)`` on every rank. Each checkpoint is one consistent cut: all ranks have
    finished the same step, all pushes are applied, and none is in flight. A checkpoint holds what
    :meth:`TrainCtx.dump_checkpoint` saves, and the random state of every rank. Training pauses only for the cut. Files
    are written while training continues.

    A run is saved between two steps, after the body of the loop over a :class:`persia.data.DataLoader`. A checkpoint
    therefore includes what the body does after ``backward``, such as a scheduler's step. The run is also saved at the
    end of the loop, and the loop returns when that checkpoint is written. After SIGTERM to any rank, all ranks finish
    the current step, save the run and exit with 75. This applies in the whole context: in the loop, in an evaluation,
    and between two loops. Ctrl-C does the same with exit code 130; a second Ctrl-C ends the process immediately.

    Args:
        folder: The folder of the checkpoints: a folder ``step-N`` for each, and ``LATEST``, which points to the newest.
            A relative path is below ``PERSIA_CKPT_DIR``, if that is set. In a job, None means a folder of this run. An
            interrupted run resumes in its folder, and a run that starts after the end of another run gets a new folder.
            With a URL such as ``s3://bucket/prefix``, rank 0 and every server write to the object store, and need no
            shared disk. Each process takes its credentials from its environment.
        every: The number of steps between checkpoints.
        keep_last: The number of checkpoints that are kept; older ones are deleted, but never the newest intact one.
        keep_days: Checkpoints older than this number of days are deleted as well, but never the newest intact one.
            None means no limit. It applies to ``folder``, not to replicas.
        verify: Whether to read each checkpoint after it is written and compare the hash of every file. A checkpoint
            that differs counts as failed, and is written again.
        upload_to: A URL such as ``s3://bucket/prefix``, below which each checkpoint is uploaded after it is written,
            and before the next checkpoint is written. ``keep_last`` also applies to these replicas. If the newest
            replica is newer than the folder's checkpoints (after a disk was replaced, for example), the run resumes
            from it. If no folder is given, replicas are below the name of the run. If the name of the run was lost with
            its disk, the run is found by its replicas. Credentials come from the environment: see
            :class:`persia.checkpoint.object_store.ObjectStore`.
        state: Further objects of the run by name, each with ``state_dict`` and ``load_state_dict``. All ranks
            receive what rank 0 saved, with tensors on the CPU.
        allow_previous: Whether to resume from the newest intact checkpoint if the newest one is damaged; a warning
            names both.
        failing_batches: The treatment of a batch at which training has failed 3 times on one rank, each time after a
            restart of the run. ``stop``: the run fails again. ``skip``: all ranks skip the step together, without the
            body of the loop; model and rows do not change. Steps that always fail and are less than 100 apart, without
            a checkpoint between them, are not skipped, because the data is unlikely to be the cause. Failures that the
            batch may have caused are recorded with the batch in the folder ``poison`` next to the checkpoints, until
            the step is trained and saved. Failures of a server or of another process are not recorded.
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
        UsageError: An argument is out of range, an object in ``state`` lacks one of the two methods,
            ``failing_batches`` has another value, ``upload_to`` and ``copy_to`` are both given, or ``folder`` is None
            outside a job. For a ``folder`` that is a URL: it cannot be used, ``upload_to`` is given, or
            ``failing_batches`` is ``skip`` and ``PERSIA_RUN_DIR`` is not set.
        ConfigError: ``upload_to`` is not the URL of an object store.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every: int = 1000,
        keep_last: int = 3,
        keep_days: float | None = None,
        verify: bool = False,
        upload_to: str | None = None,
        state: Mapping[str, Stateful] | None = None,
        allow_previous: bool = False,
        failing_batches: str = "stop",
        copy_to: str | None = None,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"Checkpoints({name}={value!r}): must be an integer of at least 1")
        if keep_days is not None and not 0 < keep_days <= MAX_DAYS:
            raise UsageError(f"Checkpoints(keep_days={keep_days!r}): must be above 0 and at most {MAX_DAYS} days")
        for name, each in (state or {}).items():
            if not isinstance(each, Stateful):
                raise UsageError(
                    f"Checkpoints(state={{{name!r}: ...}}): expected an object with state_dict and load_state_dict, "
                    f"found {type(each).__name__}"
                )
        if failing_batches not in {"stop", "skip"}:
            raise UsageError(f"Checkpoints(failing_batches={failing_batches!r}): expected 'stop' or 'skip'")
        if folder is None and settings.nats_url is None:
            raise UsageError("Checkpoints(): pass a folder; only a job (PERSIA_NATS_URL is set) has a default folder")
        if upload_to is not None and copy_to is not None:
            raise UsageError("Checkpoints(upload_to=..., copy_to=...): two names of one argument; pass upload_to")
        self._upload_to = copy_to if upload_to is None else upload_to
        if self._upload_to is not None:
            try:
                ObjectStore(self._upload_to)
            except ConfigError as error:
                name = "copy_to" if upload_to is None else "upload_to"
                raise ConfigError(f"Checkpoints({name}=...): {error}", hint=error.hint) from error
        if folder is not None:
            check_slashes(folder)
        if folder is not None and is_url(folder):
            check_scheme(Url(os.fspath(folder)))
            if self._upload_to is not None:
                raise UsageError(
                    f"Checkpoints({os.fspath(folder)!r}, upload_to=...): the checkpoints are in an object store "
                    "already; remove upload_to"
                )
            if failing_batches == "skip" and settings.run_dir is None:
                raise UsageError(
                    f"Checkpoints({os.fspath(folder)!r}, failing_batches='skip'): set PERSIA_RUN_DIR to a folder that "
                    "outlives the process, for the records of batches that failed"
                )
        self._given = folder
        self.state = dict(state or {})
        self.every = every
        self.keep_last = keep_last
        self.keep_days = keep_days
        self.verify = verify
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
        """Return the folder as it was passed, or the name of the run."""
        return self._run_name() if self._given is None else os.fspath(self._given)

    @property
    def _runs_in_store(self) -> str | None:
        """The URL below which runs have their checkpoints or replicas, if there is one."""
        root = settings.checkpoint_root
        return root if self._upload_to is None and root is not None and is_url(root) else self._upload_to

    def _run_name(self) -> str:
        """Return the name of the current run. If the disk of the run was lost, look for the run in the object store."""
        store = self._runs_in_store
        if store is None:
            return job.run_name()
        run.at_finish(self._mark_finished)
        return job.run_name(lambda: _newest_interrupted(ObjectStore(store)))

    def _mark_finished(self) -> None:
        store = self._runs_in_store
        if store is not None:
            whole = store if self._given is not None else f"{store.rstrip('/')}/{self._run_name()}"
            ObjectStore(whole).finish_run()

    def folder(self, backend: Backend) -> Place:
        """Return the URL or the folder of the checkpoints. A missing folder is created.

        Raises:
            ConfigError: The folder cannot be created.
            UsageError: The folder or the URL is not one in which the servers of the job can save.
        """
        folder = backend.checkpoint_dir(self.name())
        if isinstance(folder, Url):
            return folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the folder of the checkpoints, {folder}: {error.strerror}",
                hint="check the owner of its parent folder and the free space, or choose another folder",
            ) from error
        return folder

    def validate_storage(self) -> None:
        """Check that checkpoints can be written, before anything else is done. In a job, only rank 0 checks.

        Raises:
            StorageError: The storage cannot be used; the message says why.
        """
        if settings.rank != 0:
            return
        storage.check_root()
        root = settings.checkpoint_root
        if root is not None or self._given is not None:
            where = below(root, self._given or "")
            if isinstance(where, Url):
                storage.validate_url(where)
            else:
                storage.validate(where)

    def store(self) -> ObjectStore | None:
        """Return the object store that checkpoints are uploaded to, if any."""
        if self._upload_to is None:
            return None
        whole = self._upload_to if self._given is not None else f"{self._upload_to.rstrip('/')}/{self._run_name()}"
        return ObjectStore(whole)

    def state_in(self, loaded: snapshot.Load) -> dict[str, Any] | None:
        """Return the states of the ``state`` objects from a checkpoint; None if it has none.

        Raises:
            ForeignCheckpointError: The checkpoint has states under other names.
        """
        if STATE not in loaded.names:
            return None
        state = loaded.state(STATE)
        self._check_state(state, f"{loaded.path}: ")
        return state

    def check_has_state(self, loaded: snapshot.Load) -> None:
        """Check that a checkpoint has the states of the ``state`` objects.

        Raises:
            ForeignCheckpointError: The checkpoint lacks them.
        """
        if STATE not in loaded.names:
            self._check_state({}, f"{loaded.path}: ")

    def resume(self, step: int, state: dict[str, Any] | None) -> None:
        """Continue after a checkpoint of ``step``; restore its ``state``, if known.

        Collective: every rank must call it.
        """
        if state is not None:
            self._check_state(state)
            for name, each in self.state.items():
                each.load_state_dict(state[name])
        self.saved = self.written = step

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the ``state`` objects, by name."""
        return {name: each.state_dict() for name, each in self.state.items()}

    def _check_state(self, state: dict[str, Any], start: str = "") -> None:
        if state.keys() != self.state.keys():
            raise ForeignCheckpointError(
                f"{start}the states differ; in the checkpoint: {listed(state)}; in Checkpoints(state=...): "
                f"{listed(self.state)}",
                hint="pass an object for each state of the checkpoint, and no other, to Checkpoints(state=...), or "
                "load a checkpoint of this script",
            )


def _newest_interrupted(store: ObjectStore) -> str | None:
    """Return the job's newest interrupted run, according to the checkpoints on the disk and the replicas.

    Run names end with the start time, so they sort by time.
    """
    local = job.interrupted_run()
    try:
        replicated = store.interrupted_run(job.job_name())
    except StorageError as error:
        if local is None:
            raise
        line = "continuing run %s from the disk, without looking for a newer run: %s%s"
        _logger.warning(line, local, error, next_step(error))
        return local
    return max((name for name in (local, replicated) if name is not None), default=None)
