"""The state of a training run in a checkpoint, apart from rows: model, optimizers, random state, data position."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from persia.backend.base import Backend
from persia.checkpoint import rng_state, snapshot
from persia.distributed.sharded import ShardedModel
from persia.distributed.wrapped import (
    averaging_state,
    load_averaging,
    load_dense,
    optimizer_state,
    unwrap_model,
    whole_model,
)
from persia.embedding import inputs
from persia.embedding.optim import Optimizer
from persia.runtime import flight
from persia.runtime.logging import get_logger
from persia.runtime.places import Place
from persia.runtime.settings import settings
from persia.runtime.stateful import Stateful

_logger = get_logger("checkpoint")

LOSS_SCALE = "loss_scale.pt"
"""The file of a checkpoint that holds the loss scale."""
PASSES = "passes"
"""The key, in a rank's state, of the number of completed passes over the data."""
PASSED = "passed"
"""The key, in a rank's state, of the record of trained batches."""
AVERAGING = "averaging"
"""The key, in a rank's state, of the state of gradient averaging (PowerSGD)."""


class UserState(Protocol):
    """The ``state`` of :class:`persia.ctx.Checkpoints`, which a script adds to each checkpoint."""

    saved: int

    def state_in(self, loaded: snapshot.Load) -> dict[str, Any] | None:
        """Return the checked state from a checkpoint; None if it has none."""

    def resume(self, step: int, state: dict[str, Any] | None) -> None:
        """Restore the state from a checkpoint of ``step``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""


class RunState:
    """The state of a training run on this rank.

    Args:
        backend: The access to the rows and to the other ranks.
        model: Returns the model; None if the context has none.
        dense_optimizer: Returns the optimizer of the model.
        embedding_optimizer: The optimizer of rows, until another optimizer is applied.
        loss_scale: The loss scale; None without mixed precision.
        user: The state that the script adds.

    Attributes:
        passes: The number of completed passes over the data; None if the run was resumed from a checkpoint of an older
            version.
        passes_loaded: The number of completed passes in the loaded checkpoint.
    """

    def __init__(
        self,
        backend: Backend,
        model: Callable[[], torch.nn.Module | None],
        dense_optimizer: Callable[[], torch.optim.Optimizer],
        embedding_optimizer: Optimizer,
        loss_scale: Stateful | None,
        user: UserState | None,
    ) -> None:
        self.backend = backend
        self._model = model
        self._dense_optimizer = dense_optimizer
        self._embedding_optimizer = embedding_optimizer
        self._loss_scale = loss_scale
        self._user = user
        self.passes: int | None = 0
        self.passes_loaded: int | None = 0
        # The position at the end of the last pass.
        self._end: tuple[dict[str, Any] | None, dict[str, Any] | None, int | None] | None = None
        self._cursor: dict[str, Any] | None = None
        self._replay_digests: dict[str, Any] | None = None
        self._loaded = False  # whether no loop has taken the loaded position and digests yet
        self._ranks: dict[str, dict[str, Any]] = {}  # the states of all ranks, in the form of a checkpoint

    @property
    def optimizer(self) -> Optimizer:
        """The current embedding optimizer, which is the last optimizer that was applied."""
        return self.backend.row_settings.optimizer or self._embedding_optimizer

    def record(self, cursor: dict[str, Any] | None, replay_digests: dict[str, Any] | None) -> None:
        """Record the position after the last trained batch, and the record of the batches before it."""
        self._end = None
        self._cursor, self._replay_digests = cursor, replay_digests

    def pass_ended(self, cursor: dict[str, Any] | None, replay_digests: dict[str, Any] | None) -> None:
        """Record that a pass is complete, and the position at which the next one starts."""
        end = (self._cursor, self._replay_digests, self.passes)
        self.record(cursor, replay_digests)
        self._end = end
        if self.passes is not None:
            self.passes += 1

    @contextlib.contextmanager
    def at_end_of_pass(self) -> Iterator[None]:
        """Let checkpoints in the block, which runs between two loops, save the end of the last loop as their position.

        A script that resumes from such a checkpoint repeats the code after the loop, and trains as many steps as
        without an interruption.
        """
        if self._end is None:
            yield
            return
        now = (self._cursor, self._replay_digests, self.passes)
        self._cursor, self._replay_digests, self.passes = self._end
        try:
            yield
        finally:
            self._cursor, self._replay_digests, self.passes = now

    def take_position(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Take the position and the digests of a loaded checkpoint.

        Both are None if no checkpoint was loaded since the last call.
        """
        loaded, self._loaded = self._loaded, False
        return (self._cursor, self._replay_digests) if loaded else (None, None)

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank for a checkpoint: random generators, record of trained data, and PowerSGD."""
        return {
            **rng_state.random_state(self.optimizer),
            PASSED: self._replay_digests,
            PASSES: self.passes,
            AVERAGING: averaging_state(self._model()),
        }

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only a shard of the model."""
        return isinstance(self._model(), ShardedModel)

    def gather_model(self) -> None:
        """Gather weights and optimizer state if they are sharded over the ranks. Collective: every rank must call it.

        The states of the other ranks may be out of date, because they receive a loaded checkpoint only when the next
        loop starts. Only rank 0's state is used.
        """
        model = self._model()
        if not isinstance(model, ShardedModel) or self.backend.all_gather("shards", model.is_gathered)[0]:
            return
        with self.backend.collective(), flight.Call(flight.COLLECTIVE, detail="shards of the model"):
            model.gather(self._dense_optimizer())

    def begin_save(
        self,
        directory: Place,
        more: dict[str, dict[str, Any]],
        dense: str = "dense.pt",
        optimizer: str = "opt.pt",
        jit: str | None = None,
    ) -> snapshot.Save:
        """Return a save of the current run into ``directory``, on rank 0. ``more`` has further states by file name."""
        self.backend.join_checkpoint_thread()
        model = self._model()
        save = snapshot.Save(self.backend.engine, directory, self.backend.trained_step, self._cursor)
        with save.kept():
            names = self.backend.inputs.of(model)
            if model is not None:
                save.add_state(dense, inputs.annotate(whole_model(model).state_dict(), names))
                if jit is not None:
                    save.add_module(jit, unwrap_model(model))
            save.add_state(optimizer, optimizer_state(model, self._dense_optimizer()))
            if self._loss_scale is not None:
                save.add_state(LOSS_SCALE, self._loss_scale.state_dict())
            for name, state in {rng_state.rank_state(0): self.rank_state(), **more}.items():
                save.add_state(name, state)
            if names is not None:
                save.add_state(inputs.FILE, names.state())
        return save

    def restore(
        self,
        loaded: snapshot.Load,
        map_location: str | torch.device | None = None,
        dense_name: str = "dense.pt",
        optimizer_name: str = "opt.pt",
    ) -> None:
        """Continue the run of a verified checkpoint, on rank 0. If the checkpoint does not fit, nothing changes.

        Raises:
            CheckpointError: The checkpoint does not fit.
        """
        if loaded.imported:
            self._restore_imported(loaded)
            return
        model = self._model()
        dense = None if model is None else loaded.state(dense_name, map_location)
        optimizer = loaded.state(optimizer_name, map_location)
        ranks = {name: loaded.state(name) for name in loaded.names if rng_state.is_rank_state(name)}
        rank = loaded.state(rng_state.rank_state(0))
        user = None if self._user is None else self._user.state_in(loaded)
        scale = loaded.state(LOSS_SCALE) if LOSS_SCALE in loaded.names else None
        if model is not None and dense is not None:
            dense = snapshot.check_module(unwrap_model(model), dense, loaded.path)
        snapshot.check_optimizer(self._dense_optimizer(), optimizer, loaded.path)
        names = saved_inputs(loaded)
        rng_state.check_random_state(rank, self.optimizer, loaded.path / rng_state.rank_state(0))
        restore_rows(self.backend, loaded)
        load_dense(model, self._dense_optimizer(), dense, optimizer)
        self.backend.inputs.set(model, names)
        self._load_scale(scale)
        rng_state.restore_random_state(rank, self.optimizer)
        load_averaging(model, _averaging_in(ranks, settings.rank))
        _warn_of_missing(model, ranks)
        self._ranks = ranks
        self._set_loaded(loaded.cursor, rank.get(PASSED), rank.get(PASSES))
        if self._user is not None:
            self._user.resume(loaded.step, user)

    def _restore_imported(self, loaded: snapshot.Load) -> None:
        """Start from imported rows. The model and other objects keep the state that the script gave them."""
        restore_rows(self.backend, loaded)
        self._set_loaded(None, None, 0)
        if self._user is not None:
            self._user.resume(loaded.step, None)
        _logger.info("%s: rows loaded; the checkpoint has no model, so the model keeps its weights", loaded.path)

    def share_loaded(self) -> None:
        """Send the state that rank 0 loaded, at the start of a loop. Collective: every rank must call it."""
        model = self._model()
        module = None if model is None else unwrap_model(model)
        names = self.backend.inputs.of(model)
        state = self.backend.broadcast(
            lambda: {
                "dense": None if module is None else module.state_dict(),
                "optimizer": optimizer_state(model, self._dense_optimizer()),
                "loss_scale": None if self._loss_scale is None else self._loss_scale.state_dict(),
                "embedding_lr": self.optimizer.lr,
                # The position of a running loop belongs to this rank only.
                "cursor": self._cursor if self._loaded else None,
                "passes": [self.passes, self.passes_loaded],
                "more": None if self._user is None else self._user.state_dict(),
                "saved": 0 if self._user is None else self._user.saved,
                "random": self._ranks,
                "inputs": None if names is None else names.state(),
            }
        )
        self._ranks = {}  # the state is now shared, and a later generation of this context must not restore it again
        if state is None:
            return
        load_dense(model, self._dense_optimizer(), state["dense"], state["optimizer"])
        if state["inputs"] is not None:
            self.backend.inputs.set(model, inputs.InputNames.from_state(state["inputs"]))
        self._load_scale(state["loss_scale"])
        self.optimizer.update_lr(state["embedding_lr"])
        if self._user is not None and state["more"] is not None:
            self._user.resume(state["saved"], state["more"])
        random = state["random"].get(rng_state.rank_state(settings.rank))
        self._set_loaded(state["cursor"], None if random is None else random.get(PASSED), None)
        self.passes, self.passes_loaded = state["passes"]
        if state["random"]:  # empty if rank 0 has loaded only rows; averaging then continues
            load_averaging(model, _averaging_in(state["random"], settings.rank))
        if random is not None:
            rng_state.restore_random_state(random, self.optimizer)

    def _set_loaded(
        self, cursor: dict[str, Any] | None, replay_digests: dict[str, Any] | None, passes: int | None
    ) -> None:
        self._end = None
        self.passes = self.passes_loaded = passes
        self._cursor, self._replay_digests, self._loaded = cursor, replay_digests, True

    def _load_scale(self, state: dict[str, Any] | None) -> None:
        if self._loss_scale is not None and state is not None:
            self._loss_scale.load_state_dict(state)


