"""The memory of this process and of its GPU."""

import psutil
import torch


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def device(number: int | None) -> dict[str, int]:
    """Return the memory of this process on a GPU in bytes, as PyTorch counts it; nothing on the CPU.

    ``allocated`` is the memory of tensors, and ``reserved`` the memory that PyTorch holds for tensors.
    ``max_allocated`` and ``max_reserved`` are their maxima so far.
    """
    if number is None or not torch.cuda.is_available():
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(number),
        "reserved": torch.cuda.memory_reserved(number),
        "max_allocated": torch.cuda.max_memory_allocated(number),
        "max_reserved": torch.cuda.max_memory_reserved(number),
    }


def whole_device(number: int | None) -> dict[str, int]:
    """Return the memory of a GPU that all processes use, and its size, in bytes; nothing on the CPU."""
    if number is None or not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info(number)
    return {"used": total - free, "total": total}


def used(number: int | None) -> dict[str, int]:
    """Return ``resident`` and the values of :func:`device`: the field ``memory`` of a report."""
    return {"resident": resident(), **device(number)}
