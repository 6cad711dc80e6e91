"""Functions of the compiled extension, under PersiaML's import path."""

import numpy as np
import numpy.typing as npt

from persia.embedding.data import NdarrayDataBase
from persia.runtime.errors import FeatureTypeError
from persia_core import BUILD_INFO

__all__ = ["check_pyarray_dtype_valid", "is_cuda_feature_available"]


def check_pyarray_dtype_valid(array: npt.NDArray[np.generic], dtype: npt.DTypeLike) -> None:
    """Check that a dense input or a label may be ``array``.

    Raises:
        FeatureTypeError: The array has a dtype that a batch cannot hold, or its dtype is not ``dtype``.
    """
    if NdarrayDataBase(array).data.dtype != np.dtype(dtype):
        raise FeatureTypeError(f"expected an array of {np.dtype(dtype)}, found {array.dtype}")


def is_cuda_feature_available() -> bool:
    """Return whether this build can train on CUDA devices."""
    return "cuda" in BUILD_INFO.get("features", "")
