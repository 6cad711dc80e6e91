"""Runs on CUDA devices: ranks and their devices, NCCL, the doctor, the engine that the documented command builds."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Batches, TinyModel, Verb
from stack import MakeStack, missing

from persia.cli import watch
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.discovery import nats
from persia.doctor import gpu
from persia.embedding.optim import SGD
from persia.monitor import gpus

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from trainer_files import write_clicks, write_config
from waiting import wait_until

with_servers = pytest.mark.skipif(missing() is not None, reason=str(missing()))

REDUCE = """
import os

import torch
from torch import distributed

from persia import env
from persia.distributed import get_default_distributed_option

gpus = int(os.environ["GPU_NUM"])
device = env.get_local_rank() if gpus else None
option = get_default_distributed_option(device)
option.initialize(distributed.FileStore("store", env.get_world_size()), env.get_rank(), env.get_world_size(), device)
total = torch.full((1,), env.get_rank() + 1.0, device="cpu" if device is None else f"cuda:{device}")
distributed.all_reduce(total)
print("rank", env.get_rank(), option.backend, total.device, total.item(), os.environ["NCCL_SOCKET_IFNAME"], flush=True)
distributed.destroy_process_group()
"""

HOLD = """
import sys

import torch

held = torch.zeros(1 << 28, device="cuda:0")  # 1 GiB
one = torch.ones(4096, 4096, device="cuda:0")
print(torch.cuda.get_device_properties(0).uuid, flush=True)
while True:
    one = (one @ one).clamp(0, 1)
    torch.cuda.synchronize()
