"""The run of this process: its other ranks, its progress, its end on all ranks, and its summary."""

import atexit
import json
import time
import weakref
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import distributed as torch_distributed

from persia.distributed import lag
from persia.distributed.control_plane import Peers, left_at
from persia.embedding.listed import listed
from persia.runtime import files, flight, job
from persia.runtime.errors import PersiaError, RunLostError, StorageError, UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_logger = get_logger("distributed")

_LISTED = 5
"""The maximum number of names that a message lists."""


class Session(Protocol):
    """An object that trains on the servers, and applies its last pushes when it is closed."""

    def close(self) -> None:
        """Apply all pushes, and end."""


class _Process:
    """The role of this process in its run."""

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self.store: Store | None = None
        self.announced: dict[str, str] = {}
        self.result: dict[str, Any] = {}
        self.started = time.monotonic()
        self.generation = 0
        self.steps = 0
        self.open_step = 0
        self.failed = ""
        self.stopped = ""
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self.at_finish: Callable[[], None] | None = None


_process = _Process()


def adopt(others: Peers, store: "Store", announced: dict[str, str]) -> None:
    """Use ``others`` and ``store`` until the process ends. Ranks stay connected between contexts."""
    _process.peers, _process.store, _process.announced = others, store, announced
    atexit.register(_leave)


def peers() -> Peers | None:
    """Return the other ranks of this process's run; None if the run has only this rank."""
    return _process.peers


def announced() -> dict[str, str]:
    """Return the addresses at which rank 0 serves the other ranks, which it announces; empty on other ranks."""
    return _process.announced


def hold(session: Session) -> None:
    """Register an EmbeddingCollection of this process that trains on the servers; :func:`finish` closes it."""
    _process.sessions.add(session)


def release(session: Session) -> None:
    """Record that the EmbeddingCollection is closed."""
    _process.sessions.discard(session)


def holds_session() -> bool:
    """Whether an EmbeddingCollection of this process trains on the servers."""
    return bool(_process.sessions)


def trained(steps: int, *, generation: int | None = None) -> None:
    """Record the number of steps for the summary.

    A ``generation`` that has just begun also clears the recorded failure.
    """
    _process.steps = steps
    if generation is not None:
        _process.generation = generation
        _process.failed = ""


def opened(step: int) -> None:
    """Record the current step of this process."""
    _process.open_step = step


def _leave(reason: str | None = None) -> None:
    others, _process.peers = _process.peers, None
    if others is not None:
        others.leave(reason)


def fail(reason: str) -> None:
    """Notify the other ranks that this rank cannot continue. The other ranks then end, too.

    The run stays unfinished until it is restarted.
    """
    _process.failed = _process.failed or reason
    _leave(reason)


def reason_of(error: BaseException) -> str:
    """Return the reason why this rank leaves, for the other ranks."""
    if isinstance(error, SystemExit) and error.code not in (ExitCode.AGAIN, ExitCode.INTERRUPTED):
        return left_at(_process.open_step, error.code)
    return f"{type(error).__name__}: {error}".strip().split("\n")[0]


def stop(reason: str) -> None:
    """Record on every rank that the run stops early: :func:`finish` writes no summary, and the run can be resumed.

    Args:
        reason: The reason for stopping.
    """
    _process.stopped = reason


def identity() -> dict[str, Any]:
    """Return the job name and the generation of the run, for its summary."""
    return {"job": job.job_name(), "generation": _process.generation}


def failure() -> str:
    """Return why the run has failed in this process; empty if it has not failed."""
    return _process.failed


def agree(flag: bool) -> bool:
    """Return whether ``flag`` is true on every rank. Every rank must call this, and waits for the other ranks.

    Raises:
        RunLostError: A rank is lost; the message names it.
    """
    others = _process.peers
    return flag if others is None else all(others.all_gather("agree", bool(flag)))


def hung(reason: str) -> None:
    """End all other ranks, because this rank makes no progress. Each rank prints its stacks."""
    if _process.peers is not None:
        _process.peers.hung(reason)


def verdict() -> str:
    """After :func:`hung`: return which rank lags, and where each one is."""
    if _process.peers is not None:
        return _process.peers.verdict()
    return lag.report({settings.rank: lag.Known(flight.position(), 0.0, answers=True)})


