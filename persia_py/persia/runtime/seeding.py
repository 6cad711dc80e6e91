"""Seeds random numbers, for reproducible results."""

import os
import random


def setup_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, and select torch's deterministic algorithms.

    The seed also determines new embedding rows, because the seed of a run is ``torch.initial_seed()``.
    """
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
