"""Feature transforms: the blocks ``features`` and ``labels`` of ``persia.yml``.

A description is compiled once. It converts equal values to equal ids and floats in training, evaluation, prediction and
serving, from Arrow tables and from JSON records::

    features = read_features("persia.yml")
    transform = features.fit(training_table)      # pyarrow, polars, duckdb, pandas
    batch = to_batch(transform(some_rows))        # for DataLoader and TrainCtx
    served = transform('[{"user": "u1"}]', strict=False, labels=False)

* :class:`Features`: the declarations of the file; ``embedding_config()`` has its slots and tables
* :class:`Fitter`: one pass over the training data, for data that is not a single stream; fitters can be merged
* :class:`Transform`: features with their fitted values; transforms with the same ``digest`` give the same results
* :class:`Samples`: ids, floats and labels of rows, and a :class:`Report` of their unusual values

The types of features and their rules are in ``docs/transforms.md``.
"""

from pathlib import Path

from persia.embedding.data import PersiaBatch
from persia.features.slots import differences
from persia.runtime.config_files import CONFIG, EMBEDDING_CONFIG, find_config, read_config
from persia.runtime.errors import ConfigError
from persia.runtime.logging import get_logger
from persia.runtime.settings import variable
from persia_core.config import parse_embedding_config
from persia_core.features import Features, Fitter, Report, Samples, Transform, hash_cross, hash_text

__all__ = [
    "Features",
    "Fitter",
    "Report",
    "Samples",
    "Transform",
    "hash_cross",
    "hash_text",
    "read_features",
    "to_batch",
]

_logger = get_logger("features")

_SHOWN = 20
"""The maximum number of differences that a warning lists."""


def read_features(path: Path | str) -> Features:
    """Read the features and labels of a ``persia.yml``.

    The slots of a context come from ``PERSIA_CONFIG``, which names this file, or from an ``embedding_config.yml``. In
    the latter case, a warning lists differences between its slots and the features.

    Raises:
        ConfigError: The file cannot be read, or has errors. The message and ``findings`` list all of them.
    """
    given = read_config(Path(path))
    features = Features.parse(*given)
    _warn_of_other_slots(given)
    return features


def _warn_of_other_slots(given: tuple[str, str]) -> None:
    """Log the differences between the features and the slots that the next context of a script will have."""
    if variable(CONFIG) is not None:
        return
    try:
        path = find_config(EMBEDDING_CONFIG, "embedding_config.yml")
        slots = None if path is None else read_config(path)
        if slots is None:
            return
        parse_embedding_config(*slots)
    except ConfigError:
        return  # a context that needs the file raises the same error
    if found := differences(given, slots):
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        lines = "".join(f"\n  {each}" for each in [*found[:_SHOWN], *more])
        _logger.warning(
            "the slots of %s differ from the features of %s; to use the features, set PERSIA_CONFIG=%s. Differences:%s",
            *(path, given[1], given[1], lines),
        )


def to_batch(samples: Samples, *, requires_grad: bool = True, meta: bytes | None = None) -> PersiaBatch:
    """Return a batch of these rows: its slots, one dense input ``[rows, columns]``, and labels ``[rows, 1]``.

    Args:
        samples: The transformed rows, at least one.
        requires_grad: Whether the batch is for training, which needs labels.
        meta: Bytes that are sent with the batch.

    Raises:
        MissingLabelError: ``requires_grad`` is set, and the rows were transformed without labels.
        BatchSizeError: There are no rows.
        DataError: There are more ids than a batch may hold.
    """
    return PersiaBatch.wrap(samples.batch(requires_grad, meta))
