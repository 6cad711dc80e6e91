"""``persia doctor``: each check distinguishes the cases that it documents, and says what to do."""

import errno
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Verb
from trainer_files import write_clicks, write_config

import persia
import persia_core
from persia.config import load_config
from persia.config.blocks import EarlyStopBlock
from persia.ctx import Checkpoints
from persia.doctor import data, disk, environment, gpu, run, services, versions
from persia.doctor.check import Check, worst
from persia.doctor.gpu import Facts
from persia.doctor.job_status import Problem, Process, Status
from persia.errors import StorageError
from persia.runtime.exit_codes import ExitCode
from persia.trainer.checkpoint_size import estimate


def only(found: Iterator[Check], name: str) -> Check:
    return next(check for check in found if check.name == name)


# --- Versions


@pytest.mark.row("S3-40")
@pytest.mark.parametrize(
    ("version", "status"), [("2.3.1", "fail"), ("1.13", "fail"), ("2.4", "ok"), ("2.10.0+cpu", "ok"), (None, "fail")]
)
def test_an_old_torch_is_named(version: str | None, status: str) -> None:
    (found,) = versions.packages({"torch": version})
    assert found.status == status
    assert status == "ok" or ("2.4 or later" in found.why and "pip install 'torch>=2.4'" in found.next)


@pytest.mark.row("S3-40")
def test_versions_that_do_not_fit_are_refused() -> None:
    assert versions.python((3, 9, 1)).status == "fail" and versions.python((3, 12, 0)).status == "ok"
    other = versions.core_version("0.1.0", "0.0.9")
    assert (other.status, other.code) == ("fail", ExitCode.REFUSED) and "persia_core 0.0.9" in other.found
    assert not [check for check in versions.checks() if check.status == "fail"], "this environment is right"


def test_the_file_of_the_engine_that_wins_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "third_party", tmp_path / "site"
    for folder in (first, second):
        folder.mkdir()
    winner, hidden = first / "persia_core.so", second / "persia_core" / "persia_core.abi3.so"
    hidden.parent.mkdir()
    winner.write_bytes(b"one")
    hidden.write_bytes(b"other")
    found = versions.core_file(winner, [str(first), str(second)])
    assert found.status == "warn" and f"{winner} hides {hidden}" in found.found
    assert versions.core_file(winner, [str(first)]).status == "ok"


def test_a_build_that_was_changed_is_told(tmp_path: Path) -> None:
    core = tmp_path / "persia_core.so"
    core.write_bytes(b"changed")
    (tmp_path / "BUILD_INFO").write_text(f"{'0' * 64}  persia_core.so build=abc\n")
    assert versions.build(core).status == "warn" and "hash differs" in versions.build(core).found
    (tmp_path / "BUILD_INFO").write_text(f"{'0' * 64}  other build=abc\n")
    assert "does not list persia_core.so" in versions.build(core).found


