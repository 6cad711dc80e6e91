"""The state of the random generators of each rank, as a checkpoint stores it."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia.embedding.optim import Optimizer
from persia.runtime.errors import CheckpointError


def rank_state(rank: int) -> str:
    """Return the name of the file with a rank's random state and the digests of its data."""
    return f"rank-{rank}.state"


def is_rank_state(name: str) -> bool:
    """Whether a file of this name holds a rank's state."""
    return re.fullmatch(r"rank-[0-9]+\.state", name) is not None


def random_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's generators, and the embedding learning rate."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "embedding_lr": optimizer.lr,
    }


def check_random_state(state: dict[str, Any], optimizer: Optimizer, path: Path) -> None:
    """Check that ``restore_random_state(state, optimizer)`` would succeed.

    Raises:
        CheckpointError: A part is missing or is not a generator's state, or the optimizer rejects the learning rate.
    """
    try:
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(_of_numpy(state))
        torch.Generator().set_state(state["torch"].cpu())
        len(state["cuda"])
        optimizer.check_lr(state["embedding_lr"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: random state and learning rate cannot be restored: {type(error).__name__}: {error}"
        ) from error


def _of_numpy(state: dict[str, Any]) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state["numpy"]
    return name, np.array(keys, np.uint32), position, has_gauss, cached


def restore_random_state(state: dict[str, Any], optimizer: Optimizer) -> None:
    """Restore the result of :func:`random_state`."""
    random.setstate(state["python"])
    np.random.set_state(_of_numpy(state))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    optimizer.update_lr(state["embedding_lr"])
