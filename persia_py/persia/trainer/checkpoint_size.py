"""The estimated size of a checkpoint of a configuration."""

from persia.config import Config
from persia.runtime.errors import DataError
from persia.trainer import models
from persia.trainer.parts import Parts

_ID_BYTES = 12
"""The bytes of a row's id and of the step of its last push."""


def estimate(config: Config) -> tuple[int, int]:
    """Return the estimated size of a checkpoint in bytes, and the number of rows of ``data.train`` that it assumes.

    The estimate assumes that each training row has one new id for each feature. Of a bag or sequence with several ids,
    only one id is counted. An embedding row has ``dim`` weights of 4 bytes and its optimizer state. The number of its
    values is twice ``dim`` for Adam, ``dim`` for Adagrad and for SGD with momentum, 1 for Adagrad with
    ``vectorwise_shared``, and 0 for SGD without momentum. The model's weights count three times, as for an optimizer
    with two moments.

    Args:
        config: The configuration.

    Raises:
        UsageError: A file does not exist.
        DataError: A file is damaged, or does not record its number of rows.
    """
    inputs = models.inputs_of(config)
    rows = Parts(config).train.files.rows
    if rows is None:
        raise DataError("text files do not record their number of rows")
    bytes_of_rows = sum(_ID_BYTES + 4 * (dim + _state(config, dim)) for dim in inputs.dims) * rows
    dense = sum(each.numel() * each.element_size() for each in models.build(config).parameters())
    return bytes_of_rows + 3 * dense, rows


def _state(config: Config, dim: int) -> int:
    """Return the number of optimizer state values of a row with ``dim`` weights."""
    optimizer = config.train.embedding_optimizer
    if optimizer.name == "adam":
        return 2 * dim
    if optimizer.name == "adagrad":
        return 1 if optimizer.arguments.get("vectorwise_shared", True) else dim
    return dim if optimizer.arguments.get("momentum") else 0
