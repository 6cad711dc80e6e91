"""The work of a training loop apart from steps: hooks, in one ordered list.

A hook is an object with any of the methods below. The loop calls each point on the hooks in their order, and the ends
in reverse order. All ranks have equal lists, which they compare when a loop starts.

* ``on_start(loop)``: a pass begins; nothing is fed yet. Every rank is here, so that a hook may use collectives.
* ``before_lookup(fed_batch)``: whether a batch is withheld from the engine. It runs in the thread that reads ahead.
* ``before_step()``: between two steps, on every rank; collectives as above.
* ``vote(fed_batch)``: this rank's part of the one agreement before each step.
* ``decide(step, votes)``: the decision from the votes of all ranks; true skips the step. It is equal on every rank.
* ``after_lookup(step)``: the batch of the step goes to the script.
* ``after_step(step)``: the step is applied to model and rows, or skipped.
* ``after_commit(step)``: a checkpoint of the step is written, and every rank knows.
* ``on_error(error, fed_batch)``: an exception leaves the context; ``fed_batch`` is the batch at which it was raised, or
  None.
* ``on_end(complete)``: the pass is over; ``complete`` where all ranks reached its end, so that collectives may be used.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from persia.backend.base import Backend
from persia.loop.feeder import FedBatch


class Loop(Protocol):
    """The part of a training loop that hooks use."""

    @property
    def step(self) -> int:
        """The last step that was trained."""

    @property
    def backend(self) -> Backend:
        """The backend, with the rows and the other ranks."""

    def committed(self, step: int) -> None:
        """Run ``after_commit`` of all hooks."""


class Hooks:
    """The hooks of a loop, in their order.

    Args:
        hooks: Objects with any of the methods that this module names, and optionally an ``identity``: a text that
            is equal on all ranks if their hooks are.
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
        """Return whether a hook withholds this batch from the engine."""
        return any(before(fed_batch) for before in self._having("before_lookup"))

    def before_step(self) -> None:
        """Call ``before_step`` of every hook."""
        for each in self._before_step:
            each()

    def vote(self, fed_batch: FedBatch | None) -> list[Any]:
        """Return this rank's votes, JSON-ready, one for each hook that has one."""
        return [hook.vote(fed_batch) for hook in self._voters]

    def decide(self, step: int, ballots: Sequence[Sequence[Any]]) -> bool:
        """Whether all ranks skip the step.

        Args:
            step: The step.
            ballots: The results of :meth:`vote` on each rank.
        """
        skip = False
        for hook, *votes in zip(self._voters, *ballots, strict=True):
            skip = hook.decide(step, votes) or skip  # every hook must decide, so no short circuit
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
        """End the pass, in reverse order. All hooks end, also if one fails; the first error is raised."""
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