def report(result: dict[str, Any]) -> None:
    """Add ``result`` to the run's summary, which rank 0 writes when all ranks have finished.

    Raises:
        UsageError: The result is not a dict, or contains a value that JSON cannot represent.
    """
    if not isinstance(result, dict):
        raise UsageError(
            f"report: found {type(result).__name__}, expected a dict of names and values",
            hint="name the value: report({'loss': loss.item()})",
        )
    try:
        json.dumps(result, allow_nan=False)
    except (TypeError, ValueError) as error:
        wrong = [repr(name) for name, value in result.items() if not _is_json({name: value})]
        raise UsageError(
            f"report: {listed(wrong, _LISTED)}: expected finite numbers, strings, lists and dicts: {error}",
            hint="report item() of a tensor and tolist() of an array; leave out NaN and infinite values",
        ) from error
    _process.result.update(result)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def at_finish(mark: Callable[[], None]) -> None:
    """Call ``mark`` on rank 0 when the run is finished, after its summary is written.

    A later call replaces ``mark``.
    """
    _process.at_finish = mark


def finish() -> None:
    """End the run: when every rank has arrived, rank 0 writes ``summary.json``; then all ranks exit together.

    After :func:`stop` no summary is written: the next start resumes the run.

    The launcher calls this after the script. A run without a summary counts as unfinished. An EmbeddingCollection that
    the script left open is closed first, which applies its pushes.

    Raises:
        PersiaError: The pushes of an EmbeddingCollection cannot be applied.
        RunLostError: A rank is lost, or training in this process has failed, even if the script continued. No summary
            is written.
        StorageError: The summary cannot be written.
        UsageError: The run has other ranks, and the script ended without a ``TrainCtx`` or an EmbeddingCollection.
    """
    if _process.failed:
        raise RunLostError(
            f"the run is not finished, because its training failed: {_process.failed}",
            hint=f"correct the cause, then {RunLostError.hint}",
        )
    for session in list(_process.sessions):
        session.close()
    others = _process.peers
    if others is None and settings.world_size > 1 and settings.nats_url is not None:
        raise UsageError(
            f"the script of rank {settings.rank} of {settings.world_size} ended without a TrainCtx or an "
            "EmbeddingCollection; every rank needs one of them"
        )
    if others is not None:
        others.ended(_process.open_step)
        others.all_gather("finish", None)
    if _process.stopped:
        _logger.info("the run is not finished, because it was stopped: %s", _process.stopped)
    elif settings.rank == 0:
        _write_summary(job.run_dir())
    if others is not None:
        others.all_gather("finished", None)
    if torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()
    _leave()


def _write_summary(folder: Path) -> None:
    """Write the summary file atomically."""
    summary = {
        "status": "finished",
        **identity(),
        "world_size": settings.world_size,
        "steps": _process.steps,
        "seconds": round(time.monotonic() - _process.started, 3),
        "finished_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "result": _process.result,
    }
    path = folder / job.SUMMARY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(summary, indent=1).encode() + b"\n")
    except OSError as error:
        raise StorageError(
            f"cannot write the summary of the run to {path}: {error.strerror}; training itself is complete",
            hint=f"check the owner and the free space of {folder} (PERSIA_RUN_DIR), then restart the trainers, which "
            "write the summary",
        ) from error
    _mark_finished()


def _mark_finished() -> None:
    """Prevent later runs from resuming from the checkpoints of this run.

    Raises:
        StorageError: The run cannot be marked.
    """
    if _process.at_finish is not None:
        try:
            _process.at_finish()
        except PersiaError as error:
            _logger.error(
                "the run is finished, but its checkpoints are not marked as finished: %s; next: create an empty file "
                "or object %s next to them, so that no later run resumes from them",
                error,
                job.FINISHED,
            )
    try:
        job.finish_run()
    except OSError as error:
        raise StorageError(
            f"cannot mark the run in {job.run_dir()} as finished: {error.strerror}; training itself is complete",
            hint=f"before the next run, remove {job.run_dir() / job.RUN}, and create the file {job.FINISHED} in the "
            "folder of the run's checkpoints, so that the next run does not resume from them",
        ) from error
