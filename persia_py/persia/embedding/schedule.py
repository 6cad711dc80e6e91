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
    """Linear warm-up, followed by a constant, linear or cosine course.

    The learning rate of step ``t`` is multiplied by ``warm-up * course``, where

    * ``warm-up = min(t / warmup_steps, 1)``, and 1 without warm-up steps (Goyal et al. 2017, section 2.2)
    * ``course`` is a function of ``p = (t - warmup_steps) / (total_steps - warmup_steps)``, clamped to ``[0, 1]``:
      1 if constant, ``1 - (1 - end) * p`` if linear, ``end + (1 - end) * (1 + cos(pi * p)) / 2`` if cosine
      (Loshchilov and Hutter 2017, equation 5)

    Example:
        ``Adagrad(lr=0.1).scheduled(LRSchedule("cosine", warmup_steps=500, total_steps=20_000))``

    Attributes:
        course: ``constant``, ``linear`` or ``cosine``.
        warmup_steps: The number of warm-up steps.
        total_steps: The step from which the course has the value ``end``; None for a constant course.
        end: The final value of the course, in ``[0, 1]``; a constant course does not use it and requires 0.
    """

    course: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    end: float = 0.0

    def __post_init__(self) -> None:
        """Check all fields. The error names all invalid ones.

        Raises:
            ConfigError: A field is out of its range.
        """
        wrong = []
        if self.course not in {"constant", "linear", "cosine"}:
            wrong.append(f"course={self.course!r}: expected constant, linear or cosine")
        warms_up = _is_a(Integral, self.warmup_steps) and self.warmup_steps >= 0
        if not warms_up:
            wrong.append(f"warmup_steps={self.warmup_steps!r}: must be an integer of at least 0")
        if self.course == "constant":
            if self.total_steps is not None:
                wrong.append(f"total_steps={self.total_steps}: must be None with course='constant'")
            if self.end != 0:
                wrong.append(f"end={self.end!r}: must be 0 with course='constant'")
        else:
            total = self.total_steps
            if total is None or not _is_a(Integral, total) or (warms_up and total <= self.warmup_steps):
                wrong.append(
                    f"total_steps={self.total_steps!r}: must be an integer above warmup_steps ({self.warmup_steps})"
                )
            if not (_is_a(Real, self.end) and 0 <= self.end <= 1):
                wrong.append(f"end={self.end!r}: must be from 0 to 1")
        if wrong:
            raise ConfigError("LRSchedule: " + "; ".join(wrong))

    def __call__(self, step: int) -> float:
        """Return the factor by which the learning rate is multiplied at ``step``."""
        warmup = min(step / self.warmup_steps, 1.0) if self.warmup_steps else 1.0
        if self.total_steps is None:
            return warmup
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        progress = min(max(progress, 0.0), 1.0)
        left = 1 - progress if self.course == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return warmup * (self.end + (1 - self.end) * left)


def _is_a(kind: type, value: object) -> bool:
    """Return whether ``value`` has the numeric type ``kind``. NumPy scalars are accepted."""
    return isinstance(value, kind)
