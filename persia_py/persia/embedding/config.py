"""How rows start and are bounded (:class:`EmbeddingConfig`), and what the two YAML files say."""

import math
from dataclasses import dataclass
from hashlib import sha256
from typing import get_args

from typing_extensions import Self

from persia.runtime.config_files import find_config, read_config
from persia.runtime.errors import ConfigError
from persia.runtime.logging import get_logger
from persia_core import config as _config
from persia_core.optim import InitializerSpec

_logger = get_logger("configs")

MAX_MIN_COUNT = 65_535
MAX_POISSON_MEAN = 500


@dataclass(frozen=True)
class Uniform:
    """New weights are uniform in ``[low, high)``: ``low + (high - low) * u``."""

    low: float
    high: float

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.uniform(self.low, self.high)

    def _is_valid(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high


@dataclass(frozen=True)
class Normal:
    """New weights are normal: ``mean + std * n``, ``n`` by the transform of Box and Muller (1958)."""

    mean: float = 0.0
    std: float = 0.01

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.normal(self.mean, self.std)

    def _is_valid(self) -> bool:
        return math.isfinite(self.mean) and math.isfinite(self.std) and self.std >= 0


@dataclass(frozen=True)
class Zero:
    """New weights are zero."""

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.zero()

    def _is_valid(self) -> bool:
        return True


@dataclass(frozen=True)
class Gamma:
    """New weights have the gamma distribution of mean ``shape * scale`` and variance ``shape * scale ** 2``.

    Drawn by the method of Marsaglia and Tsang (2000).
    """

    shape: float
    scale: float = 1.0

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.gamma(self.shape, self.scale)

    def _is_valid(self) -> bool:
        return math.isfinite(self.shape) and math.isfinite(self.scale) and self.shape > 0 and self.scale >= 0


@dataclass(frozen=True)
class Poisson:
    """New weights have the Poisson distribution: whole numbers of mean and variance ``lam``, at most 500.

    Drawn by multiplying uniform numbers (Knuth, The Art of Computer Programming 2, section 3.4.1).
    """

    lam: float

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.poisson(self.lam)

    def _is_valid(self) -> bool:
        return 0 <= self.lam <= MAX_POISSON_MEAN


@dataclass(frozen=True)
class InverseSqrtDim:
    """New weights are uniform in ``[-b, b)`` with ``b = 1 / sqrt(dim)``, PersiaML's ``InverseEmbeddingSizeSqrt``.

    The expected squared length of a row is 1/3, whatever its dimension.
    """

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.inverse_sqrt_dim()

    def _is_valid(self) -> bool:
        return True


Initialization = Uniform | Normal | Zero | Gamma | Poisson | InverseSqrtDim


@dataclass(frozen=True)
class EmbeddingConfig:
    """How embedding rows start, which ids get one, and how far weights may go.

    An id without a row reads as zeros, and its gradients are dropped and counted.

    Attributes:
        emb_initialization: One of the classes of this module; ``(low, high)`` means :class:`Uniform`.
        admit_probability: Share of unknown ids that get a row when looked up in training, in ``[0, 1]``, decided by a
            hash of (seed, id, step).
        weight_bound: Weights are clamped to ``±weight_bound`` after each update; 0 switches it off.
        admit_min_count: An id gets a row at the earliest when this many training batches had it since it last had a
            row, from 1. Ids without row are counted exactly, for as many ids as there may be rows twice over; beyond
            that all counts are halved and ids at 0 forgotten.
    """

    emb_initialization: tuple[float, float] | Initialization = (-0.01, 0.01)
    admit_probability: float = 1.0
    weight_bound: float = 10
    admit_min_count: int = 1

    def __post_init__(self) -> None:
        """Check all fields and name every one that is wrong.

        Raises:
            ConfigError: A field is out of its range.
        """
        wrong = []
        if not isinstance(self._start(), Initialization):
            names = ", ".join(kind.__name__ for kind in get_args(Initialization))
            wrong.append(
                f"emb_initialization={self.emb_initialization!r}: want a tuple (low, high), or one of {names} of "
                "persia.embedding"
            )
        elif not self._starts_well():
            wrong.append(
                f"emb_initialization={self.emb_initialization}: want finite numbers, low <= high, std >= 0, shape > 0, "
                f"scale >= 0, lam from 0 to {MAX_POISSON_MEAN}"
            )
        if not 0 <= self.admit_probability <= 1:
            wrong.append(f"admit_probability={self.admit_probability}: want 0 to 1")
        if not (math.isfinite(self.weight_bound) and self.weight_bound >= 0):
            wrong.append(f"weight_bound={self.weight_bound}: want a finite number of at least 0")
        if not (isinstance(self.admit_min_count, int) and 1 <= self.admit_min_count <= MAX_MIN_COUNT):
            wrong.append(f"admit_min_count={self.admit_min_count}: want a whole number from 1 to {MAX_MIN_COUNT}")
        if wrong:
            raise ConfigError("EmbeddingConfig: " + "; ".join(wrong))

    def _start(self) -> Initialization:
        start = self.emb_initialization
        return Uniform(*start) if isinstance(start, tuple) and len(start) == 2 else start

    def _starts_well(self) -> bool:
        try:
            return self._start()._is_valid()
        except TypeError:  # no number
            return False

    @property
    def initializer(self) -> InitializerSpec:
        """``emb_initialization`` as the store takes it."""
        return self._start()._spec


def get_default_embedding_config() -> EmbeddingConfig:
    """Return the configuration used where a context gets none."""
    return EmbeddingConfig()


@dataclass(frozen=True)
class Configuration:
    """A run's slots and general settings, parsed and valid.

    Attributes:
        source: What defines the slots, for messages.
        digest: Of that, equal on all ranks of a run.
        embedding: The slots.
        general: The job and its limits.
    """

    source: str
    digest: str
    embedding: _config.EmbeddingConfig
    general: _config.GlobalConfig

    @classmethod
    def find(cls) -> Self:
        """Read both files from where the environment, or a folder ``config/``, has them.

        Raises:
            ConfigError: There is no embedding configuration, or a file is wrong.
        """
        path = find_config("PERSIA_EMBEDDING_CONFIG", "embedding_config.yml")
        if path is None:
            raise ConfigError(
                "no embedding_config.yml: set PERSIA_EMBEDDING_CONFIG to its path, or put it into a folder config/ "
                "beside the script"
            )
        return cls.of(*read_config(path))

    @classmethod
    def of(cls, text: str, source: str) -> Self:
        """Take the text of an embedding configuration; the general one is read from its file, if there is one.

        Raises:
            ConfigError: Either is wrong; every mistake is named.
        """
        path = find_config("PERSIA_GLOBAL_CONFIG", "global_config.yml")
        embedding = _config.parse_embedding_config(text, source)
        general = _config.parse_global_config(*read_config(path)) if path else _config.GlobalConfig()
        for warning in (*embedding.warnings, *general.warnings):
            _logger.warning("%s", warning)
        return cls(source, sha256(text.encode()).hexdigest()[:16], embedding, general)
