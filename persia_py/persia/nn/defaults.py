"""The defaults of an :class:`~persia.nn.EmbeddingCollection`.

The values were chosen by measurements (docs/performance.md). They differ from the defaults of ``TrainCtx``, which are
PersiaML's.
"""

from typing import Any

from persia.checkpoint import snapshot
from persia.embedding.config import EmbeddingConfig, get_default_embedding_config
from persia.embedding.optim import Adagrad, Optimizer
from persia.runtime.errors import CheckpointError, ConfigError, UsageError

STATE = "collection.state"
"""The file that a collection adds to a checkpoint. No state dict of a user has such a name."""


def default_optimizer(lr: float = 0.1) -> Adagrad:
    """Return a new optimizer of rows for a loss that is a mean over the batch.

    The result is ``Adagrad(lr, initial_accumulator_value=1e-6, vectorwise_shared=True)``, with a single state value per
    row. If the loss is a sum, gradients are larger by the factor of the batch size, and the first updates are too
    large. In this case, use ``Adam(lr=0.01)``, whose steps do not depend on the scale of the loss.

    Raises:
        ConfigError: ``lr`` is not finite or is negative.
    """
    return Adagrad(lr, initial_accumulator_value=1e-6, vectorwise_shared=True)


def default_embedding_config() -> EmbeddingConfig:
    """Return the configuration of new rows: uniform in [-0.05, 0.05), other values as in :class:`EmbeddingConfig`."""
    return EmbeddingConfig((-0.05, 0.05))


def as_optimizer(given: object) -> Optimizer | None:
    """Return the optimizer for an argument; ``"default"`` means that the script passed none.

    Raises:
        UsageError: The argument is not an optimizer.
    """
    if given == "default":
        return default_optimizer()
    if given is None or isinstance(given, Optimizer):
        return given
    raise UsageError(
        "EmbeddingCollection(optimizer=...): expected an optimizer of persia.embedding.optim, or None to evaluate "
        f"only, found {type(given).__name__}"
    )


def range_of(config: EmbeddingConfig) -> dict[str, Any]:
    """Return the state that :func:`saved_default` reads, for a collection whose script passes no configuration."""
    return {"new_rows": config.emb_initialization}


def saved_default(loaded: snapshot.Load) -> EmbeddingConfig:
    """Return the configuration of rows that are inserted after a checkpoint is loaded, if the script passes none.

    The configuration has the range of initial weights that the checkpoint recorded. Imported rows continue with
    :func:`default_embedding_config`. Checkpoints of an older version or of a context continue with PersiaML's defaults.

    Raises:
        CheckpointError: The saved range is invalid.
    """
    if loaded.imported:
        return default_embedding_config()
    saved = loaded.state(STATE).get("new_rows") if STATE in loaded.names else None
    try:
        return EmbeddingConfig(saved) if saved else get_default_embedding_config()
    except ConfigError as error:
        raise CheckpointError(
            f"{loaded.path}: {STATE}: {error}", hint="pass config=EmbeddingConfig(...) to the EmbeddingCollection"
        ) from error