def _averaging_in(ranks: dict[str, dict[str, Any]], mine: int) -> dict[str, Any] | None:
    """Return the state of this rank's gradient averaging; None unless the states of all ranks exist.

    A checkpoint of ``dump_checkpoint`` has the state of rank 0 only. If only this rank used its state, the ranks would
    send different data.
    """
    states = [ranks.get(rng_state.rank_state(rank), {}).get(AVERAGING) for rank in range(settings.world_size)]
    return None if any(state is None for state in states) else states[mine]


def _warn_of_missing(model: torch.nn.Module | None, ranks: dict[str, dict[str, Any]]) -> None:
    """Warn that the state of gradient averaging is discarded if a checkpoint has the states of some ranks only."""
    names = [rng_state.rank_state(rank) for rank in range(settings.world_size)]
    found = [name for name in names if ranks.get(name, {}).get(AVERAGING) is not None]
    if averaging_state(model) is not None and 0 < len(found) < len(names):
        text = "PowerSGD starts without a state: the checkpoint has the states of %d of %d ranks"
        _logger.warning(text, len(found), len(names))


def saved_inputs(loaded: snapshot.Load) -> inputs.InputNames | None:
    """Return the names of the model's inputs in a checkpoint; None if it has none, as one of an older version."""
    return inputs.InputNames.from_state(loaded.state(inputs.FILE)) if inputs.FILE in loaded.names else None


def restore_rows(backend: Backend, loaded: snapshot.Load) -> None:
    """Replace the rows by those of a checkpoint, and begin a generation after it."""
    backend.finish_checkpoint()
    backend.drain_all_ranks()  # otherwise later pushes of another rank would be applied to the restored rows
    loaded.restore(backend.engine)
    backend.begin(resume=(loaded.generation, loaded.step, loaded.seed))
