"""Loads a checkpoint when a run is restarted."""

import os
import shlex
from pathlib import Path

from persia.checkpoint import snapshot
from persia.checkpoint.object_store import ObjectStore
from persia.checkpoint.policy import Checkpoints
from persia.checkpoint.run_state import RunState
from persia.runtime.errors import CheckpointError, StorageError
from persia.runtime.logging import get_logger, next_step
from persia.runtime.places import Place, Url
from persia_core import checkpoint as _core

_logger = get_logger("checkpoint")


def resume(checkpoints: Checkpoints, state: RunState) -> bool:
    """Load the newest checkpoint, on rank 0; the other ranks get it at the start of the next training loop.

    Returns:
        Whether a checkpoint was loaded.

    Raises:
        CheckpointError: The newest checkpoint is damaged, or belongs to another configuration.
        StorageError: This process or a server cannot write to the folder of checkpoints, or the replicas cannot be
            listed and the folder has no checkpoint.
    """
    folder = checkpoints.folder(state.backend)
    try:
        state.backend.engine.check_storage(folder)
    except StorageError as error:
        hint = error.hint
        if isinstance(folder, Url):
            hint = f"remove the cause, then check the store: persia doctor --only disk --dir {shlex.quote(folder.text)}"
        raise StorageError(f"Checkpoint storage validation failed: {error}", hint=hint) from None
    store = checkpoints.store()
    try:
        newest: str | None = _core.latest(folder)
        if store is not None:
            newest = _newer_replica(store, folder, newest)
        if newest is None:
            _logger.info("no checkpoint in %s: training starts from the beginning", folder)
            return False
        loaded = snapshot.Load(newest)
    except CheckpointError as error:
        loaded = _previous(folder, error, allowed=checkpoints.allow_previous)
    if not loaded.imported:
        checkpoints.check_has_state(loaded)
    state.restore(loaded)
    if loaded.imported:  # an imported checkpoint has no model and no step
        _logger.info("training starts at step 1 with the rows of %s", loaded.path)
    else:
        _logger.info("training resumes after step %d, from %s", loaded.step, loaded.path)
    return True


def _newer_replica(store: ObjectStore, folder: Place, newest: str | None) -> str | None:
    """Return the newest checkpoint in ``folder``. If the object store has a newer replica, download it first."""
    try:
        newer = next(iter(store.whole()), None)
    except StorageError as error:
        if newest is None:
            raise
        line = "resuming from %s without looking for a newer replica: %s%s"
        _logger.warning(line, newest, error, next_step(error))
        return newest
    if newest is not None:
        opened = _core.Checkpoint(newest)
        if newer is None or newer.age <= (opened.generation, opened.step):
            return newest
    elif newer is None:
        return None
    why = f"{folder} has no checkpoint" if newest is None else f"the checkpoints in {folder} are older"
    _logger.warning("downloading the checkpoint %s/%s, because %s", store.url, newer.name, why)
    store.get(newer.name, Path(folder, newer.name))  # with upload_to, ``folder`` is never a URL
    return os.fspath(folder / newer.name)


def _previous(folder: Place, error: CheckpointError, *, allowed: bool) -> snapshot.Load:
    """Return the newest intact checkpoint, if the newest checkpoint cannot be used.

    Raises:
        CheckpointError: This is not ``allowed``, or no checkpoint is intact.
    """
    found = _core.listing(folder)
    whole = next((each["path"] for each in found if each["problem"] is None), None)
    if whole is None:
        raise error
    if not allowed:
        # A checkpoint that cannot be read at the moment may be intact, so the hint must not advise to delete it.
        broken = shlex.join(str(each["path"]) for each in found if each["problem"] is not None and not each["unread"])
        hint = (
            f"to resume from {whole}, use --set checkpoint.allow_previous=true (in a script "
            "Checkpoints(allow_previous=True))"
        )
        if broken:
            remove = f"delete the objects below {broken}" if isinstance(folder, Url) else f"rm -r {broken}"
            hint += f"; or remove the damaged checkpoints: {remove}"
        raise CheckpointError(f"{error}\n{whole} is intact", hint=hint)
    line = "resuming from %s, the newest intact checkpoint; another one cannot be used: %s%s"
    _logger.warning(line, whole, error, next_step(error))
    return snapshot.Load(whole)
