"""Tests that need a CUDA device. Without one, they are skipped, or fail under ``make test-gpu``."""

import os

import pytest
import torch

import persia_core


def missing() -> str:
    """Return the reason why the tests cannot run here; empty if they can."""
    if "cuda" not in persia_core.FEATURES:
        return f"{persia_core.__file__} was built without the feature cuda: make setup"
    if not torch.cuda.is_available():
        return "no CUDA device here: nvidia-smi"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests, or fail immediately if they were requested."""
    mine = [item for item in items if "gpu" in item.path.parts]
    reason = missing()
    if not mine or not reason:
        return
    if os.environ.get("PERSIA_TEST_GPU"):
        pytest.exit(f"the tests of CUDA devices cannot run: {reason}", returncode=2)
    for item in mine:
        item.add_marker(pytest.mark.skip(reason=reason))
