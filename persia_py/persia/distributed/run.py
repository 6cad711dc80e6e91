"""The run of this process: its other ranks, its progress, and its common end and summary."""

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
from persia.runtime import files, flight, job
from persia.runtime.errors import PersiaError, RunLostError, StorageError, UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_logger = get_logger("distributed")


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
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self.at_finish: Callable[[], None] | None = None


_process = _Process()


def adopt(others: Peers, store: "Store", announced: dict[str, str]) -> None:
    """Use ``others`` and ``store`` until the process ends; ranks stay connected between contexts."""
    _process.peers, _process.store, _process.announced = others, store, announced
    atexit.register(_leave)


def peers() -> Peers | None:
    """Return the other ranks of this process's run; None if there are none."""
    return _process.peers


def announced() -> dict[str, str]:
    """Return the address at which this process serves the other ranks."""
    return _process.announced


def hold(session: Session) -> None:
    """Register an EmbeddingCollection of this process that trains on the servers; :func:`finish` closes it."""
    _process.sessions.add(session)


def release(session: Session) -> None:
    """Record that it is closed."""
    _process.sessions.discard(session)


def holds_session() -> bool:
    """Whether an EmbeddingCollection of this process trains on the servers."""
    return bool(_process.sessions)


def trained(steps: int, *, generation: int | None = None) -> None:
    """Record the number of steps for the summary. A ``generation`` that has just begun also clears the failure."""
    _process.steps = steps
    if generation is not None:
        _process.generation = generation
        _process.failed = ""


def opened(step: int) -> None:
    """Record the step that this process is at."""
    _process.open_step = step


def _leave(reason: str | None = None) -> None:
    others, _process.peers = _process.peers, None
    if others is not None:
        others.leave(reason)


def fail(reason: str) -> None:
    """Report to the other ranks that this one cannot continue; they end too. The run is unfinished until a restart."""
    _process.failed = _process.failed or reason
    _leave(reason)


def reason_of(error: BaseException) -> str:
    """Return why this rank leaves, for the others."""
    if isinstance(error, SystemExit) and error.code not in (ExitCode.AGAIN, ExitCode.INTERRUPTED):
        return left_at(_process.open_step, error.code)
    return f"{type(error).__name__}: {error}".strip().split("\n")[0]


def failure() -> str:
    """Return why the run has failed in this process; empty if it has not."""
    return _process.failed


def agree(flag: bool) -> bool:
    """Return whether ``flag`` is true on every rank; every rank must call this, and waits for the others.

    Raises:
        RunLostError: A rank is lost; the message names it.
    """
    others = _process.peers
    return flag if others is None else all(others.all_gather("agree", bool(flag)))


def hung(reason: str) -> None:
    """End all other ranks, each with its stacks printed, because this one makes no progress."""
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
        UsageError: It contains a value that JSON cannot represent.
    """
    try:
        json.dumps(result, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"report({result!r}): want numbers, strings, lists and dicts: {error}") from error
    _process.result.update(result)


def at_finish(mark: Callable[[], None]) -> None:
    """Call ``mark`` when the run is finished, on rank 0, after its summary is written. The last one counts."""
    _process.at_finish = mark


def finish() -> None:
    """End the run: once every rank has arrived, rank 0 writes ``summary.json``; then all ranks exit together.

    The launcher calls this after the script. A run whose summary is not written did not finish. An EmbeddingCollection
    that the script left open is closed first, so that its pushes are applied.

    Raises:
        PersiaError: The pushes of an EmbeddingCollection cannot be applied.
        RunLostError: A rank is lost, or training in this process has failed, even if the script continued. No summary
            is written.
        StorageError: The summary cannot be written.
        UsageError: There are other ranks, and the script ended without a ``TrainCtx`` or an EmbeddingCollection.
    """
    if _process.failed:
        raise RunLostError(f"the run is not finished, its training failed: {_process.failed}")
    for session in list(_process.sessions):
        session.close()
    others = _process.peers
    if others is None and settings.world_size > 1 and settings.nats_url is not None:
        raise UsageError(
            f"the script of rank {settings.rank} of {settings.world_size} ended without a TrainCtx or an "
            "EmbeddingCollection; each needs one"
        )
    if others is not None:
        others.ended(_process.open_step)
        others.all_gather("finish", None)
    if settings.rank == 0:
        _write_summary(job.run_dir())
    if others is not None:
        others.all_gather("finished", None)
    if torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()
    _leave()


def _write_summary(folder: Path) -> None:
    """Write the file atomically."""
    summary = {
        "status": "finished",
        "job": job.job_name(),
        "generation": _process.generation,
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
        _mark_finished()
    except OSError as error:
        failed = StorageError(
            f"PERSIA_RUN_DIR: {path}: {error.strerror}; training is complete, but the run's summary cannot be written"
        )
        failed.hint = (
            "make it a folder that can be written, with free space; then start the trainers again, which writes the "
            "summary"
        )
        raise failed from error


def _mark_finished() -> None:
    """Prevent later runs from resuming from the checkpoints of this one."""
    if _process.at_finish is not None:
        try:
            _process.at_finish()
        except PersiaError as error:
            _logger.error("the run is finished, but its replicas are not marked as finished: %s", error)
    job.finish_run()
