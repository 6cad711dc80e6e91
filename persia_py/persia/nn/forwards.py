"""Counts training forward passes of a collection, and how many of them had a backward pass."""

from persia.runtime.logging import get_logger

_logger = get_logger("collection")

WARN_AFTER = 3
"""The number of consecutive forward passes without a backward pass after which a warning is logged."""


class Forwards:
    """Counts training forward passes, and warns if they have no backward pass."""

    def __init__(self) -> None:
        self.backwards = self._forwards = 0
        self._dropped = 0  # the number of consecutive dropped forward passes
        self._warned = False

    def forward(self) -> None:
        """Record a forward pass. Log one warning if at least :data:`WARN_AFTER` previous ones were dropped."""
        self._forwards += 1
        if self._dropped < WARN_AFTER or self._warned:
            return
        self._warned = True
        _logger.warning(
            "the last %d forward passes in training mode were not followed by backward(), so they update no row: "
            "call backward() on a loss that depends on their outputs (not detached); to evaluate, use eval() or "
            "torch.no_grad()",
            self._dropped,
        )

    def backward(self) -> None:
        """Record a backward pass."""
        self.backwards += 1
        self._dropped = 0

    def drop(self) -> None:
        """Record that a forward pass can no longer have a backward pass."""
        self._dropped += 1

    def warn_untrained_save(self) -> None:
        """Warn that a checkpoint will contain no training, if no forward pass had a backward pass."""
        if self._forwards and not self.backwards:
            _logger.warning(
                "the model was not trained before this checkpoint (forward passes: %d, none with a backward pass): "
                "call backward() on a loss that depends on their outputs (not detached)",
                self._forwards,
            )

    def log(self, when: str) -> None:
        """Log how many forward passes had a backward pass. If none had one, the log level is warning."""
        if self._forwards and not self.backwards:
            text = "%s: no row was updated (forward passes: %d, none with a backward pass)"
            _logger.warning(text, when, self._forwards)
        elif self._forwards:
            _logger.info("%s: %d of %d forward passes had a backward pass", when, self.backwards, self._forwards)
