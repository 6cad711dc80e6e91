"""Training forwards of a collection, and the number of them that had a backward."""

from persia.runtime.logging import get_logger

_logger = get_logger("collection")

WARN_AFTER = 3
"""The number of consecutive forwards without a backward after which a warning is logged."""


class Forwards:
    """Counts training forwards, and warns if they have no backward."""

    def __init__(self) -> None:
        self.backwards = 0
        self._forwards = self._dropped = 0  # in a row
        self._warned = False

    def forward(self) -> None:
        """Record a forward; log if those before it were dropped."""
        self._forwards += 1
        if self._dropped < WARN_AFTER or self._warned:
            return
        self._warned = True
        _logger.warning(
            "the last %d forwards in training mode were dropped without a backward, so no row is updated for them: "
            "call backward() on a loss that depends on what the forward returned, undetached; evaluate in eval() or "
            "under torch.no_grad()",
            self._dropped,
        )

    def backward(self) -> None:
        """Record a backward."""
        self.backwards += 1
        self._dropped = 0

    def drop(self) -> None:
        """Record that a forward can no longer have a backward."""
        self._dropped += 1

    def warn_untrained_save(self) -> None:
        """Warn that a checkpoint will contain no training, if forwards had no backward."""
        if self._forwards and not self.backwards:
            _logger.warning(
                "the checkpoint contains no training: none of the %d training forwards so far had a backward: call "
                "backward() on a loss that depends on what they returned, undetached",
                self._forwards,
            )

    def log(self, when: str) -> None:
        """Log how many forwards had a backward; it is a warning if none had."""
        if self._forwards and not self.backwards:
            _logger.warning("%s: no row was updated, none of %d training forwards got a backward", when, self._forwards)
        elif self._forwards:
            _logger.info("%s: %d of %d training forwards got a backward", when, self.backwards, self._forwards)
