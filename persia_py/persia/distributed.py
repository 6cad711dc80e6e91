"""Several trainer ranks: their dense parallelism, their agreement, and the end they reach together."""

import atexit
import json
import os
import time
import weakref
from abc import ABC, abstractmethod
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as torch_distributed

from persia import env, job
from persia.errors import ConfigError, RunLostError, UsageError
from persia.logger import get_logger
from persia.peers import Peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from persia.embedding.session import Session

_logger = get_logger("distributed")

_COLLECTIVE = timedelta(days=1)
"""How long torch waits for a rank, which may be evaluating; :class:`Peers` knows sooner who is dead or silent."""


class DistributedBaseOption(ABC):
    """How the dense part of a model is trained by several ranks.

    A subclass starts a process group and wraps the model. Rank 0's address is found through discovery; no option names
    it.
    """

    @abstractmethod
    def initialize(self, store: "Store", rank: int, world_size: int, device_id: int | None) -> None:
        """Start the process group; ``store`` is rank 0's, and every rank calls this."""

    @abstractmethod
    def wrap(self, model: torch.nn.Module, device_id: int | None) -> torch.nn.Module:
        """Return the module whose gradients are averaged over all ranks; every rank calls this."""


class DDPOption(DistributedBaseOption):
    """Torch's DistributedDataParallel.

    Args:
        initialization_method: ``tcp``; PersiaML's ``file`` is not needed, because rank 0 is found through discovery.
        backend: ``nccl`` with GPUs, ``gloo`` without.
        **options: For :class:`torch.nn.parallel.DistributedDataParallel`; ``master_addr``, ``master_port`` and
            ``init_file`` of PersiaML are accepted and have no effect.

    Raises:
        UsageError: Another initialization method or backend.
    """

    def __init__(self, initialization_method: str = "tcp", backend: str = "nccl", **options: Any) -> None:
        if initialization_method != "tcp":
            raise UsageError(f"DDPOption(initialization_method={initialization_method!r}): want 'tcp'")
        if backend not in {"nccl", "gloo"}:
            raise UsageError(f"DDPOption(backend={backend!r}): want 'nccl' or 'gloo'")
        ignored = [name for name in ("master_addr", "master_port", "init_file") if options.pop(name, None) is not None]
        if ignored:
            _logger.warning("DDPOption: %s has no effect, rank 0 is found through discovery", ", ".join(ignored))
        self.backend = backend
        self.options = options

    def initialize(self, store: "Store", rank: int, world_size: int, device_id: int | None) -> None:
        """Start the process group."""
        if self.backend == "nccl" and device_id is None:
            raise UsageError("DDPOption(backend='nccl') needs TrainCtx(device_id=...); without GPUs use backend='gloo'")
        torch_distributed.init_process_group(
            self.backend, store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE
        )

    def wrap(self, model: torch.nn.Module, device_id: int | None) -> torch.nn.Module:
        """Return the model in DistributedDataParallel."""
        devices = None if device_id is None else [device_id]
        try:
            return torch.nn.parallel.DistributedDataParallel(model, device_ids=devices, **self.options)
        except TypeError as error:
            raise UsageError(f"DDPOption: {error}") from error


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """Return DDP over nccl with a device, over gloo without."""
    return DDPOption(backend="gloo" if device_id is None else "nccl")


class _Process:
    """What this process has done for its run."""

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self.store: Store | None = None
        self.announced: dict[str, str] = {}
        self.result: dict[str, Any] = {}
        self.started = time.monotonic()
        self.generation = 0
        self.steps = 0
        self.failed = ""
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()


_process = _Process()


def adopt(others: Peers, store: "Store", announced: dict[str, str]) -> None:
    """Use ``others`` and ``store`` until the process ends; ranks stay in touch between contexts."""
    _process.peers, _process.store, _process.announced = others, store, announced
    atexit.register(_leave)


def peers() -> Peers | None:
    """Return the other ranks of this process's run; None while there are none."""
    return _process.peers


def announced() -> dict[str, str]:
    """Return where this process serves the other ranks."""
    return _process.announced


def hold(session: "Session") -> None:
    """Note that an EmbeddingCollection of this process trains on the servers; :func:`finish` closes it."""
    _process.sessions.add(session)


def release(session: "Session") -> None:
    """Note that it is closed."""
    _process.sessions.discard(session)


def holds_session() -> bool:
    """Whether an EmbeddingCollection of this process trains on the servers."""
    return bool(_process.sessions)


def trained(steps: int, *, generation: int | None = None) -> None:
    """Note how far the run is, for its summary; with an ``generation``, that one has just begun."""
    _process.steps = steps
    if generation is not None:
        _process.generation = generation
        _process.failed = ""


def _leave(reason: str | None = None) -> None:
    others, _process.peers = _process.peers, None
    if others is not None:
        others.leave(reason)


def fail(reason: str) -> None:
    """Tell the other ranks that this one cannot go on; they end too. The run is not finished unless it begins again."""
    _process.failed = _process.failed or reason
    _leave(reason)


def failure() -> str:
    """Return why the run has failed here; empty while it has not."""
    return _process.failed


def agree(flag: bool) -> bool:
    """Return whether ``flag`` is true on every rank; every rank calls this, and waits for the others.

    Raises:
        RunLostError: A rank is gone; it is named.
    """
    others = _process.peers
    return flag if others is None else all(others.share("agree", bool(flag)))


def hung(reason: str) -> None:
    """Let all other ranks end with their stacks shown, because this one makes no progress."""
    if _process.peers is not None:
        _process.peers.hung(reason)


def report(result: dict[str, Any]) -> None:
    """Add ``result`` to the run's summary, which rank 0 writes when all ranks have finished.

    Raises:
        UsageError: It holds something that JSON does not have.
    """
    try:
        json.dumps(result, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"report({result!r}): want numbers, strings, lists and dicts: {error}") from error
    _process.result.update(result)


def finish() -> None:
    """End the run: once every rank is here, rank 0 writes ``summary.json``; then all leave together.

    The launcher calls this after the script. A run whose summary is not written did not finish. An EmbeddingCollection
    that the script left open is closed first, so that what it has pushed is applied.

    Raises:
        PersiaError: What an EmbeddingCollection pushed cannot be applied.
        RunLostError: A rank is gone, or training in this process has failed, even if the script went on; no summary is
            written then.
        UsageError: The script ended without a ``TrainCtx`` or an EmbeddingCollection, and there are other ranks.
    """
    if _process.failed:
        raise RunLostError(f"the run is not finished, its training failed: {_process.failed}")
    for session in list(_process.sessions):
        session.close()
    others = _process.peers
    if others is None and env.get_world_size() > 1 and env.nats_url() is not None:
        raise UsageError(
            f"the script of rank {env.get_rank()} of {env.get_world_size()} ended without a TrainCtx or an "
            "EmbeddingCollection; each needs one"
        )
    if others is not None:
        others.share("finish", None)
    if env.get_rank() == 0:
        _write_summary(job.run_dir())
    if others is not None:
        others.share("finished", None)
    if torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()
    _leave()


def _write_summary(folder: Path) -> None:
    """Write it whole or not at all."""
    summary = {
        "status": "finished",
        "job": job.job_name(),
        "generation": _process.generation,
        "world_size": env.get_world_size(),
        "steps": _process.steps,
        "seconds": round(time.monotonic() - _process.started, 3),
        "finished_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "result": _process.result,
    }
    path = folder / job.SUMMARY
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(summary, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        (folder / job.RUN).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"PERSIA_RUN_DIR: {path}: {error.strerror}; the run's summary cannot be written") from error
