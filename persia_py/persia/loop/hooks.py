"""The work of a training loop other than steps: hooks, in one ordered list.

A hook is an object with any of the methods below. The loop calls each method on all hooks in order, and ``on_end`` in
reverse order. All ranks have equal lists, which they compare when a loop starts.

* ``on_start(loop)``: a pass begins, before any batch is fed. Every rank calls it, so a hook may use collectives.
* ``before_lookup(fed_batch)``: returns whether a batch is withheld from the engine. It runs in the thread that reads
  ahead.
* ``before_step()``: called between two steps, on every rank, so a hook may use collectives.
* ``vote(fed_batch)``: returns this rank's contribution to the single agreement before each step.
* ``decide(step, votes)``: returns the decision from the votes of all ranks; true skips the step. It must be equal on
  every rank.
* ``after_lookup(step)``: the batch of the step goes to the script.
* ``after_step(step)``: the step is applied to model and rows, or skipped.
* ``after_commit(step)``: a checkpoint of the step is written, and every rank has been notified.
* ``on_error(error, fed_batch)``: an exception leaves the context; ``fed_batch`` is the batch during which it was
  raised, or None.
* ``on_end(complete)``: the pass has ended; ``complete`` means that all ranks reached its end, so that collectives may
  be used.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from persia.backend.base import Backend
from persia.loop.feeder import FedBatch


class Loop(Protocol):
    """The part of a training loop that hooks use."""

    @property
    def step(self) -> int:
        """The last trained step."""

    @property
    def backend(self) -> Backend:
        """The backend, with access to the rows and the other ranks."""

    def committed(self, step: int) -> None:
        """Run ``after_commit`` of all hooks."""


class Hooks:
    """The hooks of a loop, in their order.

    Args:
        hooks: Objects with any of the methods listed in this module, and optionally an ``identity``: a text that is
            equal on all ranks if their hooks are equal.
    """

    def __init__(self, hooks: Sequence[Any] = ()) -> None:
        self._hooks = tuple(hooks)
        self._started: list[Any] = []
        self._before_step = self._having("before_step")
        self._voters = [hook for hook in self._hooks if hasattr(hook, "vote")]
        self._after_lookup = self._having("after_lookup")
        self._after_step = self._having("after_step")

    def _having(self, point: str) -> list[Callable[..., Any]]:
        return [getattr(hook, point) for hook in self._hooks if hasattr(hook, point)]

    @property
    def identity(self) -> str:
        """The names of the hooks, which ranks compare."""
        return ", ".join(getattr(hook, "identity", type(hook).__name__) for hook in self._hooks) or "none"

    @property
    def votes(self) -> bool:
        """Whether a hook takes part in the agreement before each step."""
        return bool(self._voters)

    def start(self, loop: Loop) -> None:
        """Call ``on_start`` of every hook."""
        for hook in self._hooks:
            self._started.append(hook)
            if hasattr(hook, "on_start"):
                hook.on_start(loop)

    def skips_lookup(self, fed_batch: FedBatch) -> bool:
        """Return whether any hook withholds this batch from the engine."""
        return any(before(fed_batch) for before in self._having("before_lookup"))

    def before_step(self) -> None:
        """Call ``before_step`` of every hook."""
        for each in self._before_step:
            each()

    def vote(self, fed_batch: FedBatch | None) -> list[Any]:
        """Return this rank's votes, JSON-serializable, one for each hook that votes."""
        return [hook.vote(fed_batch) for hook in self._voters]

    def decide(self, step: int, ballots: Sequence[Sequence[Any]]) -> bool:
        """Return whether all ranks skip the step.

        Args:
            step: The step.
            ballots: The results of :meth:`vote` on each rank.
        """
        skip = False
        for hook, *votes in zip(self._voters, *ballots, strict=True):
            skip = hook.decide(step, votes) or skip  # no short circuit, because every hook must decide
        return skip

    def after_lookup(self, step: int) -> None:
        """Call ``after_lookup`` of every hook."""
        for each in self._after_lookup:
            each(step)

    def after_step(self, step: int) -> None:
        """Call ``after_step`` of every hook."""
        for each in self._after_step:
            each(step)

    def after_commit(self, step: int) -> None:
        """Call ``after_commit`` of every hook."""
        for each in self._having("after_commit"):
            each(step)

    def error(self, error: Exception, fed_batch: FedBatch | None) -> None:
        """Call ``on_error`` of every hook."""
        for each in self._having("on_error"):
            each(error, fed_batch)

    def end(self, *, complete: bool) -> None:
        """Call ``on_end`` in reverse order. All hooks are called, even if one fails; the first error is raised."""
        failed: BaseException | None = None
        while self._started:
            hook = self._started.pop()
            try:
                if hasattr(hook, "on_end"):
                    hook.on_end(complete and failed is None)
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed
