"""The AUC of a single column as a predictor of the label."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persia.data.inspect.columns import Column, numbers_of

LEAK = 0.95
"""The AUC of a single column above which its values are probably known only after the label."""
_BINS = 256
_PRIOR = 10.0


def auc(scores: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve, or 0.5 if one class is missing. A pair of equal scores counts one half."""
    positives = int(labels.sum())
    if positives in (0, len(labels)):
        return 0.5
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[places]
    return float((ranks[labels].sum() - positives * (positives + 1) / 2) / positives / (len(labels) - positives))


def alone(column: Column, labels: npt.NDArray[np.bool_]) -> float | None:
    """Return the AUC of the mean label by value, computed on one half of the sample and scored on the other half.

    Columns with many numbers are divided into 256 intervals with equally many rows. Means are shrunk towards the mean
    of all rows with the weight of 10 rows. Null counts as a value. Lists have no AUC.
    """
    if column.many or column.kind == "other" or len(labels) < 200:
        return None
    codes = _codes(column.values)
    learnt = np.arange(len(labels)) % 2 == 0
    sums = np.bincount(codes[learnt], labels[learnt], codes.max() + 1)
    counts = np.bincount(codes[learnt], minlength=codes.max() + 1)
    means = (sums + _PRIOR * labels[learnt].mean()) / (counts + _PRIOR)
    return auc(means[codes[~learnt]], labels[~learnt])


def _codes(values: pa.Array) -> npt.NDArray[np.int64]:
    """Return an integer code for each value; many distinct numbers are coded by intervals."""
    if pa.types.is_temporal(values.type):
        values = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    numeric = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if numeric and len(values.unique()) > _BINS:
        numbers = numbers_of(values)
        edges = np.unique(np.nanquantile(numbers, np.linspace(0, 1, _BINS + 1)[1:-1]))
        return np.where(np.isnan(numbers), len(edges) + 1, np.searchsorted(edges, numbers)).astype(np.int64)
    encoded = pc.dictionary_encode(values, null_encoding="encode")
    found: npt.NDArray[np.int64] = np.asarray(encoded.indices, np.int64)
    return found
