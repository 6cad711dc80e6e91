"""Optimizers of embedding rows. They run in the process that holds the rows.

The formula of each class applies per element. ``w`` is a weight, and ``g`` the gradient of an id, summed over a batch.
``lr`` is the learning rate of the step, which is sent with each push: :meth:`Optimizer.update_lr` sets it,
:meth:`Optimizer.scheduled` varies it with the step.
"""

import math
from collections.abc import Callable
from dataclasses import is_dataclass

from typing_extensions import Self

from persia.runtime import contexts
from persia.runtime.errors import ConfigError, UsageError
from persia_core import optim as _core


class Optimizer:
    """The base class of embedding optimizers.

    Attributes:
        lr: The current learning rate, before the schedule.
        spec: The formula and its parameters, in the form that the store reads.
    """

    def __init__(self, spec: _core.OptimizerSpec, lr: float) -> None:
        self.spec = spec
        self._base_lr = lr
        self._schedule: Callable[[int], float] | None = None
        self.lr = lr

    @property
    def fingerprint(self) -> str:
        """The schedule as text, which the ranks compare."""
        if self._schedule is None:
            return "none"
        shown = is_dataclass(self._schedule)
        return repr(self._schedule) if shown else getattr(self._schedule, "__name__", type(self._schedule).__name__)

    def scheduled(self, schedule: Callable[[int], float]) -> Self:
        """Multiply the learning rate of each step by ``schedule(step)``, and return this optimizer.

        Args:
            schedule: A :class:`persia.embedding.schedule.LRSchedule`, or any function of the global step (from 1) that
                returns a finite number of at least 0. The function must depend only on the step, because checkpoints do
                not save it.

        Raises:
            ConfigError: The schedule is not callable.
        """
        if not callable(schedule):
            raise ConfigError(f"scheduled({schedule!r}): expected a function of the step, for example an LRSchedule")
        self._schedule = schedule
        return self

    def update_lr(self, lr: float) -> None:
        """Use ``lr`` from the next push on. The schedule multiplies it; checkpoints save it.

        To use the schedule of the dense optimizer, call ``update_lr(scheduler.get_last_lr()[0])`` in each step.

        Raises:
            ConfigError: ``lr`` is not finite or is negative, or the optimizer was created with ``lr=0``.
        """
        self.check_lr(lr)
        self.lr = lr

    def check_lr(self, lr: float) -> None:
        """Check the argument of :meth:`update_lr`.

        Raises:
            ConfigError: As in :meth:`update_lr`.
        """
        _check(lr=lr)
        if self._base_lr == 0 and lr != 0:
            raise ConfigError(
                f"cannot set lr={lr}: the optimizer was created with lr=0, which no factor can change; create the "
                "optimizer with lr above 0",
                hint="",
            )

    def apply(self) -> None:
        """Make this the optimizer of the current context. ``TrainCtx`` does this on entry.

        Raises:
            UsageError: No context is entered.
        """
        context = contexts.current()
        if context is None or context.common_context is None:
            raise UsageError(
                "cannot call Optimizer.apply() outside a context; TrainCtx(embedding_optimizer=...) does this on entry"
            )
        context.common_context.begin(optimizer=self)

    def lr_factor(self, step: int) -> float:
        """Return the factor of the initial learning rate for the push of ``step``.

        Raises:
            ConfigError: The schedule returned a number that is not finite or is negative.
        """
        factor = self.lr / self._base_lr if self._base_lr else 1.0
        if self._schedule is None:
            return factor
        scheduled = self._schedule(step)
        if not (math.isfinite(scheduled) and scheduled >= 0):
            raise ConfigError(
                f"learning-rate schedule: {scheduled} at step {step}; expected a finite number of at least 0",
                hint="correct the function that was passed to scheduled()",
            )
        return factor * scheduled


_BELOW_ONE = ("momentum", "betas[0]", "betas[1]")
_EPS = (2.0**-126, 1e30)
"""The range of ``eps``, as in the engine: from the smallest normal float32, because it may be the whole divisor."""


