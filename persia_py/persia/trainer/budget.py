"""The limit on the cost of a run: price per hour times wall time, over all its attempts."""

from collections.abc import Sequence
from time import monotonic

from persia.config.operations import BudgetBlock
from persia.runtime.errors import ConfigError
from persia.runtime.logging import get_logger
from persia.runtime.settings import get_rank

_logger = get_logger("trainer")

REASON = "budget"
"""The reason for stopping, in the summary of the run."""
_SECONDS_PER_HOUR = 3600.0


class BudgetSpentError(ConfigError):
    """A run cannot be resumed because it has cost as much as ``budget.usd`` allows."""


class Budget:
    """A hook of the training loop that stops a run when its cost has reached the limit. It runs on all ranks.

    Rank 0 checks the cost before each step, when the ranks agree on the step. All ranks stop after this step, so they
    end at the same step.

    Args:
        block: The limit and the price; None means no limit.

    Attributes:
        is_spent: Whether the run stops after the current step; equal on all ranks.
        spent_before: The cost of earlier attempts, in USD.
    """

    def __init__(self, block: BudgetBlock | None) -> None:
        self._block, self._started = block, monotonic()
        self.is_spent = False
        self.spent_before = 0.0

    @property
    def identity(self) -> str:
        """A text that must be equal on all ranks."""
        return "Budget" if self._block is None else f"Budget({self._block.usd:g} USD, {self._block.usd_per_hour:g}/h)"

    @property
    def spent(self) -> float:
        """The cost of the run so far, in USD; 0 without a price."""
        rate = 0.0 if self._block is None else self._block.usd_per_hour
        return self.spent_before + rate * (monotonic() - self._started) / _SECONDS_PER_HOUR

    @property
    def is_over(self) -> bool:
        """Whether the limit has been reached."""
        return self._block is not None and self.spent >= self._block.usd

    def check_left(self, spent: float) -> None:
        """Check that a resumed run has budget left.

        Args:
            spent: The cost so far, as rank 0 knows it.

        Raises:
            BudgetSpentError: The budget is spent.
        """
        block = self._block
        if block is None or spent < block.usd:
            return
        raise BudgetSpentError(
            f"budget.usd: the run has cost {spent:.2f} USD, allowed: {block.usd:g}; the run is not continued",
            hint=f"to continue the run: --set budget.usd={2 * max(block.usd, round(spent, 2)):g}",
        )

    def vote(self, fed_batch: object) -> bool:
        """Return whether rank 0 finds that the limit has been reached."""
        del fed_batch
        return self.is_over and get_rank() == 0

    def decide(self, step: int, votes: Sequence[bool]) -> bool:
        """Stop after this step; this never skips a step."""
        if any(votes) and not self.is_spent:
            self.is_spent = True
            if get_rank() == 0 and self._block is not None:
                text = "budget.usd: the run has cost %.2f USD, allowed: %g; the run is saved after step %d, and stops"
                _logger.warning(text, self.spent, self._block.usd, step)
        return False
