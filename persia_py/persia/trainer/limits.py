"""Measurements of a loop between two reports: its mean loss, and the shares of computing and waiting time."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from persia.profile.stages import difference, shares, stages
from persia.runtime import flight


class Limits:
    """Measures the time of the training loop between two reports, for each stage of :mod:`persia.profile.stages`.

    Args:
        staleness: The staleness K of the loop.
    """

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._whole = 0.0
        self._calls: dict[str, float] = {}
        self._engine: Mapping[str, Any] = {}
        self._mark, self._before = time.perf_counter(), flight.totals()

    def stepped(self) -> None:
        """Record that a step is complete."""
        now, totals = time.perf_counter(), flight.totals()
        self._whole += now - self._mark
        for verb, seconds in difference(totals, self._before).items():
            self._calls[verb] = self._calls.get(verb, 0.0) + seconds
        self._mark, self._before = now, totals

    def apart(self) -> None:
        """Record the end of other work, such as an evaluation, whose time does not count."""
        self._mark, self._before = time.perf_counter(), flight.totals()
        flight.apart()

    def take(self, engine: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last call and the share of each stage, and start a new interval.

        Args:
            engine: The seconds of each stage of the engine, from its statistics.
        """
        whole, self._whole = self._whole, 0.0
        calls, self._calls = self._calls, {}
        spent, self._engine = difference(engine, self._engine), dict(engine)
        return whole, shares(stages(calls, whole, spent, staleness=self._staleness))


class MeanLoss:
    """The mean of the finite losses. They are summed on their device."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | float = 0.0
        self._count: torch.Tensor | float = 0.0

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a step."""
        finite = torch.isfinite(loss)
        self._sum = self._sum + torch.where(finite, loss, 0.0).double()
        self._count = self._count + finite.double()

    def take(self) -> float:
        """Return the mean, and start a new interval; NaN if there was no finite loss."""
        total, count = float(self._sum), float(self._count)
        self._sum = self._count = 0.0
        return total / count if count else math.nan
