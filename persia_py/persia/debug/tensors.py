"""Saves tensors to files and compares them element by element, to find differences between two runs or ranks."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from persia.runtime.errors import StorageError, UsageError
from persia.runtime.settings import settings

FOLDER = "tensors"
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@dataclass(frozen=True)
class Comparison:
    """The difference between two tensors.

    Attributes:
        max_abs: The largest absolute difference.
        max_rel: The largest difference relative to the larger of the two absolute values.
        max_ulp: The largest difference in units in the last place; 0 for dtypes other than float16, bfloat16, float32
            and float64.
        at: The index of the largest absolute difference; None if the tensors are equal.
        differing: The number of elements that differ. Two NaN count as equal; NaN and a number differ.
        elements: The number of elements.
    """

    max_abs: float
    max_rel: float
    max_ulp: int
    at: tuple[int, ...] | None
    differing: int
    elements: int

    def __repr__(self) -> str:
        """Return a text to show at a prompt."""
        if not self.differing:
            return f"equal: {self.elements} elements"
        return (
            f"{self.differing} of {self.elements} elements differ; max abs {self.max_abs:.6g} at "
            f"{list(self.at or ())}, rel {self.max_rel:.6g}, ulp {self.max_ulp}"
        )


def save_tensor(
    name: str, tensor: torch.Tensor, folder: str | os.PathLike[str] = FOLDER, *, overwrite: bool = False
) -> Path:
    """Save a tensor as ``folder/NAME.rank-R.npy``, and return the path. bfloat16 becomes float32, which is exact.

    Raises:
        StorageError: The file cannot be written.
        UsageError: The file exists and ``overwrite`` is false, the name is not that of a file, or ``tensor`` is not a
            tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"save_tensor({name!r}, {type(tensor).__name__}): expected a tensor")
    path = _path(name, settings.rank, folder)
    if path.exists() and not overwrite:
        raise UsageError(
            f"cannot save the tensor to {path}: the file exists", hint="use another name or folder, or overwrite=True"
        )
    whole = tensor.detach().cpu()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy())
    except OSError as error:
        raise StorageError(f"cannot save the tensor to {path}: {error.strerror or error}") from error
    return path


def load_tensor(name: str, rank: int | None = None, folder: str | os.PathLike[str] = FOLDER) -> torch.Tensor:
    """Return a tensor that :func:`save_tensor` saved; ``rank=None`` means this rank.

    Raises:
        UsageError: The file does not exist or does not hold a tensor.
    """
    path = _path(name, settings.rank if rank is None else rank, folder)
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot load a tensor from {path}: {why}; expected a file of save_tensor") from error


def _path(name: str, rank: int, folder: str | os.PathLike[str]) -> Path:
    if not name or "/" in name or name.startswith("."):
        raise UsageError(f"tensor name {name!r}: expected a file name without / that does not begin with a dot")
    return Path(folder, f"{name}.rank-{rank}.npy")


def compare(a: torch.Tensor, b: torch.Tensor) -> Comparison:
    """Return how much two tensors of one shape and dtype differ.

    Raises:
        UsageError: An argument is not a tensor, shapes or dtypes differ, or the tensors are empty.
    """
    for each in (a, b):
        if not isinstance(each, torch.Tensor):
            raise UsageError(f"compare: expected two tensors, found {type(each).__name__}")
    if a.shape != b.shape or a.dtype != b.dtype:
        found = f"{tuple(a.shape)} of {a.dtype} and {tuple(b.shape)} of {b.dtype}"
        raise UsageError(f"compare: expected two tensors of the same shape and dtype, found {found}")
    if a.numel() == 0:
        raise UsageError("compare: the tensors are empty, so nothing can be compared")
    a, b = a.detach().cpu(), b.detach().cpu()
    same = (a == b) | (a.isnan() & b.isnan())
    ulp = 0 if same.all() or a.dtype not in _BITS else _max_ulp(a[~same], b[~same])
    wide = torch.complex128 if a.is_complex() else torch.float64
    left, right = a.to(wide), b.to(wide)
    zero = torch.zeros((), dtype=torch.float64)
    absolute = torch.where(same, zero, (left - right).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest = torch.maximum(left.abs(), right.abs())
    relative = torch.where(same, zero, absolute / largest).nan_to_num(nan=torch.inf, posinf=torch.inf)
    differing = int((~same).sum())
    place = tuple(int(each) for each in np.unravel_index(int(absolute.argmax()), a.shape)) if differing else None
    return Comparison(float(absolute.max()), float(relative.max()), ulp, place, differing, a.numel())


def _max_ulp(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest distance between corresponding floats, in units in the last place."""
    left, right = _ordered(a), _ordered(b)
    far = (left.double() - right.double()).abs()
    wraps = far > 2.0**62  # the distance of two float64 values may exceed the range of int64
    exact = torch.where(wraps, 0, (left - right).abs())
    return max(int(exact.max()), int(torch.where(wraps, far, 0.0).max()))


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of the floats; adjacent floats differ by one (both zeros are 0)."""
    bits = tensor.contiguous().view(_BITS[tensor.dtype]).to(torch.int64)
    least = torch.iinfo(_BITS[tensor.dtype]).min
    return torch.where(bits < 0, least - bits, bits)
