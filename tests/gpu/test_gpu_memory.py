"""The memory of a CUDA device: behavior when the memory runs out, and the memory that a closed run leaves."""

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from persia.errors import OutOfMemoryError
from persia.trainer import models

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from test_trainer_memory import SGD, results, small
from trainer_files import fit

# Torch decides once per process whether its operations are deterministic, so an earlier test may have disabled this.
# With staleness 1, runs on one device are equal except for rounding.
TRAIN: dict[str, Any] = {**SGD, "reproducible": False, "staleness": 1}
LARGE = 1 << 22
"""Numbers of the largest tensor that a report names."""


class Greedy(torch.nn.Module):
    """A model that needs a share of the device's memory for each row."""

    def __init__(self, model: torch.nn.Module, row_bytes: int) -> None:
        super().__init__()
        self.model, self.row_bytes = model, row_bytes
        self.large = torch.nn.Parameter(torch.ones(LARGE))
        self.sizes: list[int] = []

    def forward(self, dense: Any, embeddings: Any) -> torch.Tensor:
        output: torch.Tensor = self.model(dense, embeddings)
        assert output.is_cuda and self.large.is_cuda
        scratch = torch.empty(len(output), self.row_bytes, dtype=torch.uint8, device=output.device)
        self.sizes.append(len(output))
        output = output + 0.0 * scratch[:, :1] + 0.0 * self.large[0]
        del scratch
        torch.cuda.empty_cache()  # otherwise a gradient may get a part of the freed block, and the rest is too small
        return output


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on device 0, whose memory other programs hardly use."""
    monkeypatch.setenv("GPU_NUM", "1")


def device_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).total_memory)


def held() -> tuple[int, int]:
    """Free all unused memory, and return the bytes of tensors on the device and its free bytes."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # workspaces exist until the process ends, and belong to no run
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(0)
    return torch.cuda.memory_allocated(0), free


@pytest.mark.row("S3-01/G")
def test_a_step_without_memory_on_the_device_is_made_in_halves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(tmp_path, train=TRAIN)
    model = Greedy(models.build(config), device_bytes() // 40)
    fit(config, model=model)
    assert model.sizes == [25] * 20, "100 rows and 50 rows did not fit"
    told = [record.getMessage() for record in caplog.records if "memory ran out" in record.getMessage()]
    assert [text.partition(";")[0] for text in told] == [
        f"step 1: memory ran out with {rows} rows in the model at a time" for rows in (100, 50)
    ]
    assert all("CUDA out of memory" in text for text in told)
    assert "5 of 5 batches were trained on" in caplog.text


@pytest.mark.row("S3-01/G")
def test_the_report_of_a_device_without_memory(tmp_path: Path) -> None:
    config = small(tmp_path, data={"batch_size": 2}, train=TRAIN)
    model = Greedy(models.build(config), 2 * device_bytes())
    with pytest.raises(OutOfMemoryError, match=r"^step 1, 1 row at a time: CUDA out of memory\. ") as caught:
        fit(config, model=model)
    lines = [" ".join(line.split()) for line in str(caught.value).splitlines()]
    assert "the largest tensors:" in lines
    assert f"{LARGE * 4 / 2**20:.1f} MiB float32 {LARGE} cuda:0 weight large" in lines, lines
    hint = caught.value.hint
    assert hint.startswith("to use less memory: --set precision=bf16") and "`model`" in hint


@pytest.mark.row("S3-07/G")
def test_a_second_run_of_a_process_finds_the_device_as_the_first_did(tmp_path: Path) -> None:
    wide = {"name": "dcnv2", "cross_layers": 1, "deep_mlp": [2048, 2048]}
    weights = 4 * 2048 * 2048

    def train() -> list[float]:
        config = small(tmp_path, model=wide, train=TRAIN)
        torch.manual_seed(config.train.seed)
        torch.cuda.reset_peak_memory_stats(0)
        reports, _, _ = results(config, models.build(config))
        assert torch.cuda.max_memory_allocated(0) > weights, "it was trained on the device"
        return [each.loss for each in reports]

    torch.ones(1, device="cuda:0")  # creates the CUDA context
    begun, _ = held()
    first = train()
    after, free = held()
    assert after - begun < weights // 8, "nothing of the model is left"
    assert train() == pytest.approx(first, abs=1e-5)
    again, free_again = held()
    assert again == after and free_again >= free - (64 << 20)
