"""Counts the batches that are trained on, and warns if a script trains on none."""

import torch

from persia.loop.hooks import Loop
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

_logger = get_logger("ctx")

WARN_AFTER = 3
"""The number of consecutive forward passes without a backward pass after which a warning is logged."""

_INSTEAD = (
    "ctx.backward(loss) back-propagates, updates the rows and steps the dense optimizer; call it instead "
    "of loss.backward() and optimizer.step()"
)


class TrainedBatches:
    """Counts the forward and backward passes of a context. It is a hook of the context's loops.

    Attributes:
        skipped: The number of steps that were skipped because of NaN or infinity.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._waiting = 0  # the step of a forward pass that has no backward pass yet; 0 if there is none
        self._forwards = self._backwards = self._in_a_row = self._lost = 0
        self._warned = False
        self._before = (0, 0, 0)  # the counts at the start of the loop

    def forward(self, step: int, *, trains: bool) -> None:
        """Record a forward pass; ``trains`` means that a backward pass is expected."""
        if trains:
            self._forwards += 1
        self._waiting = step if trains else 0

    def backward(self) -> None:
        """Record a backward pass."""
        self._waiting = self._in_a_row = 0
        self._backwards += 1

    def repeat(self, step: int) -> None:
        """Record that the last backward pass failed and will be repeated."""
        self._waiting = step
        self._backwards -= 1

    def end_step(self, embeddings: list[torch.Tensor]) -> None:
        """Record that the previous forward pass, which returned ``embeddings``, can no longer have a backward pass."""
        step, self._waiting = self._waiting, 0
        if not step:
            return
        lost = any(tensor.grad is not None for tensor in embeddings)
        self._lost += lost
        self._in_a_row += 1
        if self._warned or not (lost or self._in_a_row >= WARN_AFTER):
            return
        self._warned = True
        if lost:
            _logger.warning(
                "step %d: the gradients of its embeddings were computed, but not pushed, so it has changed no row: %s",
                step,
                _INSTEAD,
            )
        else:
            _logger.warning(
                "step %d: the last %d forward passes were not followed by ctx.backward(loss), so nothing is trained on "
                "their batches: %s. To evaluate, use eval_ctx or torch.no_grad()",
                step,
                self._in_a_row,
                _INSTEAD,
            )

    def on_start(self, loop: Loop) -> None:
        """Start counting for a loop."""
        del loop
        self._before = (self._forwards, self._backwards, self.skipped)

    def on_end(self, complete: bool) -> None:
        """Log how many batches of the loop were trained on."""
        del complete
        now = (self._forwards, self._backwards, self.skipped)
        forwards, backwards, skipped = (after - before for after, before in zip(now, self._before, strict=True))
        missed = max(0, forwards - backwards)
        text = f"the training loop has ended: {backwards - skipped} of {forwards} batches were trained on"
        more = [f"{missed} had no ctx.backward(loss)"] * (missed > 0)
        more += [f"{skipped} {'was' if skipped == 1 else 'were'} skipped for NaN or infinity"] * (skipped > 0)
        text = "; ".join([text, ", ".join(more)] if more else [text])
        if missed > 1 or (missed and not backwards):
            _logger.warning("%s", text)
        elif forwards and settings.rank == 0:
            _logger.info("%s", text)

    def warn_untrained_save(self) -> None:
        """Warn that a checkpoint will contain no training, if no forward pass had a backward pass."""
        if self._forwards and not self._backwards:
            _logger.warning(
                "the model was not trained before this checkpoint: none of the %d batches so far was trained on: %s",
                self._forwards,
                _INSTEAD,
            )

    def check(self) -> None:
        """At the end of a context, check that something was trained.

        Raises:
            UsageError: Gradients were computed, but none was pushed.
        """
        if self._lost and not self._backwards:
            raise UsageError(
                f"TrainCtx has trained on none of {self._forwards} batches: gradients were computed, but not "
                f"pushed. {_INSTEAD}. To train the model alone, pass TrainCtx an embedding optimizer with lr=0"
            )
