"""Measurements of a loop between two reports: its mean loss, and the shares of computing and waiting time."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

STAGES = ("data", "lookup", "push")


class Limits:
    """Measures the time of the training loop, between two reports.

    ``dense`` is the time of the loop itself: forward, backward, optimizer. While the loop waits for a batch, the
    stages before it work at the same time, each on its own batch; the wait counts for the stage that was busy
    for most of the interval, because the others were waiting for it:

    * ``data``: reading and transforming rows
    * ``lookup``: planning, looking up and pooling
    * ``push``: look-ups that waited for pushes, as the staleness demands
    """

    def __init__(self) -> None:
        self._dense = self._waited = 0.0
        self._before = dict.fromkeys(STAGES, 0.0)
        self._mark = time.perf_counter()

    def waited(self) -> None:
        """Record that a batch has arrived: the time since the last step was a wait."""
        self._waited += self._lap()

    def stepped(self) -> None:
        """Record that a step is done."""
        self._dense += self._lap()

    def apart(self) -> None:
        """Record the end of other work, such as an evaluation, which does not count."""
        self._lap()

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self._mark = now - self._mark, now
        return lap

    def take(self, busy_data: float, seconds: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last call and the shares, and start a new interval.

        Args:
            busy_data: Seconds so far that reading and transforming took.
            seconds: Those of each stage of the engine, from its statistics.
        """
        now = {
            "data": busy_data,
            "lookup": sum(float(seconds.get(name, 0.0)) for name in ("plan", "lookup", "pool")),
            "push": float(seconds.get("permit_wait", 0.0)),
        }
        busy = {name: now[name] - self._before[name] for name in STAGES}
        whole = self._dense + self._waited
        limit = max(STAGES, key=lambda name: busy[name])
        shares = {"dense": self._dense / whole if whole else 0.0, **dict.fromkeys(STAGES, 0.0)}
        shares[limit] = self._waited / whole if whole else 0.0
        self._before = now
        self._dense = self._waited = 0.0
        return whole, shares


class MeanLoss:
    """The mean of finite losses, summed on their device."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | float = 0.0
        self._count: torch.Tensor | float = 0.0

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a step."""
        finite = torch.isfinite(loss)
        self._sum = self._sum + torch.where(finite, loss, 0.0).double()
        self._count = self._count + finite.double()

    def take(self) -> float:
        """Return the mean, and start a new interval; NaN without a finite loss."""
        total, count = float(self._sum), float(self._count)
        self._sum = self._count = 0.0
        return total / count if count else math.nan
