"""Waiting: the GIL is free, Ctrl-C works, and every wait has a name (ARCHITECTURE section 11, defect 12)."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Batches, Configure
from test_training import SLOTS, make

from persia.data import DataLoader, IterableDataset
from persia.embedding.data import PersiaBatch
from persia.errors import WaitTimeoutError


class Stuck(IterableDataset):
    """Yields one batch and then nothing until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield Batches(1).batch(0)
        self.go.wait()


def test_other_threads_run_while_a_batch_is_waited_for(configure: Configure) -> None:
    configure(SLOTS)
    data = Stuck()
    counted = 0

    def count() -> None:
        nonlocal counted
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            counted += 1
        data.go.set()

    with make():
        iterator = iter(DataLoader(data))
        next(iterator).discard()
        thread = threading.Thread(target=count)
        thread.start()
        assert next(iterator, None) is None
        thread.join()
    assert counted > 1000


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from test_training import make
from test_waiting import Stuck
from persia.data import DataLoader
with make():
    iterator = iter(DataLoader(Stuck()))
    next(iterator)
    try:
        print("waiting", flush=True)
        next(iterator)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_wait_and_the_process_ends_cleanly(configure: Configure) -> None:
    configure(SLOTS)
    tests = ROOT / "tests"
    script = SCRIPT.format(path=[str(tests), str(tests / "unit")])
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    start = time.monotonic()
    os.kill(child.pid, signal.SIGINT)
    assert child.stdout.readline() == "interrupted\n"
    assert time.monotonic() - start < 20
    assert child.wait(30) == 0
    child.stdout.close()


def test_a_wait_that_the_loop_itself_blocks_is_named(configure: Configure) -> None:
    """A batch without a backward stays in the staleness window: with K = 2 the third look-up cannot start."""
    configure(SLOTS)
    with make():
        kept = []
        with pytest.raises(WaitTimeoutError, match=r"the gradients of step 1 to be pushed"):
            for batch in DataLoader(Batches(3), embedding_staleness=2, timeout_ms=3000):
                kept.append(batch)  # noqa: PERF402 - the list keeps the batches before the error
        assert len(kept) == 2
        kept.clear()


def test_a_capacity_of_a_billion_rows_costs_nothing(configure: Configure) -> None:
    """PersiaML allocated for its default capacity up front and was killed (ARCHITECTURE section 11, defect 16)."""
    configure(SLOTS, capacity=1_000_000_000)
    before = resident_bytes()
    with make() as ctx:
        for batch in DataLoader(Batches(2)):
            batch.push([np_zeros(batch.batch_size), None], 1.0)
        assert ctx.engine.stats()["memory_bytes"] < 16 << 20
        assert resident_bytes() - before < 64 << 20


def np_zeros(samples: int) -> np.ndarray:
    return np.zeros((samples, 4), np.float32)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
