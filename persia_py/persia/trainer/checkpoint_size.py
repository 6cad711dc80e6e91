"""How large a checkpoint of a configuration can be."""

from persia.config import Config
from persia.runtime.errors import DataError
from persia.trainer import models
from persia.trainer.parts import Parts

_ID_BYTES = 12
"""A row's id, and the step of its last push."""


def at_most(config: Config) -> tuple[int, int]:
    """Return the bytes that a checkpoint takes at most, and the rows of ``data.train`` that this follows from.

    Each row is taken to have one id of each feature that was not seen before; of bags and sequences with
    several ids in a row, only one is counted. A row takes ``dim`` weights of 4 bytes and its optimizer state: as many
    numbers again, twice as many for Adam, one with ``vectorwise_shared``. The model's weights count three times, for an
    optimizer of two moments.

    Args:
        config: The configuration.

    Raises:
        UsageError: A file does not exist.
        DataError: A file is damaged, or does not say how many rows it has.
    """
    inputs = models.inputs_of(config)
    rows = Parts(config).train.files.rows
    if rows is None:
        raise DataError("text files do not say how many rows they have")
    bytes_of_rows = sum(_ID_BYTES + 4 * (dim + _state(config, dim)) for dim in inputs.dims) * rows
    dense = sum(each.numel() * each.element_size() for each in models.build(config).parameters())
    return bytes_of_rows + 3 * dense, rows


def _state(config: Config, dim: int) -> int:
    """Return the numbers of optimizer state of a row of ``dim`` weights."""
    optimizer = config.train.embedding_optimizer
    if optimizer.name == "adam":
        return 2 * dim
    if optimizer.name == "adagrad":
        return 1 if optimizer.arguments.get("vectorwise_shared", True) else dim
    return dim if optimizer.arguments.get("momentum") else 0
