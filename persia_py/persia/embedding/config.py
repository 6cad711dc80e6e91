"""Initial weights, admission, the bound of weights (:class:`EmbeddingConfig`), and the parsed YAML files."""

import math
from dataclasses import dataclass
from hashlib import sha256
from typing import get_args

from typing_extensions import Self

from persia.runtime.config_files import EMBEDDING_CONFIG, GLOBAL_CONFIG, find_config, persia_config, read_config
from persia.runtime.errors import ConfigError, UsageError
from persia.runtime.logging import get_logger
from persia_core import config as _config
from persia_core.features import Features
from persia_core.optim import InitializerSpec

_logger = get_logger("configs")

MAX_MIN_COUNT = 65_535
MAX_POISSON_MEAN = 500


@dataclass(frozen=True)
class Uniform:
    """Initial weights with a uniform distribution in ``[low, high)``: ``low + (high - low) * u``."""

    low: float
    high: float

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.uniform(self.low, self.high)

    def _is_valid(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high


@dataclass(frozen=True)
class Normal:
    """Normally distributed initial weights: ``mean + std * n``, with ``n`` drawn by Box and Muller's method (1958)."""

    mean: float = 0.0
    std: float = 0.01

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.normal(self.mean, self.std)

    def _is_valid(self) -> bool:
        return math.isfinite(self.mean) and math.isfinite(self.std) and self.std >= 0


@dataclass(frozen=True)
class Zero:
    """Initial weights of zero."""

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.zero()

    def _is_valid(self) -> bool:
        return True


@dataclass(frozen=True)
class Gamma:
    """Initial weights with a gamma distribution of mean ``shape * scale`` and variance ``shape * scale ** 2``.

    The weights are drawn by the method of Marsaglia and Tsang (2000).
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
    """Initial weights with a Poisson distribution of mean and variance ``lam``, at most 500.

    The weights are drawn by multiplying uniform numbers (Knuth, The Art of Computer Programming 2, section 3.4.1).
    """

    lam: float

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.poisson(self.lam)

    def _is_valid(self) -> bool:
        return 0 <= self.lam <= MAX_POISSON_MEAN


@dataclass(frozen=True)
class InverseSqrtDim:
    """Initial weights, uniform in ``[-b, b)`` with ``b = 1 / sqrt(dim)``; PersiaML's ``InverseEmbeddingSizeSqrt``.

    The expected squared length of a row is 1/3 for any dimension.
    """

    @property
    def _spec(self) -> InitializerSpec:
        return InitializerSpec.inverse_sqrt_dim()

    def _is_valid(self) -> bool:
        return True


Initialization = Uniform | Normal | Zero | Gamma | Poisson | InverseSqrtDim


@dataclass(frozen=True)
class EmbeddingConfig:
    """Initial weights of rows, admission of ids, and the bound of weights.

    The embedding of an id without a row is zero. Gradients of such an id are dropped and counted.

    Attributes:
        emb_initialization: One of the classes of this module; ``(low, high)`` means :class:`Uniform`.
        admit_probability: The probability that an id without a row gets one at a push, in ``[0, 1]``.
            The draw is a hash of seed, id and step.
        weight_bound: Weights are clamped to ``±weight_bound`` after each update; 0 means no bound.
        admit_min_count: The number of pushes of an id, from 1, at which the id gets a row. The count restarts when the
            id loses its row. Counts are exact for twice as many ids as the capacity. With more ids, all counts are
            halved, and ids whose count is 0 are dropped.
    """

    emb_initialization: tuple[float, float] | Initialization = (-0.01, 0.01)
    admit_probability: float = 1.0
    weight_bound: float = 10
    admit_min_count: int = 1

    def __post_init__(self) -> None:
        """Check all fields. The error names all invalid ones.

        Raises:
            ConfigError: A field is out of its range.
        """
        wrong = []
        if not isinstance(self._initialization(), Initialization):
            names = ", ".join(kind.__name__ for kind in get_args(Initialization))
            wrong.append(
                f"emb_initialization={self.emb_initialization!r}: expected a tuple (low, high), or one of {names} of "
                "persia.embedding"
            )
        elif not self._has_valid_parameters():
            wrong.append(
                f"emb_initialization={self.emb_initialization}: expected finite numbers, low <= high, std >= 0, "
                f"shape > 0, scale >= 0, lam from 0 to {MAX_POISSON_MEAN}"
            )
        if not 0 <= self.admit_probability <= 1:
            wrong.append(f"admit_probability={self.admit_probability}: must be from 0 to 1")
        if not (math.isfinite(self.weight_bound) and self.weight_bound >= 0):
            wrong.append(f"weight_bound={self.weight_bound}: must be a finite number of at least 0")
        if not (isinstance(self.admit_min_count, int) and 1 <= self.admit_min_count <= MAX_MIN_COUNT):
            wrong.append(f"admit_min_count={self.admit_min_count}: must be an integer from 1 to {MAX_MIN_COUNT}")
        if wrong:
            raise ConfigError("EmbeddingConfig: " + "; ".join(wrong))

    def _initialization(self) -> Initialization:
        given = self.emb_initialization
        return Uniform(*given) if isinstance(given, tuple) and len(given) == 2 else given

    def _has_valid_parameters(self) -> bool:
        try:
            return self._initialization()._is_valid()
        except TypeError:  # a parameter is not a number
            return False

    @property
    def initializer(self) -> InitializerSpec:
        """``emb_initialization`` in the form that the store reads."""
        return self._initialization()._spec


def get_default_embedding_config() -> EmbeddingConfig:
    """Return the configuration of a context to which none is passed."""
    return EmbeddingConfig()


@dataclass(frozen=True)
class Configuration:
    """The two configuration files of a run, parsed and checked.

    Attributes:
        source: The name of the embedding configuration in messages.
        digest: The digest of its text, which must be equal on all ranks of a run.
        embedding: The slots.
        general: The name and the limits of the job.
    """

    source: str
    digest: str
    embedding: _config.EmbeddingConfig
    general: _config.GlobalConfig

    def check_trains(self) -> None:
        """Check that the servers of the job accept changes of rows.

        Raises:
            UsageError: The job serves a checkpoint.
        """
        if self.general.serves:
            raise UsageError(
                "global_config.yml has job_type: Infer: servers of such a job serve a checkpoint, change no row and "
                "are not found through NATS; read from them with InferCtx, or train and evaluate with job_type: Train"
            )

    @classmethod
    def find(cls) -> Self:
        """Read both files. Environment variables name them; otherwise they are in the folder ``config/``.

        With ``PERSIA_CONFIG``, the slots are those of the features in the ``persia.yml`` that it names.

        Raises:
            ConfigError: The embedding configuration is missing, or a file has errors.
        """
        if (whole := persia_config()) is not None:
            text, source = read_config(whole)
            return cls.of_slots(Features.parse(text, source).embedding_config(), text, source)
        path = find_config(EMBEDDING_CONFIG, "embedding_config.yml")
        if path is None:
            raise ConfigError(
                "no embedding_config.yml: set PERSIA_EMBEDDING_CONFIG to its path, or put it into the folder config/ "
                "next to the script; or set PERSIA_CONFIG to the path of a persia.yml",
                hint="",
            )
        return cls.of(*read_config(path))

    @classmethod
    def of(cls, text: str, source: str) -> Self:
        """Parse the text of an embedding configuration, and read the global one if it exists.

        Raises:
            ConfigError: A file has errors; the message lists all of them.
        """
        return cls.of_slots(_config.parse_embedding_config(text, source), text, source)

    @classmethod
    def of_slots(cls, embedding: _config.EmbeddingConfig, text: str, source: str) -> Self:
        """Use slots that are already parsed, and read the global configuration if it exists.

        Args:
            embedding: The slots.
            text: The text of the slots, for the digest.
            source: The name of the text in messages.

        Raises:
            ConfigError: The global configuration has errors.
        """
        path = find_config(GLOBAL_CONFIG, "global_config.yml")
        general = _config.parse_global_config(*read_config(path)) if path else _config.GlobalConfig()
        if warnings := [*embedding.warnings, *general.warnings]:
            _logger.warning("%s", "; ".join(warnings))
        return cls(source, sha256(text.encode()).hexdigest()[:16], embedding, general)