@pytest.mark.row("S3-39", "S3-09")
def test_a_block_to_paste_has_versions_and_no_secret(monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    secrets = {
        "PERSIA_TOKEN_FILE": "/a/secret/place",
        "PERSIA_NATS_URL": "nats://me:my-password@host:4222",
        "PERSIA_MY_SECRET": "hidden-1",
        "NCCL_MY_PASSWORD": "hidden-2",
        "PERSIA_S3_KEY": "hidden-3",
        "AWS_SECRET_ACCESS_KEY": "hidden-4",
    }
    for name, value in {**secrets, "PERSIA_JOB": "mine", "NCCL_DEBUG": "INFO", "GPU_NUM": "0"}.items():
        monkeypatch.setenv(name, value)
    out, _ = verb("doctor", "--env")
    lines = dict(re.split(r" {2,}", line, maxsplit=1) for line in out.splitlines())  # each line has a name and a value
    for package in ("torch", "numpy", "psutil", "grpcio", "pyarrow"):
        assert lines[package] == importlib.metadata.version(package), package
    assert lines["persia"] == persia.__version__ and lines["persia_core"].startswith(persia_core.__version__)
    assert lines["Python"].startswith(platform.python_version()) and platform.release() in lines["platform"]
    usable = len(os.sched_getaffinity(0))
    shown = rf"{torch.get_num_threads()} \({usable} usable(, limited to [\d.]+)? processors\)"
    assert re.fullmatch(shown, lines["torch threads"])
    assert lines["processors"] == str(os.cpu_count()) and lines["host"] == socket.gethostname()
    assert "lo 127.0.0.1" in lines["interfaces"] and lines["GPUs"] and lines["container"] in ("yes", "no")
    assert lines["CUDA of torch"] == (torch.version.cuda or "none") and lines["CUDA of driver"]
    assert (lines["PERSIA_JOB"], lines["NCCL_DEBUG"], lines["GPU_NUM"]) == ("mine", "INFO", "0")
    assert not [value for value in secrets.values() if value in out] and "my-password" not in out
    assert lines["PERSIA_NATS_URL"] == lines["PERSIA_S3_KEY"] == "(set)"


# --- GPUs


@pytest.mark.row("S4-15", "S3-08")
@pytest.mark.parametrize(
    ("facts", "texts"),
    [
        (Facts(wanted=1), ("nvidia-smi is not on PATH", "install the NVIDIA driver")),
        (Facts(wanted=1, in_container=True), ("no NVIDIA device and no driver", "docker-compose.gpu.yaml")),
        (Facts(wanted=1, in_container=True, driver_loaded=True), ("this container has no device", "devices:")),
        (Facts(wanted=1, driver_loaded=True, smi=("0, A100",), torch_cuda=None), ("is False", "for the CPU only")),
        (
            Facts(wanted=1, driver_loaded=True, smi=("0, A100",), torch_cuda="12.4", visible="-1"),
            ("CUDA_VISIBLE_DEVICES='-1'", "unset CUDA_VISIBLE_DEVICES"),
        ),
        (
            Facts(wanted=1, driver_loaded=True, smi=(), smi_error="Driver/library version mismatch"),
            ("nvidia-smi failed: Driver/library version mismatch", "restart of the machine"),
        ),
        (
            Facts(wanted=1, driver_loaded=True, devices=("/dev/nvidia0",), torch_cuda="12.4"),
            ("the machine has 1 GPU, but", "container toolkit"),
        ),
    ],
)
def test_causes_of_a_missing_gpu_are_told_apart(facts: Facts, texts: tuple[str, ...]) -> None:
    found = gpu.device(facts)
    assert found.status == "fail", found
    whole = "\n".join(run.lines(found))
    assert all(text in whole for text in texts), whole

    assert gpu.device(replace(facts, wanted=0)).status in ("ok", "warn"), "no GPU is asked for"


@pytest.mark.row("S3-08", "S1-23")
def test_the_gpus_that_torch_sees_are_listed_and_counted(monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    found = Facts(wanted=2, driver_loaded=True, smi=("0, A100",), torch_cuda="12.4", torch_devices=1, engine_cuda=True)
    monkeypatch.setattr("persia.doctor.gpu.facts", lambda: found)
    out, _ = verb("doctor", code=2)
    assert "ok    gpu            torch sees 1: 0, A100" in out
    assert "fail  ranks          2 requested (GPU_NUM), 1 visible" in out and "next: GPU_NUM=1" in out


@pytest.mark.row("S3-08")
def test_the_devices_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("GPU_NUM", "4")
    found = gpu.facts()
    assert (found.torch_devices, found.visible, found.wanted) == (3, "0,1,2", 4)


@pytest.mark.row("S3-40")
def test_a_driver_older_than_the_runtime_is_named() -> None:
    old, minor, new = gpu.driver((11, 8), "12.4"), gpu.driver((12, 2), "12.4"), gpu.driver((13, 0), "12.4")
    assert (old.status, minor.status, new.status) == ("fail", "warn", "ok")
    assert "supports CUDA 11.8" in old.found and "update the NVIDIA driver" in old.next


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu._smi() == ((), "Failed to initialize NVML: Driver/library version mismatch")
    program.write_text("#!/bin/sh\necho '0, A100, 550.1, 40960 MiB'\n")
    assert gpu._smi() == (("0, A100, 550.1, 40960 MiB",), "")


@pytest.mark.row("S1-23")
def test_more_ranks_than_gpus_are_named() -> None:
    found = gpu.ranks(5, 1, None)
    assert found.status == "fail" and "5 requested (GPU_NUM), 1 visible" in found.found
    assert gpu.ranks(2, 2, "0,1").status == "ok"


# --- Services


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        yield server


def process(service: str, index: int = 0, health: str = "serving") -> Process:
    return Process(service, "test", index, 1, "h:1", "", "h", "1", "1", "", health, None, 7, [])


def test_services_of_a_job() -> None:
    good = Status([process("persia-server"), process("persia-middleware")], [])
    assert [check.status for check in services.services(good, "test")] == ["ok", "ok"]
    absent = Problem("absent", "no persia-middleware has announced itself")
    bad = Status([process("persia-server", health="deadline exceeded")], [absent])
    server, middleware = services.services(bad, "test")
    assert server.status == middleware.status == "fail"
    assert "deadline exceeded" in server.found and middleware.code == ExitCode.UNREACHABLE


def test_nats_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    monkeypatch.setenv("PERSIA_NATS_URL", f"nats://127.0.0.1:{port}")
    nats, rest = services.checks()
    assert "refused" in nats.found and rest.status == "skip"
    monkeypatch.setenv("PERSIA_NATS_URL", "http://127.0.0.1")
    (nats,) = services.checks()
    assert "expected nats://HOST:PORT" in nats.found


# --- Disks and files


@pytest.mark.row("S1-19")
def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    found = disk.written("disk", folder)
    assert found.status == "ok" and "written, synced, renamed and deleted" in found.found
    assert not [*tmp_path.iterdir()], "nothing is made"
    refused = disk.written("disk", Path("/proc/checkpoints"))
    assert refused.status == "fail" and refused.code == ExitCode.FAILED
    assert "Checkpoint storage validation failed: /proc: user" in refused.found and refused.next


@pytest.mark.row("S1-17")
@pytest.mark.row("S4-56")
def test_disks_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    out, _ = verb("doctor", "--only", "disk", "--dir", str(tmp_path), "--measure")
    found = re.search(r"disk speed +(\S+): fsync ([\d.]+) ms \(longest of 9: ([\d.]+) ms\), ([\d,]+) MB/s", out)
    assert found is not None and found[1] == str(tmp_path), out
    assert float(found[2]) <= float(found[3]) and int(found[4].replace(",", "")) > 0
    assert not [*tmp_path.glob(".persia-measure-*")]
    assert "speed" not in verb("doctor", "--only", "disk", "--dir", str(tmp_path))[0]
    fsync = os.fsync

    def slow_fsync(file: int) -> None:
        time.sleep(0.06)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    slow = disk.measured("disk", tmp_path / "not" / "there")
    assert slow.status == "warn" and "log_sync" in slow.why and float(slow.found.split("fsync ")[1].split()[0]) >= 60


def test_a_folder_on_a_disk_that_is_not_mounted(tmp_path: Path) -> None:
    found = disk.written("checkpoint.dir", tmp_path / "mnt" / "disk" / "checkpoints")
    assert found.status == "fail" and f"{tmp_path / 'mnt'} does not exist; its disk may not be mounted" in found.found
    assert f"mkdir -p {tmp_path / 'mnt' / 'disk'}" in found.next


@pytest.mark.row("S1-17")
def test_a_relative_folder_of_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor refuses the folder, and so do the ranks before they train."""
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("PERSIA_CKPT_DIR", "checkpoints")
    (found,) = disk.checks(None)
    text = "PERSIA_CKPT_DIR must be an absolute path or a URL, found 'checkpoints'"
    assert text in found.found
    assert found.next.endswith(f"PERSIA_CKPT_DIR={Path('checkpoints').absolute()}")
    with pytest.raises(StorageError, match=re.escape(text)) as refused:
        Checkpoints("mine", every=10).validate_storage()
    assert refused.value.hint == found.next


@pytest.mark.row("S1-19")
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename", "unlink"])
def test_each_operation_of_a_save_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """A full disk fails in ``write`` or ``fsync``, a network disk in ``rename``."""
    failed: list[str] = []

    def fail(*arguments: object, **options: object) -> None:
        if not failed:  # the clean-up succeeds
            failed.append(operation)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        before(*arguments, **options)

    of = Path if operation in ("rename", "unlink") else os
    before = getattr(of, operation)
    with monkeypatch.context() as patched:
        patched.setattr(of, operation, fail)
        found = disk.written("disk", tmp_path)
    assert failed and found.status == "fail" and "Checkpoint storage validation failed" in found.found
    assert "Disk quota exceeded" in found.found and not [*tmp_path.iterdir()]


@pytest.mark.row("S1-19")
def test_free_space_is_compared_with_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clicks(tmp_path / "clicks.parquet", 500)
    config = load_config(write_config(tmp_path))
    roomy = disk.space(config)
    assert roomy.status == "ok" and "training rows has one new id per feature" in roomy.found
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("persia.doctor.disk.shutil.disk_usage", lambda path: usage._replace(free=100_000))
    full = disk.space(config)
    assert full.status == "warn" and "97.7 KiB free" in full.found and "--set checkpoint.dir" in full.next
    one, _ = estimate(config)
    kept = config.checkpoint.keep
    enough = usage._replace(free=one * (kept + 1))
    monkeypatch.setattr("persia.doctor.disk.shutil.disk_usage", lambda path: enough)
    assert disk.space(config).status == "ok", "the kept ones, and the one that is being written"
    train = config.train.model_copy(update={"early_stop": EarlyStopBlock(patience=1)})
    best = config.model_copy(update={"train": train})
    found = disk.space(best)
    assert found.status == "warn" and f"and {kept + 2} checkpoints take" in found.found, "and the best one"


@pytest.mark.row("S1-19")
def test_free_space_is_that_of_the_folder_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job, checkpoints are below PERSIA_CKPT_DIR, often on a different disk from the files of the run."""
    write_clicks(tmp_path / "clicks.parquet", 500)
    saves = tmp_path / "saves"
    saves.mkdir()
    usage = shutil.disk_usage(tmp_path)
    full = usage._replace(free=4 << 20)
    monkeypatch.setattr("persia.doctor.disk.shutil.disk_usage", lambda path: full if Path(path) == saves else usage)
    config = load_config(write_config(tmp_path))
    monkeypatch.setattr("persia.trainer.checkpoint_size.estimate", lambda config: (3 << 20, 500))
    monkeypatch.setenv("PERSIA_CKPT_DIR", str(saves))
    alone = disk.space(config)
    assert alone.status == "ok" and config.run.dir in alone.found, "without a job the run's folder has them"
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    in_job = disk.space(config)
    assert in_job.status == "warn" and f"{saves}: 4.0 MiB free" in in_job.found and "PERSIA_CKPT_DIR" in in_job.next
    names = [check.name for check in disk.checks(config)]
    assert "PERSIA_CKPT_DIR" in names and "run.dir" not in names, "a job does not write to run.dir"


@pytest.mark.row("S1-10")
def test_files_that_are_not_visible_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Mine(torch.nn.Linear):\n"
        "    def __init__(self, table: str):\n        super().__init__(1, 1)\n"
    )
    write_config(
        tmp_path, model={"class": "mine:Mine", "table": "/home/x/d.npz"}, data={"train": "rows/clicks.parquet"}
    )
    config = load_config(tmp_path / "persia.yml")
    monkeypatch.setattr("persia.doctor.data.in_container", lambda: False)
    outside = {check.found: check for check in data.checks(config) if check.status == "fail"}
    assert f"data.train: {tmp_path}/rows/clicks.parquet does not exist" in outside
    monkeypatch.setattr("persia.doctor.data.in_container", lambda: True)
    inside = {check.found: check for check in data.checks(config) if check.status == "fail"}
    hidden = inside["model.table: /home/x/d.npz is not visible in the container"]
    assert "DATA_DIR=/home/x" in hidden.next and "/data/d.npz" in hidden.next
    assert hidden.found in verb("doctor", "persia.yml", code=2)[0]


@pytest.mark.row("S1-12")
def test_variables_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = write_config(tmp_path, env={"MY_HOME": None, "MY_LEVEL": 3})
    (found,) = environment.checks(load_config(path))
    assert found.status == "fail" and "not set: MY_HOME" in found.found and "export MY_HOME=VALUE" in found.next
    assert found.found in verb("doctor", str(path), "--only", "env", code=2)[0]
    _, errors = verb("train", str(path), "--test", "--local", code=2)
    assert "the configuration needs variables that are not set, or are empty: MY_HOME" in errors
    monkeypatch.setenv("MY_HOME", "/here")
    (found,) = environment.checks(load_config(path))
    assert found.status == "ok"
    out, _ = verb("config", "show", str(path))
    assert "MY_HOME" in out and 'MY_LEVEL: "3"' in out.replace("'", '"')
    (tmp_path / "mine.py").write_text(
        "import os, torch\nclass Mine(torch.nn.Module):\n    def __init__(self, num_dense, embedding_dims):\n"
        "        super().__init__()\n        print('level', os.environ['MY_LEVEL'], os.environ['MY_HOME'])\n"
        "        self.top = torch.nn.Linear(num_dense + sum(embedding_dims), 1)\n"
        "    def forward(self, dense, embeddings):\n        return self.top(torch.cat([*dense, *embeddings], 1))\n"
    )
    path = write_config(tmp_path, env={"MY_HOME": None, "MY_LEVEL": 3}, model={"class": "mine:Mine"})
    out, _ = verb("train", str(path), "--test", "--local")
    assert "level 3 /here" in out and "MY_LEVEL" not in os.environ, "they are set for the run only"
    bad = write_config(tmp_path, env={"PERSIA_NATS_URL": "x", "a-b": "y"})
    _, errors = verb("config", "check", str(bad), code=2)
    assert "env.PERSIA_NATS_URL: is read before this file" in errors and "env.a-b: found `a-b`" in errors


# --- The verb


def test_the_whole_doctor_as_a_process(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = write_config(tmp_path)
    words = [sys.executable, "-m", "persia", "doctor"]
    done = subprocess.run([*words, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("config", "python", "torch", "persia_core", "gpu", "interfaces", "services", "run.dir", "rows"):
        assert f" {name} " in done.stdout, name
    assert sorted(each.name for each in tmp_path.iterdir()) == ["clicks.parquet", "persia.yml"], "nothing is left"


def test_checks_that_need_torch_are_skipped_on_a_host_without_it(tmp_path: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from persia.cli.main import main; main()"
    words = [sys.executable, "-c", script, "doctor", "--only", "gpu,network,disk"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.count("this check needs PyTorch, which is not installed") == 2, done.stdout + done.stderr
    assert done.returncode == 0 and " disk " in done.stdout, done.stdout


def test_a_failure_has_its_exit_code_and_json(tmp_path: Path, verb: Verb) -> None:
    out, _ = verb("doctor", "--only", "disk", "--dir", "/proc", "--json", code=1)
    (found,) = json.loads(out)
    assert found["status"] == "fail" and found["code"] == 1 and "user" in found["found"] and found["next"]
    _, errors = verb("doctor", "--only", "dsik", code=2)
    assert "no such check; the checks are config, versions" in errors
    (tmp_path / "persia.yml").write_text("data: {train: 5}\nmodel: {name: dlrmm}\n")
    out, _ = verb("doctor", "--only", "data", code=2)
    assert "found `dlrmm`" in out and "persia config check" in out


def test_a_model_that_cannot_be_made_is_a_finding(tmp_path: Path, verb: Verb) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self):\n        raise KeyError('gone')\n")
    write_clicks(tmp_path / "clicks.parquet", 300)
    write_config(tmp_path, model={"class": "mine:Mine"})
    out, _ = verb("doctor", "persia.yml", "--only", "disk,data", code=1)
    assert "fail  disk           KeyError: 'gone' at mine.py:3 in __init__" in out and "ok    rows" in out


def test_the_first_failure_gives_the_exit_code() -> None:
    checks = [
        Check("a", "warn", ""),
        Check("b", "fail", "", code=ExitCode.UNREACHABLE),
        Check("c", "fail", "", code=ExitCode.CONFIG),
    ]
    assert worst(checks) == ExitCode.UNREACHABLE and worst(checks[:1]) == 0


def test_a_configuration_that_is_not_there_is_not_called_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no persia.yml" in verb("doctor", "--only", "data,env", code=2)[0]
