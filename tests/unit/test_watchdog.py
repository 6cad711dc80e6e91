"""A training loop that hangs reports the place and ends. One that waits for data or files does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from persia.runtime import clock, watchdog

pytestmark = pytest.mark.usefixtures("forks")

SCRIPT = """
import sys
import threading
import time

import numpy as np
import torch

from persia.checkpoint.snapshot import Save
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import SGD


class Slow(IterableDataset):
    def __iter__(self):
        for number in range(4):
            if number == 2:
                threading.Event().wait(20.0 if sys.argv[1] == "data" else 8.0)
            ids = np.arange(8, dtype=np.uint64)
            yield PersiaBatch([IDTypeFeatureWithSingleID("a", ids)], [], [Label(np.ones((8, 1), np.float32))])


def write_late(save, write=Save._write):
    time.sleep(8.0)
    write(save)


Save._write = write_late


def a_call_that_never_returns():
    threading.Event().wait()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, dense, embeddings):
        return self.layer(embeddings[0])


model = Model()
with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), lr=0.1), mixed_precision=False, model=model) as ctx:
    for batch in DataLoader(Slow(buffer_size=1)):
        output, labels = ctx.forward(batch)
        ctx.backward(output.sum())
        if ctx.step == 1 and sys.argv[1] == "go on":
            ctx.dump_checkpoint("saved")
        if ctx.step == 4 and sys.argv[1] == "hang":
            a_call_that_never_returns()
print("trained", ctx.step if ctx.common_context else 4)
"""


@pytest.mark.parametrize(("what", "code"), [("hang", 70), ("go on", 0), ("data", 70)])
def test_a_loop_that_hangs_ends_and_one_that_waits_for_data_or_files_goes_on(
    what: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "embedding_config.yml").write_text("slots_config:\n  a: {dim: 4}\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "PERSIA_EMBEDDING_CONFIG": str(tmp_path / "embedding_config.yml"),
        "PERSIA_HANG_TIMEOUT": "5",
        "PERSIA_DATA_TIMEOUT": "5" if what == "data" else "",
        "PERSIA_FLIGHT_DIR": str(tmp_path / "flight"),
    }
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py", what],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == code, done.stderr
    said = "has made no progress after step 4" in done.stderr and "in a_call_that_never_returns" in done.stderr
    assert said == (what == "hang"), done.stderr
    assert ("trained 4" in done.stdout) == (what == "go on")
    places = {
        "hang": "in the code of its script, after optimizer of step 4, for",
        "data": "in data wait of step 3 for",
    }
    assert all((place in done.stderr) == (which == what) for which, place in places.items()), done.stderr
    assert (f"last calls of rank 0: {tmp_path / 'flight' / 'rank-0.json'}" in done.stderr) == (code == 70)
    assert ("(PERSIA_DATA_TIMEOUT=5)" in done.stderr) == (what == "data")


@pytest.mark.parametrize("tell", ["pass", "raise ValueError('no such rank')", "time.sleep(600)", "again(reason)"])
def test_a_process_that_hangs_ends_whatever_fails(tell: str) -> None:
    """The script replaces standard error, other ranks are unreachable, or the report to them never ends.

    In another case, the process receives its own report from another rank in the meantime.
    """
    script = f"""
import faulthandler
import sys
import threading
import time

from persia.runtime import watchdog


class Tee:
    def write(self, text):
        raise OSError("the log is full")

    def flush(self):
        pass


def again(reason):
    dump = faulthandler.dump_traceback

    def dump_meanwhile(*args, **kwargs):
        faulthandler.dump_traceback = dump
        other = threading.Thread(target=watchdog.end, args=(reason, lambda reason: None))
        other.start()
        other.join(60)
        dump(*args, **kwargs)

    faulthandler.dump_traceback = dump_meanwhile


def tell(reason):
    {tell}


sys.stderr = Tee()
watchdog._LAST_S = 2.0
watchdog.end("rank 0 makes no progress", tell)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert done.returncode == 70, done.stderr
    if "sleep" not in tell:
        assert done.stderr.count("error: rank 0 makes no progress") == 1, done.stderr
        assert done.stderr.count("threads of rank 0:") == 1
    assert ("could not be notified: ValueError: no such rank" in done.stderr) == ("raise" in tell)


def test_the_limit_that_applies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_state", watchdog._State())
    monkeypatch.setattr(clock, "now", lambda: 31.0)
    assert watchdog.stalled(10.0) == (31.0, "PERSIA_HANG_TIMEOUT=10")
    with watchdog.collective():
        assert watchdog.stalled(10.0) == (31.0, "PERSIA_HANG_TIMEOUT=10, doubled in a collective: 20 s")
        assert watchdog.stalled(20.0) is None
