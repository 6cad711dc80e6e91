"""Makes checkpoints more frequent while the price of instances is volatile."""

import json
import statistics
import sys
from collections import deque
from collections.abc import Sequence

from persia.config.operations import PriceBlock
from persia.ctx import Checkpoints
from persia.runtime.logging import get_logger
from persia.runtime.polled import AnswerError, Polled, request

_logger = get_logger("trainer")

_MOST = sys.float_info.max
LOOKED_AT = 10
"""The number of polls whose prices are compared."""


def parse(status: int, body: str) -> float:
    """Return the price in a response: a number, or ``{"price": NUMBER}``.

    Raises:
        AnswerError: The response is neither, or the price is not above 0.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    price = content.get("price") if isinstance(content, dict) else content
    if status != 200 or isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price <= _MOST:
        raise AnswerError(f"expected status 200 and a price above 0, found status {status}: {body[:80]!r}")
    return float(price)


def is_volatile(prices: Sequence[float], share: float) -> bool:
    """Whether prices differ by at least this share of their mean."""
    return len(prices) > 1 and max(prices) - min(prices) >= share * statistics.fmean(prices)


class Interval:
    """A hook of the training loop that sets the number of steps between checkpoints, from the prices that rank 0 polls.

    Args:
        block: The address and the threshold; None polls nothing.
        every: The interval while the price is stable.
    """

    def __init__(self, block: PriceBlock | None, every: int) -> None:
        self._block, self._calm = block, every
        self._prices: deque[float] = deque(maxlen=LOOKED_AT)
        self._checkpoints: Checkpoints | None = None

    @property
    def identity(self) -> str:
        """A text that must be equal on all ranks."""
        return "Interval" if self._block is None else f"Interval({self._block.checkpoint_every} of {self._calm})"

    def of(self, checkpoints: Checkpoints) -> "Interval":
        """Set the checkpoints whose interval is changed."""
        self._checkpoints = checkpoints
        return self

    def polled(self) -> Polled[float] | None:
        """Return the poller; None without an address."""
        block = self._block
        if block is None:
            return None
        return Polled(
            "price.url",
            block.url,
            lambda: parse(*request(block.url)),
            self._add,
            every_s=block.every_s,
            lost="the interval of checkpoints does not change",
            hint="correct price.url, or train without the block: --set price=null",
        )

    def _add(self, price: float) -> bool:
        self._prices.append(price)
        return False

    def vote(self, fed_batch: object) -> int | None:
        """Return the interval that follows from the prices of this rank; None on ranks that do not poll."""
        del fed_batch
        if self._block is None or not self._prices:
            return None
        prices = [*self._prices]
        return (
            min(self._block.checkpoint_every, self._calm) if is_volatile(prices, self._block.volatile) else self._calm
        )

    def decide(self, step: int, votes: Sequence[int | None]) -> bool:
        """Change the interval; this never skips a step."""
        every = next((vote for vote in votes if vote is not None), None)
        if self._checkpoints is not None and every is not None and every != self._checkpoints.every:
            prices = [*self._prices]  # another thread appends to the prices
            if prices:
                shown = ", ".join(f"{price:g}" for price in prices)
                why = "is volatile" if every != self._calm else "is no longer volatile"
                _logger.warning(
                    "price: from step %d on, a checkpoint is written every %d steps instead of every %d, because the "
                    "price %s; the last prices are %s",
                    step,
                    every,
                    self._checkpoints.every,
                    why,
                    shown,
                )
            self._checkpoints.every = every
        return False
