"""Equal in, equal out: whatever holds the rows, and however many ranks share the batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Configure
from stack import MakeStack

SCRIPT = ROOT / "tests" / "integration" / "rank_script.py"

Result = dict[str, np.ndarray[Any, Any]]


def embedded(configure: Configure, tmp_path: Path, capacity: int, plan: dict[str, Any]) -> Result:
    """Train with the rows in the trainer's process."""
    import os
    import subprocess
    import sys

    configure("a: {dim: 4}\nb: {dim: 4}", capacity=capacity)
    out = tmp_path / "embedded.npz"
    words = [sys.executable, str(SCRIPT), json.dumps({**plan, "out": str(out)})]
    done = subprocess.run(words, env=dict(os.environ), check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(np.load(out))


def served(
    make_stack: MakeStack, tmp_path: Path, plan: dict[str, Any], *, servers: int, ranks: int, capacity: int
) -> Result:
    """Train with the rows on servers."""
    stack = make_stack(servers=servers, middlewares=min(servers, 2), capacity=capacity, job=f"job-{servers}-{ranks}")
    out = tmp_path / f"{servers}-{ranks}.npz"
    trainer = stack.trainer(SCRIPT, json.dumps({**plan, "out": str(out)}), ranks=ranks)
    assert trainer.wait() == 0, trainer.output
    stack.close()
    return dict(np.load(out))


def assert_bit_equal(one: Result, other: Result) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_reproducible_run_is_bit_equal_wherever_its_rows_are(
    make_stack: MakeStack, configure: Configure, tmp_path: Path, optimizer: str
) -> None:
    """Eviction included: the capacity is below the number of ids."""
    plan = {"steps": 40, "ids": 2000, "optimizer": optimizer}
    inside = embedded(configure, tmp_path, 512, plan)
    missing = int((inside["a"] == 0).all(1).sum())
    assert missing > 500, "too few rows were evicted"
    for servers in (1, 3):
        assert_bit_equal(inside, served(make_stack, tmp_path, plan, servers=servers, ranks=1, capacity=512))


def test_a_reproducible_run_of_two_ranks_is_bit_equal_on_any_number_of_servers(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    plan = {"steps": 40, "ids": 2000, "optimizer": "Adagrad"}
    results = [served(make_stack, tmp_path, plan, servers=count, ranks=2, capacity=512) for count in (1, 3)]
    assert_bit_equal(*results)


@pytest.mark.parametrize("reproducible", [True, False])
def test_two_ranks_of_half_a_batch_equal_one_rank_of_the_whole(
    make_stack: MakeStack, tmp_path: Path, reproducible: bool
) -> None:
    """With SGD to 1e-5: dense gradients are averaged, and embedding gradients divided by the number of ranks."""
    plan = {"steps": 30, "reproducible": True}
    whole = served(make_stack, tmp_path, plan, servers=1, ranks=1, capacity=100_000)
    halves = served(make_stack, tmp_path, {**plan, "reproducible": reproducible}, servers=2, ranks=2, capacity=100_000)
    tolerance = 1e-5 if reproducible else 5e-2  # look-ups that run ahead see rows of up to K steps ago
    for name in whole:
        np.testing.assert_allclose(halves[name], whole[name], atol=tolerance, rtol=0, err_msg=name)
