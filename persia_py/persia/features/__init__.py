"""Feature transforms: the blocks ``features`` and ``labels`` of ``persia.yml``.

A description is compiled once. It makes the same ids and floats of the same values in training, evaluation,
prediction and serving, from Arrow tables and from JSON records::

    features = read_features("persia.yml")
    transform = features.fit(training_table)      # pyarrow, polars, duckdb, pandas 3
    batch = to_batch(transform(some_rows))        # for DataLoader and TrainCtx
    served = transform('[{"user": "u1"}]', strict=False, labels=False)

* :class:`Features`: what the file declares; ``embedding_config()`` has its slots and tables
* :class:`Fitter`: one pass over the training data, for data that is not one stream; it can be merged
* :class:`Transform`: features with their fitted numbers; ``digest`` is equal where ids, floats and labels are
* :class:`Samples`: ids, floats and labels of rows, and a :class:`Report` of what was unusual about them

The types of features and their rules are in ``docs/transforms.md``.
"""

from pathlib import Path

from persia.embedding.data import PersiaBatch
from persia.runtime.config_files import read_config
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


def read_features(path: Path | str) -> Features:
    """Read the features and labels of a ``persia.yml``.

    Raises:
        ConfigError: The file cannot be read, or has mistakes; the message and ``findings`` have all of them.
    """
    return Features.parse(*read_config(Path(path)))


def to_batch(samples: Samples, *, requires_grad: bool = True, meta: bytes | None = None) -> PersiaBatch:
    """Return the batch of these rows: its slots, one dense input ``[rows, columns]``, and a label ``[rows, 1]`` each.

    Args:
        samples: At least one row.
        requires_grad: Whether the batch is for training, which needs labels.
        meta: Bytes that are sent with the batch.

    Raises:
        MissingLabelError: ``requires_grad`` is set, and the rows were transformed without labels.
        BatchSizeError: There is no row.
        DataError: There are more ids than a batch may hold.
    """
    return PersiaBatch.wrap(samples.batch(requires_grad, meta))
