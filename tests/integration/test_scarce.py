"""If memory runs out on one of several ranks, all of them repeat the step with micro-batches of half the size."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from stack import missing

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from trainer_files import write_clicks, write_config

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.usefixtures("forks"),
]

MODEL = """\
import os

import torch

TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
MOST = int(os.environ.get("MOST", "0")) if os.environ.get("RANK") == "1" else 0
WHERE = os.environ.get("WHERE")


class Scarce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if WHERE == "forward" and 0 < MOST < len(x):
            raise RuntimeError(TEXT)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if WHERE == "backward" and 0 < MOST < len(gradient):
            raise RuntimeError(TEXT)
        return gradient


class Mine(torch.nn.Module):
    def __init__(self, num_dense, embedding_dims):
        super().__init__()
        self.hidden = torch.nn.Linear(num_dense + sum(embedding_dims), 8)
        self.top = torch.nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(1))  # DDP broadcasts it in the first forward of a step

    def forward(self, dense, embeddings):
        hidden = Scarce.apply(torch.relu(self.hidden(torch.cat([*dense, *embeddings], 1))))
        return self.top(hidden) * self.scale
"""
"""A model for which rank 1 has memory for no more than ``MOST`` rows."""


@pytest.fixture
def table(tmp_path: Path, no_job: None) -> Path:
    """A folder with a model and 700 rows. On two ranks, a run takes 12 steps of at most 40 rows for each rank."""
    (tmp_path / "mine.py").write_text(MODEL)
    write_clicks(tmp_path / "clicks.parquet", 700)
    return tmp_path


def trained(folder: Path, name: str, code: int = 0, env: dict[str, str] | None = None, **blocks: Any) -> str:
    """Train on two ranks, and return the output."""
    sgd = {"name": "sgd", "lr": 0.1}
    train = {"reproducible": True, "embedding_optimizer": sgd, "dense_optimizer": sgd, **blocks.pop("train", {})}
    data = {"batch_size": 80, "epochs": 2}
    write_config(
        folder, model={"class": "mine:Mine"}, run={"name": name, "log_every": 2}, data=data, train=train, **blocks
    )
    done = subprocess.run(
        [sys.executable, "-m", "persia", "train", "persia.yml", "--nproc", "2"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "140", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def result(folder: Path, name: str) -> tuple[list[Any], dict[str, torch.Tensor], list[int | None]]:
    """Return losses and norms, weights, and the micro-batch sizes that the last checkpoint has."""
    run = folder / "runs" / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [each for line in lines for each in (line.get("loss"), line.get("grad_norm")) if each is not None]
    last = max((run / "checkpoints").glob("**/step-*"), key=lambda path: int(path.name[5:]))
    state = torch.load(last / "state.pt", weights_only=True)["trainer"]["micro_batch"]
    return losses, torch.load(last / "dense.pt", weights_only=True), state


def check(folder: Path, name: str, where: str) -> None:
    """Train with memory for 10 rows on rank 1, and compare with the run that has ``micro_batch: 10``."""
    output = trained(folder, name, env={"MOST": "10", "WHERE": where}, parallel=name)
    (losses, weights, given), found = result(folder, "given"), result(folder, name)
    assert given == [None, None] and len(losses) >= 10
    assert found[0] == pytest.approx(losses, abs=1e-6)
    for key, value in weights.items():
        torch.testing.assert_close(found[1][key], value, atol=1e-6, rtol=1e-5)
    assert found[2] == [None, 10]
    told = re.findall(r"rank ([01])\D.*step 1: memory ran out with (\d+) rows", output)
    assert sorted(told) == [(rank, rows) for rank in "01" for rows in ("20", "40")], output
    assert "rank 1: step 1, 40 rows at a time: DefaultCPUAllocator" in output


@pytest.mark.nightly
@pytest.mark.row("S4-13")
def test_all_ranks_halve_together_where_one_has_no_memory(table: Path) -> None:
    """The result equals that of a run whose ``micro_batch`` has the final number of rows."""
    trained(table, "given", train={"micro_batch": 10})
    check(table, "ddp", "forward")


@pytest.mark.nightly
@pytest.mark.row("S4-13")
def test_shards_halve_as_whole_copies_do(table: Path) -> None:
    trained(table, "given", train={"micro_batch": 10})
    check(table, "fsdp", "backward")
    check(table, "ddp", "backward")


@pytest.mark.nightly
@pytest.mark.row("S3-01")
def test_no_rank_has_memory_for_one_row(table: Path) -> None:
    """All ranks end with the report of the rank that has no memory."""
    (table / "mine.py").write_text(MODEL.replace("0 < MOST < len", "0 <= MOST < len"))
    output = trained(table, "none", code=1, env={"WHERE": "forward"})
    assert re.search(r"rank [01]: step 1, 1 row at a time: DefaultCPUAllocator", output), output
    assert "to use less memory: --set precision=bf16" in output
