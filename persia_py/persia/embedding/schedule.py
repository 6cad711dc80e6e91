"""Learning-rate schedules.

A schedule is a function of the global step only, counted from 1. Checkpoints therefore need not store it, a resumed run
continues it, and all servers use the same rate. Ranks compare their schedules when a training loop starts.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from persia.runtime.errors import ConfigError


@dataclass(frozen=True)
class LRSchedule:
    """Linear warm-up, then a constant, linear or cosine course.

    The learning rate of step ``t`` is multiplied by ``warm-up * course``, where

    * ``warm-up = min(t / warmup_steps, 1)``, and 1 without warm-up steps (Goyal and others 2017, section 2.2)
    * ``course`` is a function of ``p = (t - warmup_steps) / (total_steps - warmup_steps)``, clamped to ``[0, 1]``:
      1 if constant, ``1 - (1 - end) * p`` if linear, ``end + (1 - end) * (1 + cos(pi * p)) / 2`` if cosine
      (Loshchilov and Hutter 2017, equation 5)

    Example:
        ``Adagrad(lr=0.1).scheduled(LRSchedule("cosine", warmup_steps=500, total_steps=20_000))``

    Attributes:
        course: ``constant``, ``linear`` or ``cosine``.
        warmup_steps: The number of steps of the warm-up.
        total_steps: The step at which the course reaches ``end``, where it stays; None for a constant course.
        end: The last value of the course, in ``[0, 1]``; 0 for a constant course, which does not use it.
    """

    course: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    end: float = 0.0

    def __post_init__(self) -> None:
        """Check all fields; the error names every wrong one.

        Raises:
            ConfigError: A field is out of its range.
        """
        wrong = []
        if self.course not in {"constant", "linear", "cosine"}:
            wrong.append(f"course={self.course!r}: want constant, linear or cosine")
        warms_up = _is_a(Integral, self.warmup_steps) and self.warmup_steps >= 0
        if not warms_up:
            wrong.append(f"warmup_steps={self.warmup_steps!r}: want a whole number of at least 0")
        if self.course == "constant":
            if self.total_steps is not None:
                wrong.append(f"total_steps={self.total_steps}: a constant course has no end")
            if self.end != 0:
                wrong.append(f"end={self.end!r}: a constant course does not decrease")
        else:
            total = self.total_steps
            if total is None or not _is_a(Integral, total) or (warms_up and total <= self.warmup_steps):
                wrong.append(
                    f"total_steps={self.total_steps!r}: want a whole number, more than warmup_steps "
                    f"({self.warmup_steps})"
                )
            if not (_is_a(Real, self.end) and 0 <= self.end <= 1):
                wrong.append(f"end={self.end!r}: want 0 to 1")
        if wrong:
            raise ConfigError("LRSchedule: " + "; ".join(wrong))

    def __call__(self, step: int) -> float:
        """Return the factor of the learning rate at ``step``."""
        warmup = min(step / self.warmup_steps, 1.0) if self.warmup_steps else 1.0
        if self.total_steps is None:
            return warmup
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        progress = min(max(progress, 0.0), 1.0)
        left = 1 - progress if self.course == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return warmup * (self.end + (1 - self.end) * left)


def _is_a(kind: type, value: object) -> bool:
    """Return whether ``value``, which may be of any type, is such a number; NumPy numbers count too."""
    return isinstance(value, kind)
