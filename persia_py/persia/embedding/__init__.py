"""How embedding rows start and are bounded. Features and batches: ``data``; optimizers: ``optim``."""

import math
from dataclasses import dataclass

from persia.errors import ConfigError


@dataclass(frozen=True)
class EmbeddingConfig:
    """How embedding rows start, and how far they may go.

    Attributes:
        emb_initialization: New weights are uniform in ``[low, high)``.
        admit_probability: Share of unknown ids that get a row when looked up in training, in ``[0, 1]``.
        weight_bound: Weights are clamped to ``±weight_bound`` after each update; 0 switches it off.
    """

    emb_initialization: tuple[float, float] = (-0.01, 0.01)
    admit_probability: float = 1.0
    weight_bound: float = 10

    def __post_init__(self) -> None:
        """Check all fields and name every one that is wrong.

        Raises:
            ConfigError: A field is out of its range.
        """
        wrong = []
        low, high = self.emb_initialization
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            wrong.append(f"emb_initialization={self.emb_initialization}: want finite numbers, low <= high")
        if not 0 <= self.admit_probability <= 1:
            wrong.append(f"admit_probability={self.admit_probability}: want 0 to 1")
        if not (math.isfinite(self.weight_bound) and self.weight_bound >= 0):
            wrong.append(f"weight_bound={self.weight_bound}: want a finite number of at least 0")
        if wrong:
            raise ConfigError("EmbeddingConfig: " + "; ".join(wrong))


def get_default_embedding_config() -> EmbeddingConfig:
    """Return the configuration used where a context gets none."""
    return EmbeddingConfig()