"""


def persia(*words: str, cwd: Path, env: Mapping[str, str], code: int = 0) -> str:
    """Run a command of persia, and return its output."""
    command = [sys.executable, "-m", "persia", *words]
    merged = {**os.environ, "COLUMNS": "160", **env}
    done = subprocess.run(command, cwd=cwd, env=merged, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(run: Path) -> list[float]:
    """Return the losses of a run, which was trained on a device."""
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in reports if "loss" in each]
    assert all(each["memory"]["allocated"] > 0 for each in steps), "it was trained on a device"
    return [each["loss"] for each in steps]


# --- Ranks and their devices


@pytest.mark.row("S0-18/G")
@pytest.mark.parametrize("ranks", [0, torch.cuda.device_count()])
def test_gpu_num_decides_about_ranks_devices_and_the_backend(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "train.py").write_text(REDUCE)
    env = {**os.environ, "PERSIA_NATS_URL": "", "GPU_NUM": str(ranks), "NCCL_SOCKET_IFNAME": "lo"}
    words = [sys.executable, "-m", "persia.launch.cli", "nn-worker", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = sorted(line[line.index("rank ") :] for line in done.stdout.splitlines() if " lo" in line)
    total = sum(range(1, ranks + 1))
    expected = [f"rank {rank} nccl cuda:{rank} {total}.0 lo" for rank in range(ranks)]
    assert [line.split("] ")[-1] for line in told] == (expected or ["rank 0 gloo cpu 1.0 lo"])


@pytest.mark.row("S1-23/G")
def test_one_rank_more_than_devices_is_refused_before_anything_starts(
    tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = torch.cuda.device_count()
    monkeypatch.setenv("GPU_NUM", "1")
    write_clicks(tmp_path / "clicks.parquet", 300)
    _, errors = verb("train", str(write_config(tmp_path)), "--nproc", str(there + 1), code=2)
    assert f"--nproc {there + 1}: {there + 1} GPUs requested, {there} visible" in errors
    assert f"next:  --nproc {there}" in errors
    assert not [*tmp_path.glob("runs/*")]


@with_servers
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.row("S1-23/G")
def test_a_run_on_all_devices(tmp_path: Path, no_job: None) -> None:
    there = torch.cuda.device_count()
    write_clicks(tmp_path / "clicks.parquet", 2000)
    output = persia(
        "train", str(write_config(tmp_path)), "--nproc", str(there), cwd=tmp_path, env={"GPU_NUM": str(there)}
    )
    run = tmp_path / "runs" / "one"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("finished", there), output
    assert len(losses(run)) > 1
    assert there == 1 or "averaged over nccl (GPU)" in output


# --- The doctor


@pytest.mark.row("S3-08/G")
def test_the_doctor_sees_the_devices(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.cuda.device_count()
    monkeypatch.setenv("GPU_NUM", str(there))
    found = gpu.facts()
    assert found.torch_devices == there and found.engine_cuda
    assert found.driver_cuda is not None and found.driver_cuda >= (12, 0)
    out, _ = verb("doctor", "--only", "gpu")
    assert f"torch sees {there}: " in out and f"{there} requested (GPU_NUM), {there} visible" in out
    listed = [line for line in found.smi or () if torch.cuda.get_device_name(0) in line]
    assert listed or found.smi is None, found
    assert all(line in out for line in listed)
    monkeypatch.setenv("GPU_NUM", str(there + 1))
    out, _ = verb("doctor", "--only", "gpu", code=2)
    assert f"{there + 1} requested (GPU_NUM), {there} visible" in out and f"GPU_NUM={there}" in out
    hidden = persia("doctor", "--only", "gpu", cwd=tmp_path, env={"GPU_NUM": "1", "CUDA_VISIBLE_DEVICES": "-1"}, code=2)
    assert "CUDA_VISIBLE_DEVICES='-1' hides them" in hidden


# --- The use of a GPU by each process


def driver() -> gpus.Gpus:
    """Return the object that queries the driver."""
    found = gpus.find()
    assert isinstance(found, gpus._Nvml), "install the extra for GPUs: pip install nvidia-ml-py"
    return found


@pytest.mark.row("S3-20/G")
def test_a_process_has_its_use_of_its_device(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        uuid = process.stdout.readline().strip().removeprefix("GPU-")
        (index,) = [each.index for each in driver().sample() if each.uuid == uuid]
        watched = watch.Watched("persia-trainer 0", os.uname().nodename, process.pid, uuid)
        watching = watch.Watch(lambda: [watched], tmp_path)

        def busy() -> watch.Row | None:
            row = watching.sample()[0]
            return row if row.gpu_percent else None

        row = wait_until("a sample in which it computes", busy, 60)
        (device,) = [each for each in driver().sample() if each.uuid == uuid]
        assert row.gpu == index and row.gpu_used_bytes is not None and row.gpu_percent is not None
        assert 1 << 30 <= row.gpu_used_bytes <= device.total_bytes and 0 < row.gpu_percent <= 100
        if device.processes:  # a container shows no processes, and the values are those of the whole device
            assert row.gpu_used_bytes < device.used_bytes
    finally:
        process.kill()
        process.communicate()


@with_servers
@pytest.mark.row("S3-20/G")
def test_a_rank_announces_its_device(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make_stack()
    stack.use(monkeypatch)
    model = TinyModel().cuda()
    dense = torch.optim.SGD(model.parameters(), 0.1)
    with TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model, device_id=0) as ctx:
        for batch in DataLoader(Batches(2)):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
        (rank,) = nats.services(stack.settings["PERSIA_NATS_URL"], "persia-trainer")
    assert rank.text("gpu") in {each.uuid for each in driver().sample()}


# --- The engine


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.row("S0-03/G")
def test_the_engine_that_the_documented_command_builds_trains_on_a_device(tmp_path: Path) -> None:
    cargo = shutil.which("cargo")
    assert cargo is not None, "cargo is not on PATH; make test-gpu needs it too"
    target = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "rust_core" / "target"))
    words = [cargo, "build", "--package", "persia-core", "--features", "cuda", "--target-dir", target]
    env = {**os.environ, "PYO3_NO_PYTHON": "1", "PYO3_BUILD_EXTENSION_MODULE": "1"}  # as in the Makefile
    subprocess.run(words, cwd=ROOT / "rust_core", env=env, check=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(Path(target) / "debug" / "libpersia_core.so", mine / "persia_core.so")
    first = {"PYTHONPATH": os.pathsep.join([str(mine), os.environ.get("PYTHONPATH", "")]), "GPU_NUM": "1"}
    code = "import persia_core; print(persia_core.__file__, persia_core.FEATURES)"
    told = subprocess.run([sys.executable, "-c", code], env={**os.environ, **first}, capture_output=True, text=True)
    assert told.stdout == f"{mine / 'persia_core.so'} ['cuda']\n", told.stderr
    write_clicks(tmp_path / "clicks.parquet", 1000)
    path = str(write_config(tmp_path))
    persia("train", path, cwd=tmp_path, env=first)
    persia("train", path, "--set", "run.name=packaged", cwd=tmp_path, env={"GPU_NUM": "1"})
    assert losses(tmp_path / "runs" / "one") == losses(tmp_path / "runs" / "packaged"), "as those of the installed one"
