"""Bottlenecks of a run on servers: servers, staleness, a rank, uneven ids, the disk of a log, reading, threads."""

import contextlib
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import MakeStack, Part, Stack
from waiting import wait_until

from persia.profile import advice, report

SCRIPT = """
import sys
import time

import numpy as np
import torch
from conftest import Batches, TinyModel

from persia import env
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.profile import Profiler
from persia.profile.profiler import Schedule

folder, staleness, planted, steps = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
MIXED = 0xD6E8FEB86659FD93


def shard_of(id):
    product = (id ^ 0x9E3779B97F4A7C15) * MIXED
    return ((product & (1 << 64) - 1) ^ (product >> 64)) >> 56


class Data(Batches):
    # With `uneven` all ids belong to the upper half of the shards, which server 1 of 2 has.

    def batch(self, number, *, requires_grad=True):
        if planted == "data":
            time.sleep(0.06)
        if planted == "uneven":
            ids = np.array([id for id in range(4000) if shard_of(id) >= 128], dtype=np.uint64)
            single = np.random.default_rng(number).choice(ids, self.batch_size)
            lists = [single[k : k + 1] for k in range(self.batch_size)]
            features = [IDTypeFeatureWithSingleID("a", single), IDTypeFeature("b", lists)]
            dense, label = np.ones((self.batch_size, 3), np.float32), np.ones((self.batch_size, 1), np.float32)
            return PersiaBatch(features, [NonIDTypeFeature(dense)], [Label(label)], requires_grad=requires_grad)
        return super().batch(number, requires_grad=requires_grad)


class Model(TinyModel):
    def __init__(self):
        super().__init__()
        wide = 1024 if planted == "threads" else 1
        self.big = torch.nn.Sequential(*(torch.nn.Linear(wide, wide) for _ in range(4)))

    def forward(self, non_id_tensors, embedding_tensors):
        time.sleep(0.05 if planted == "rank" and env.get_rank() == 1 else 0.002 if planted == "disk" else 0)
        small = super().forward(non_id_tensors, embedding_tensors)
        return small + self.big(small.expand(-1, self.big[0].in_features)).mean(1, keepdim=True)


model = Model()
dense = torch.optim.SGD(model.parameters(), 0.1)
plan = Schedule(4, 1, steps)
facts = {"threads": torch.get_num_threads()}
with (
    TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model) as ctx,
    Profiler(folder, ctx, plan, facts=facts),
):
    for batch in DataLoader(Data(steps + 10), embedding_staleness=staleness):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
"""


@contextlib.contextmanager
def slowed(server: Part, stopped_s: float = 0.15, runs_s: float = 0.004) -> Iterator[None]:
    """Let a server run only part of the time, so its requests take longer than the model, even on a busy machine."""
    end = threading.Event()

    def pulse() -> None:
        while not end.is_set():
            server.process.signal(signal.SIGSTOP)
            end.wait(stopped_s)
            server.process.signal(signal.SIGCONT)
            end.wait(runs_s)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextlib.contextmanager
def slow_disk(server: Part, seconds: float) -> Iterator[None]:
    """Let each sync of a server's files take longer."""
    late = f"inject=fsync,fdatasync:delay_enter={int(seconds * 1e6)}"
    pid = str(server.process.pid)
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync", "-e", late, "-p", pid],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until("strace", lambda: traced(int(pid)), 60)
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait()


def traced(pid: int) -> bool:
    """Return whether every thread of a process has a tracer."""
    tasks = []
    for task in [*Path(f"/proc/{pid}/task").iterdir()]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended in the meantime
            tasks.append((task / "status").read_text())
    return all("TracerPid:\t0\n" not in text for text in tasks)


def advised(
    stack: Stack, folder: Path, planted: str, staleness: int = 8, *, steps: int = 20, disk: Part | None = None
) -> advice.Advice:
    """Train, and return the advice. The disk of the server ``disk`` becomes slow after the first step."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    profile = folder / f"{planted}-{staleness}"
    trainer = stack.trainer(
        script,
        *(str(profile), str(staleness), planted, str(steps)),
        ranks=2 if planted == "rank" else 1,
        env={"PERSIA_RUN_DIR": str(folder / f"{planted}-{staleness}-run")},
    )
    with contextlib.ExitStack() as during:
        if disk is not None:
            wait_until("the first step", lambda: "first step done" in trainer.output, 60)
            during.enter_context(slow_disk(disk, 3))
        assert trainer.wait(120) == 0, trainer.output
    return advice.advise(report.read(profile))


@pytest.mark.row("S4-62", "S3-19")
def test_each_bottleneck_gets_an_advice_of_its_own(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    with slowed(stack.parts["server-0"]):
        lookup, push = advised(stack, tmp_path, "server"), advised(stack, tmp_path, "server", 1)
    ranks = advised(stack, tmp_path, "rank")
    assert lookup.limit == "lookup" and "--servers" in lookup.text, str(lookup)
    assert push.limit == "push" and "train.staleness from 1" in push.text, str(push)
    assert (ranks.limit, ranks.rank) == ("ranks", 1) and "in dense" in ranks.text, str(ranks)


@pytest.mark.row("S4-62")
def test_a_server_that_is_asked_for_most_rows_is_named(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack(servers=2)
    with slowed(stack.parts["server-1"]):
        found = advised(stack, tmp_path, "uneven")
    assert found.limit == "lookup" and "server 1 is asked for 100% of the rows" in found.text, str(found)


@pytest.mark.nightly
@pytest.mark.row("S4-62")
def test_reading_and_threads_are_named_on_servers_too(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    data, threads = advised(stack, tmp_path, "data"), advised(stack, tmp_path, "threads")
    assert data.limit == "data" and "--data-compose" in data.text, str(data)
    assert threads.limit == "dense" and "train.threads from 1" in threads.text, str(threads)


@pytest.mark.nightly
@pytest.mark.row("S4-62")
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, which delays the syncs of a server")
def test_a_server_whose_log_waits_for_its_disk_is_named(make_stack: MakeStack, tmp_path: Path) -> None:
    """A server accepts requests while the oldest unsynced record of its log is less than two seconds old."""
    stack = make_stack(servers=2, log="every_second")
    found = advised(stack, tmp_path, "disk", steps=500, disk=stack.parts["server-1"])
    assert found.limit in ("lookup", "push") and "server 1 waited" in found.text, str(found)
    assert "disk of its log" in found.text, str(found)