def _check(**values: float) -> None:
    """Check that the engine accepts all arguments of an optimizer.

    Raises:
        ConfigError: An argument is out of its range; the message lists all errors.
    """
    wrong = [
        f"{name}={value}: must be {range_}"
        for name, value in values.items()
        if (range_ := _range_if_outside(name, value))
    ]
    if wrong:
        raise ConfigError("embedding optimizer: " + "; ".join(wrong))


def _range_if_outside(name: str, value: float) -> str | None:
    """Return the range of an argument if the value is outside it, else None."""
    if not math.isfinite(value):
        return "a finite number"
    if name in _BELOW_ONE:
        return None if 0 <= value < 1 else "at least 0 and below 1"
    if name == "g_square_momentum":
        return None if 0 <= value <= 1 else "from 0 to 1"
    if name == "eps":
        return None if _EPS[0] <= value <= _EPS[1] else f"from {_EPS[0]:.3g} to {_EPS[1]:g}"
    return None if value >= 0 else "at least 0"


class SGD(Optimizer):
    """``w -= lr * (g + wd * w)``; with momentum ``v = momentum * v + g; w -= lr * (v + wd * w)``.

    Attributes:
        momentum: The momentum.
        weight_decay: The weight decay ``wd``.
    """

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        _check(lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__(_core.OptimizerSpec.sgd(lr, momentum, weight_decay), lr)
        self.momentum, self.weight_decay = momentum, weight_decay


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1), bias-corrected by the global step t, as torch's SparseAdam does.

    ``m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g * g``, then with ``a = lr / (1 - beta1 ** t)``
    and ``b = 1 / (1 - beta2 ** t)``: ``w -= a * m / (sqrt(v * b) + eps)``. ``g`` includes ``weight_decay * w``.

    Attributes:
        betas: The decay rates ``beta1`` and ``beta2``.
        weight_decay: The weight decay.
        eps: The value added to the root.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        eps: float = 1e-8,
    ) -> None:
        _check(lr=lr, weight_decay=weight_decay, eps=eps, **{"betas[0]": betas[0], "betas[1]": betas[1]})
        super().__init__(_core.OptimizerSpec.adam(lr, betas, weight_decay, eps), lr)
        self.betas, self.weight_decay, self.eps = betas, weight_decay, eps


class Adagrad(Optimizer):
    """``w -= lr * g / sqrt(s + eps)`` with the old ``s``, then ``s = s * g_square_momentum + g * g``.

    ``s`` starts at ``initial_accumulator_value``. With ``vectorwise_shared`` a row has a single ``s``, which grows by
    the mean of ``g * g``. A single ``s`` needs less memory and time. ``g`` includes ``weight_decay * w``.

    Attributes:
        initial_accumulator_value: The initial ``s``.
        weight_decay: The weight decay.
        g_square_momentum: The factor of ``s`` before each addition.
        eps: The value added to ``s`` before the root.
        vectorwise_shared: Whether a row has a single ``s``.
    """

    def __init__(
        self,
        lr: float = 1e-2,
        initial_accumulator_value: float = 1e-2,
        weight_decay: float = 0,
        g_square_momentum: float = 1,
        eps: float = 1e-10,
        vectorwise_shared: bool = False,
    ) -> None:
        _check(
            lr=lr,
            initial_accumulator_value=initial_accumulator_value,
            weight_decay=weight_decay,
            g_square_momentum=g_square_momentum,
            eps=eps,
        )
        spec = _core.OptimizerSpec.adagrad(
            lr, initial_accumulator_value, weight_decay, g_square_momentum, eps, vectorwise_shared
        )
        super().__init__(spec, lr)
        self.initial_accumulator_value = initial_accumulator_value
        self.weight_decay = weight_decay
        self.g_square_momentum = g_square_momentum
        self.eps = eps
        self.vectorwise_shared = vectorwise_shared
