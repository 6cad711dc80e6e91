"""How embedding rows start and are bounded.

* :mod:`persia.embedding.data`: features and batches
* :mod:`persia.embedding.optim`, :mod:`persia.embedding.schedule`: optimizers, and learning rates that vary
* :mod:`persia.embedding.collection`: tables as a module of an existing model
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from persia.errors import ConfigError
from persia_core.optim import InitializerSpec

if TYPE_CHECKING:
    from persia.embedding.collection import EmbeddingCollection as EmbeddingCollection
    from persia.embedding.collection import TableConfig as TableConfig


def __getattr__(name: str) -> Any:
    """Import what needs torch and a context only for those who use it."""
    if name not in {"EmbeddingCollection", "TableConfig"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from persia.embedding import collection

    return getattr(collection, name)


@dataclass(frozen=True)
class Uniform:
    """New weights are uniform in ``[low, high)``."""

    low: float
    high: float


@dataclass(frozen=True)
class Normal:
    """New weights are normal."""

    mean: float = 0.0
    std: float = 0.01


@dataclass(frozen=True)
class Zero:
    """New weights are zero."""


@dataclass(frozen=True)
class EmbeddingConfig:
    """How embedding rows start, and how far they may go.

    A new row's weights are a function of the run's seed, its table's name and its id.

    Attributes:
        emb_initialization: :class:`Uniform`, :class:`Normal` or :class:`Zero`; ``(low, high)`` means uniform.
        admit_probability: Share of unknown ids that get a row when looked up in training, in ``[0, 1]``.
        weight_bound: Weights are clamped to ``±weight_bound`` after each update; 0 switches it off.
    """

    emb_initialization: tuple[float, float] | Uniform | Normal | Zero = (-0.01, 0.01)
    admit_probability: float = 1.0
    weight_bound: float = 10

    def __post_init__(self) -> None:
        """Check all fields and name every one that is wrong.

        Raises:
            ConfigError: A field is out of its range.
        """
        wrong = []
        if not _is_valid(self._start()):
            wrong.append(f"emb_initialization={self.emb_initialization}: want finite numbers, low <= high, std >= 0")
        if not 0 <= self.admit_probability <= 1:
            wrong.append(f"admit_probability={self.admit_probability}: want 0 to 1")
        if not (math.isfinite(self.weight_bound) and self.weight_bound >= 0):
            wrong.append(f"weight_bound={self.weight_bound}: want a finite number of at least 0")
        if wrong:
            raise ConfigError("EmbeddingConfig: " + "; ".join(wrong))

    def _start(self) -> Uniform | Normal | Zero:
        start = self.emb_initialization
        return Uniform(*start) if isinstance(start, tuple) else start

    @property
    def initializer(self) -> InitializerSpec:
        """``emb_initialization`` as the store takes it."""
        match self._start():
            case Uniform(low, high):
                return InitializerSpec.uniform(low, high)
            case Normal(mean, std):
                return InitializerSpec.normal(mean, std)
            case Zero():
                return InitializerSpec.zero()


def _is_valid(start: Uniform | Normal | Zero) -> bool:
    match start:
        case Uniform(low, high):
            return math.isfinite(low) and math.isfinite(high) and low <= high
        case Normal(mean, std):
            return math.isfinite(mean) and math.isfinite(std) and std >= 0
        case Zero():
            return True


def get_default_embedding_config() -> EmbeddingConfig:
    """Return the configuration used where a context gets none."""
    return EmbeddingConfig()
