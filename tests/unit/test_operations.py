"""Requirements of operators: the rows of a step, synchronous CUDA, reports without graphs, options of ranks."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Verb
from trainer_files import config_of, fit, write_clicks, write_config

from persia.config import Config
from persia.distributed import Compression, DDPOption, FSDPOption
from persia.distributed.averaging import check_regions
from persia.errors import ConfigError, DeviceError, UsageError
from persia.loop import out_of_memory
from persia.trainer import StepReport, Trainer, operations, parallel
from persia.trainer.training import Training


@pytest.mark.row("S4-10")
@pytest.mark.parametrize(
    ("ranks", "data", "accumulate", "line"),
    [
        (1, 128, 1, "128 rows per step = 128 per rank x 1 accumulated x 1 rank"),
        (4, 1024, 2, "2,048 rows per step = 256 per rank x 2 accumulated x 4 ranks"),
        (3, 100, 1, "100 rows per step = 33 or 34 per rank x 1 accumulated x 3 ranks"),
    ],
)
def test_the_rows_of_a_step_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, data: int, accumulate: int, line: str
) -> None:
    monkeypatch.setattr(operations, "get_world_size", lambda: ranks)
    config = config_of(tmp_path, data={"batch_size": data}, train={"accumulate": accumulate})
    assert operations.effective_batch(config) == f"effective batch: {line}"


@pytest.mark.row("S4-10")
def test_a_step_of_more_rows_than_the_configuration_has_is_refused(tmp_path: Path) -> None:
    """A data-compose with another persia.yml may send a step with more rows."""
    with Trainer(config_of(tmp_path)) as trainer:
        trainer.fit()
        training = trainer._training
        assert isinstance(training, Training)
        training._check_rows(128)
        training._check_rows(7)  # fewer rows, as at the end of the data
        with pytest.raises(
            ConfigError,
            match=r"a step has 256 rows \(256 by rank\), but data\.batch_size and train\.accumulate allow 128",
        ):
            training._check_rows(256)


@pytest.mark.row("S4-10")
def test_the_rows_of_the_first_step_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[int, int]] = []

    def check(training: Training, mine: int) -> None:
        checked.append((training._ctx.step, mine))

    monkeypatch.setattr(Training, "_check_rows", check)
    fit(config_of(tmp_path))
    assert checked == [(0, 128)], "once, before it is trained"


@pytest.mark.row("S4-51")
def test_an_error_of_cuda_says_how_the_operation_is_found() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    told = "step 7: CUDA error: an illegal memory access"
    with pytest.raises(DeviceError, match=told) as caught, out_of_memory.reported(7, 100, list):
        fail()
    assert "persia train --sync-cuda" in caught.value.hint
    with pytest.raises(RuntimeError, match="^another$"), out_of_memory.reported(7, 100, list):
        raise RuntimeError("another")


@pytest.mark.row("S4-51")
def test_sync_cuda_is_set_for_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        write_clicks(tmp_path / "clicks.parquet", 500)
        _, err = verb("train", str(write_config(tmp_path)), "--sync-cuda")
        assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1" and not torch.backends.cudnn.benchmark
        assert ("--sync-cuda has no effect: torch finds no GPU" in err) != torch.cuda.is_available()
    finally:
        torch.backends.cudnn.benchmark = before


def graphs() -> list[torch.Tensor]:
    """Return the tensors of this process that are part of a graph."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.grad_fn is not None]


@pytest.mark.row("S4-32")
def test_no_report_keeps_a_graph_and_no_step_leaves_a_gradient(tmp_path: Path) -> None:
    reports = []
    before = graphs()  # of other tests in this process
    with Trainer(config_of(tmp_path, run={"log_every": 1})) as trainer:
        for report in trainer.fit():
            reports.append(report)
            if not isinstance(report, StepReport):
                continue
            training = trainer._training
            assert training is not None
            assert all(each.grad is None for each in training.model.parameters())
    assert not [each for each in graphs() if not any(each is other for other in before)]
    steps = [vars(each) for each in reports if isinstance(each, StepReport)]
    assert steps and not any(isinstance(value, torch.Tensor) for each in steps for value in each.values())


def option(config: Config, monkeypatch: pytest.MonkeyPatch, ranks: int) -> Any:
    monkeypatch.setattr(parallel, "get_world_size", lambda: ranks)
    return parallel.option_of(config)


@pytest.mark.row("S4-09", "S4-24")
def test_the_keys_of_ranks_reach_their_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert option(config_of(tmp_path), monkeypatch, 2) is None
    sharded = option(config_of(tmp_path, parallel="fsdp", fsdp={"reshard_after_forward": True}), monkeypatch, 2)
    assert isinstance(sharded, FSDPOption) and sharded._reshards
    regions = {"a": [0], "b": [1]}
    config = config_of(tmp_path, dist={"regions": regions, "compression": {"name": "bf16"}})
    found = option(config, monkeypatch, 2)
    assert isinstance(found, DDPOption)
    assert (found.regions, found.compression, found.backend) == (regions, Compression("bf16"), "gloo")
    told = "regions: expected each rank from 0 to 2 in exactly one region; in no region: 2"
    with pytest.raises(UsageError, match=told):
        option(config, monkeypatch, 3)
    assert option(config, monkeypatch, 1) is None
    assert "dist.regions and dist.compression have no effect with one rank" in caplog.text
    given = {"name": "powersgd", "rank": 4, "start_iter": 10}
    found = option(config_of(tmp_path, dist={"compression": given}), monkeypatch, 2)
    assert found.compression == Compression("powersgd", 4, 10)


def test_mistakes_of_regions_and_compression_are_named() -> None:
    check_regions({"a": [1, 0], "b": [2]}, 3)
    with pytest.raises(UsageError, match="in several regions: 1; no such rank: 3"):
        check_regions({"a": [0, 1], "b": [1, 2, 3]}, 3)
    with pytest.raises(UsageError, match="expected one of 'fp16', 'bf16', 'powersgd'"):
        Compression("int8")
    with pytest.raises(UsageError, match="start_iter=1"):
        Compression("powersgd", start_iter=1)
    with pytest.raises(UsageError, match="cannot be combined; pass one of them"):
        DDPOption(backend="gloo", regions={"a": [0]}, compression=Compression("powersgd"))
    with pytest.raises(UsageError, match="needs find_unused_parameters=True"):
        DDPOption(backend="gloo", compression=Compression("powersgd"), find_unused_parameters=False)
    with pytest.raises(UsageError, match="and no static_graph"):
        DDPOption(backend="gloo", compression=Compression("powersgd"), static_graph=True)


def test_one_rank_of_each_host_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, spot={"url": "http://127.0.0.1:9/none"})
    monkeypatch.setattr(operations, "get_local_rank", lambda: 1)
    with operations.spot_watch_of(config) as watch:
        assert watch is None
