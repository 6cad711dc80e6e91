"""The state of the random generators of each rank, as a checkpoint stores it."""

import random
import re
from typing import Any

import numpy as np
import torch

from persia.embedding.optim import Optimizer
from persia.runtime.errors import CheckpointError, ConfigError
from persia.runtime.places import Place


def rank_state(rank: int) -> str:
    """Return the name of the file that holds a rank's random state and the digests of its data."""
    return f"rank-{rank}.state"


def is_rank_state(name: str) -> bool:
    """Whether a file of this name holds a rank's state."""
    return re.fullmatch(r"rank-[0-9]+\.state", name) is not None


def random_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of the random generators of Python, numpy and torch, and the embedding learning rate."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "embedding_lr": optimizer.lr,
    }


def check_random_state(state: dict[str, Any], optimizer: Optimizer, path: Place) -> None:
    """Check that ``restore_random_state(state, optimizer)`` would succeed.

    Raises:
        CheckpointError: An entry is missing or is not a generator's state, or the optimizer refuses the learning rate.
    """
    try:
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(_of_numpy(state))
        torch.Generator().set_state(state["torch"].cpu())
        len(state["cuda"])
        optimizer.check_lr(state["embedding_lr"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        hint = "use the versions of Python, numpy and torch that saved the checkpoint, or load another checkpoint"
        raise CheckpointError(
            f"{path}: the random state or the learning rate cannot be restored: {type(error).__name__}: {error}",
            hint="" if isinstance(error, ConfigError) else hint,  # a ConfigError names the allowed rates
        ) from error


def _of_numpy(state: dict[str, Any]) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state["numpy"]
    return name, np.array(keys, np.uint32), position, has_gauss, cached


def restore_random_state(state: dict[str, Any], optimizer: Optimizer) -> None:
    """Restore a state that :func:`random_state` returned.

    The CUDA generators are restored only if this process has as many devices as the process that saved the state.
    """
    random.setstate(state["python"])
    np.random.set_state(_of_numpy(state))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    optimizer.update_lr(state["embedding_lr"])
