"""The interface to the rows. Nested contexts share one backend."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from persia.backend.inputs import ModelInputs
from persia.embedding.config import Configuration, EmbeddingConfig, get_default_embedding_config
from persia.embedding.optim import Optimizer
from persia.runtime import flight, watchdog
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.places import Place, Url, below, check_scheme
from persia.runtime.settings import settings
from persia_core.data import Batch
from persia_core.engine import Engine
from persia_core.forward import Pipeline, TrainingBatch

_logger = get_logger("ctx")


@dataclass(frozen=True)
class RowSettings:
    """How rows are initialized and updated.

    Attributes:
        optimizer: The optimizer of rows; None for evaluation only.
        config: The initializer, the admission rule and the weight bound.
    """

    optimizer: Optimizer | None
    config: EmbeddingConfig


@dataclass(frozen=True)
class Device:
    """A CUDA device, and the dtype of the embedding tensors on it.

    Attributes:
        number: The device number of CUDA.
        dtype: The dtype of the embedding tensors: float32, float16 or bfloat16.
    """

    number: int
    dtype: torch.dtype = torch.float32

    def serve(self, engine: Engine) -> None:
        """Let ``engine`` pool its look-ups on this device.

        Raises:
            DeviceError: This build does not support devices, or this machine does not have the device.
            UsageError: The dtype is not supported.
        """
        names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
        if self.dtype not in names:
            raise UsageError(
                f"dtype {self.dtype} of embedding tensors: expected torch.float32, torch.float16 or torch.bfloat16"
            )
        engine.use_device(self.number, names[self.dtype])


@dataclass(frozen=True)
class NonFiniteTensor:
    """The first tensor of a step that has NaN or infinity.

    Attributes:
        text: The name of the tensor and the position of the value.
        averaged: Whether it was averaged over all ranks; if so, another rank may be the cause.
        is_gradient: Whether it is a gradient, which a smaller loss scale may make finite.
        derived: Whether it was computed from checked tensors, one of which may be on another rank.
    """

    text: str
    averaged: bool = False
    is_gradient: bool = False
    derived: bool = False


class BackgroundSave(Protocol):
    """A checkpoint that a background thread writes.

    Attributes:
        what: The name of the checkpoint in messages.
        error: The error of a failed write, which was logged; None otherwise.
    """

    what: str
    error: BaseException | None

    def wait(self, seconds: float = ...) -> bool:
        """Wait at most this many seconds, and return whether the write has ended."""


class Backend(ABC):
    """One engine, shared by all nested contexts. A subclass implements embedded mode or servers.

    Attributes:
        engine: The engine that looks up and pushes rows.
        configuration: Slots and general settings. None reads the files that :meth:`Configuration.find` finds.
        row_settings: The row settings at the start of the generation.
        device: The device on which look-ups are pooled; None means the CPU.
        trained_step: The last step whose gradients were pushed, or that was skipped.
        feed: The feed that a :class:`persia.data.StreamingDataset` reads. In the embedded mode, it is None until a data
            set is opened. With servers, it is None if this process takes no batches.
        activity: The number of loops and look-ups for evaluation that have started.
        closed: Whether the outermost context has ended.
        gradient_scale: The factor by which every summed embedding gradient is multiplied.
        inputs: The parts of a batch that each model gets.
    """

    engine: Engine
    gradient_scale = 1.0

    def __init__(self, configuration: Configuration | None = None, device: Device | None = None) -> None:
        self.configuration = configuration or Configuration.find()
        self.row_settings = RowSettings(None, get_default_embedding_config())
        self.device = device
        self.inputs = ModelInputs()
        self.trained_step = 0
        self.checkpoint_thread: BackgroundSave | None = None
        self.activity = 0
        self.closed = False
        self._unwritten: BaseException | None = None
        self.feed: Any = None
        self._seed: int | None = None

    def begin(
        self,
        *,
        optimizer: Optimizer | None = None,
        config: EmbeddingConfig | None = None,
        resume: tuple[int, int, int | None] | None = None,
    ) -> None:
        """Start a new generation of the run.

        Args:
            optimizer: The optimizer of rows; None keeps the current one.
            config: The settings of new rows; None keeps the current ones.
            resume: Generation, step and seed of the checkpoint whose rows were just loaded; imported rows have no seed.

        Raises:
            UsageError: The method is called inside a loop over a data loader, or the existing rows do not fit the
                optimizer. Nothing is changed.
        """
        self.apply(RowSettings(optimizer or self.row_settings.optimizer, config or self.row_settings.config), resume)

    def apply(self, rows: RowSettings, resume: tuple[int, int, int | None] | None = None) -> None:
        """Start a new generation, like :meth:`begin`, with exactly these settings.

        A checkpoint in progress is completed first.
        """
        if rows.optimizer is not None:
            self.configuration.check_trains()
        self.join_checkpoint_thread()  # a new generation ends saves of an earlier one
        after_generation, step, seed = resume or (0, self.trained_step, self._seed)
        seed = torch.initial_seed() % 2**64 if seed is None else seed
        self._begin(rows, after_generation, step, seed)
        self.row_settings, self._seed, self.trained_step = rows, seed, step

    @abstractmethod
    def _begin(self, rows: RowSettings, after_generation: int, step: int, seed: int) -> None:
        """Begin a generation in the store or on the servers."""

    def _begin_rows(
        self, rows: RowSettings, after_generation: int, step: int, seed: int, *, fresh: bool = False
    ) -> int:
        return self.engine.begin(
            seed=seed,
            optimizer=None if rows.optimizer is None else rows.optimizer.spec,
            initializer=rows.config.initializer,
            admit_probability=rows.config.admit_probability,
            admit_min_count=rows.config.admit_min_count,
            weight_bound=rows.config.weight_bound,
            after_generation=after_generation,
            step=step,
            fresh=fresh,
        )

    def drain_all_ranks(self) -> None:
        """Wait until no rank can push. Rank 0 waits for all ranks; the other ranks return immediately.

        Raises:
            UsageError: This rank is in a training loop.
        """
        if self.engine.iterating:
            raise UsageError("a data loader is being iterated for training: leave its loop first")

    def drain_all_ranks_between_loops(self) -> None:
        """On rank 0, wait until all pushes of the last training loop are applied.

        On the other ranks, and inside a loop, it returns immediately.

        Raises:
            UnreachableError: A rank has not left its loop in time; the message names it.
        """
        if not self.engine.iterating:
            self.drain_all_ranks()

    def join_checkpoint_thread(self) -> None:
        """Wait until no checkpoint is being written in the background; do not raise the error of a failed one."""
        if self.checkpoint_thread is not None:
            with watchdog.waiting(), flight.Call(flight.CHECKPOINT, detail=self.checkpoint_thread.what):
                self.checkpoint_thread.wait()
            self._unwritten = self._unwritten or self.checkpoint_thread.error
            self.checkpoint_thread = None

    def finish_checkpoint(self) -> None:
        """Wait until no checkpoint is being written in the background.

        Raises:
            PersiaError: A checkpoint could not be written, and this was not reported yet.
        """
        self.join_checkpoint_thread()
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            raise unwritten

    def finish_checkpoint_within(self, seconds: float) -> None:
        """Wait up to this many seconds for a checkpoint in progress, after an error; log the outcome."""
        saving, self.checkpoint_thread = self.checkpoint_thread, None
        if saving is None or saving.wait(0.0):
            return
        _logger.warning("waiting up to %g s for %s, which is not complete", seconds, saving.what)
        if not saving.wait(seconds):
            _logger.error("%s is abandoned after %g s, because the context ends with an error", saving.what, seconds)
        elif saving.error is None:
            _logger.info("%s is complete", saving.what)

    def all_gather(self, what: str, mine: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank.

        Every rank calls this method, and blocks until all ranks have called it. ``mine`` is JSON-serializable; ``what``
        names the call in errors.
        """
        del what
        return [mine]

    def all_gather_at_exit(self, mine: Any, timeout_s: float) -> list[Any]:
        """Return the values of all ranks before the run ends.

        A rank that waits in another all-gather receives SystemExit there, and then calls this method.

        Raises:
            UnreachableError: A rank does not arrive in time.
        """
        del timeout_s
        return [mine]

    def gather(self, mine: Any) -> list[Any] | None:
        """Return the values of all ranks, by rank, on rank 0; None elsewhere. Collective: every rank must call it."""
        return [mine]

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the block on every rank, with a barrier at its end.

        If the block fails on one rank, every rank raises an error.
        """
        del what
        yield

    @abstractmethod
    def open_loop(self, staleness: int, reproducible: bool, buffer: int, *, hooks: str = "") -> Pipeline:
        """Start a training loop, in a new generation. Every rank calls this, with the same arguments.

        Args:
            staleness: K: a look-up may miss up to K - 1 updates.
            reproducible: Whether runs with equal inputs give bit-identical results.
            buffer: The number of batches that may wait for their look-up.
            hooks: The identities of the loop's hooks, which ranks compare.
        """

    def broadcast(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Broadcast ``state`` if rank 0 has loaded a checkpoint since the last call.

        Return the state on the other ranks, and None on rank 0 or if there is no such state. Every rank calls this once
        after :meth:`open_loop`.
        """
        del state
        return None

    def close_loop(self, pipeline: Pipeline, *, together: bool) -> None:
        """End a training loop, complete or not. ``together`` means that all ranks end it in agreement."""
        del together
        pipeline.close()

    def lookup(self, batch: Batch, device_id: int | None = None) -> TrainingBatch:
        """Look up a batch for evaluation, on the context's device or another device. No row is changed."""
        self.activity += 1
        return self.engine.lookup(batch, device_id)

    def first_nonfinite(self, mine: NonFiniteTensor | None) -> NonFiniteTensor | None:
        """Return the first tensor that has NaN or infinity on any rank. Collective: every rank must call it."""
        return mine

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module that training runs."""
        return model

    @contextlib.contextmanager
    def quiesce(self) -> Iterator[None]:
        """Pause this rank. Its pushes are applied before the block, and no look-up starts inside the block."""
        self.engine.pause()
        try:
            yield
        finally:
            self.engine.resume()

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Enclose a collective of torch. If it fails, the error names the lost rank."""
        yield

    def backward(self, loss: torch.Tensor, step: int) -> contextlib.AbstractContextManager[Any]:
        """Enclose the backward pass of ``loss``. Ranks average their dense gradients at its end."""
        del loss
        return flight.Call(flight.BACKWARD, step)

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank."""
        return True

    @property
    def is_rank_0(self) -> bool:
        """Whether this process writes and loads checkpoints. Of several ranks, only rank 0 does."""
        return True

    def check_alone(self, what: str) -> None:
        """Check that ``what``, which drops all rows, does not affect a training run of another process."""
        del what

    def check_loads(self, what: str) -> None:
        """Check that this process may do ``what``, which replaces the rows by a checkpoint's."""
        del what

    def checkpoint_dir(self, directory: str | os.PathLike[str]) -> Place:
        """Return the directory or the URL of a checkpoint; a relative path is below ``PERSIA_CKPT_DIR``, if set.

        Raises:
            UsageError: The URL is not that of an object store to which checkpoints can be written.
        """
        where = below(settings.checkpoint_root, directory)
        if isinstance(where, Url):
            check_scheme(where)
        return where

    def wait_ready(self) -> None:
        """Wait until the store is open, or the servers respond."""
        del self.engine.stats()["rows"]

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """End the engine's threads; ``error`` is the exception that left the outermost context, if any."""
