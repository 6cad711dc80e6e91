"""SIGTERM in a run with automatic checkpoints, in the embedded mode, without a launcher."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Batches, Configure
from test_checkpoints import STEPS, names, step, whole
from test_training import SLOTS, make, train
from waiting import wait_until

from persia.checkpoint.snapshot import Save
from persia.ctx import Checkpoints, TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding.data import PersiaBatch


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("waiting", [False, True])
def test_sigterm_saves_the_run_and_leaves(configure: Configure, tmp_path: Path, waiting: bool) -> None:
    """SIGTERM arrives in the body of the loop, or while the loop waits for a batch that never arrives."""

    class Slow(Batches):
        def __iter__(self) -> Iterator[PersiaBatch]:
            for number, batch in enumerate(super().__iter__()):
                if waiting and number == 7:
                    wait_until("every batch before this one to be trained on", lambda: ctx.step == 7, 30)
                    terminate()
                    released.wait()
                yield batch

    expected = whole(configure, tmp_path / "undisturbed")
    configure(SLOTS)
    released = threading.Event()
    with (
        pytest.raises(SystemExit) as left,
        make(checkpoints=Checkpoints(tmp_path / "run", every=1000)) as ctx,
    ):
        try:
            for batch in DataLoader(Slow(STEPS), reproducible=True):
                step(ctx, batch)
                if not waiting and ctx.step == 7:
                    terminate()
        finally:
            released.set()
    assert left.value.code == 75
    assert names(tmp_path / "run") == ["LATEST", "step-7"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert whole(configure, tmp_path / "run") == expected


def test_sigterm_in_a_loop_that_is_left_ends_the_next_one(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with pytest.raises(SystemExit) as left, make(checkpoints=Checkpoints(tmp_path / "run", every=1000)) as ctx:
        loader = DataLoader(Batches(STEPS), reproducible=True)
        for batch in loader:
            step(ctx, batch)
            if ctx.step == 3:
                terminate()
                break
        train(ctx, loader)
    assert left.value.code == 75
    assert names(tmp_path / "run") == ["LATEST", "step-3"]


class Endless(Batches):
    def __iter__(self) -> Iterator[PersiaBatch]:
        return itertools.cycle([self.batch(0, requires_grad=False)])


def evaluate(ctx: TrainCtx) -> None:
    """Receive SIGTERM in the middle of an evaluation that never ends."""
    with eval_ctx(model=ctx.model) as inner:
        for number, batch in enumerate(DataLoader(Endless(1))):
            inner.forward(batch)
            if number == 3:
                terminate()


@pytest.mark.parametrize(
    ("where", "saved"),
    [
        ("behind a loop", 3),
        ("behind the end", 5),
        ("in a step", 3),
        ("before it", 2),
        ("last step", 3),
        ("last save", 5),
    ],
)
def test_sigterm_outside_a_step_saves_what_was_trained(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, saved: int
) -> None:
    monkeypatch.setattr("persia.runtime.preemption.STEP_S", 0.2)
    write = Save._write

    def write_last(self: Save) -> None:
        if where == "last save" and threading.current_thread() is not threading.main_thread():
            terminate()
        write(self)

    monkeypatch.setattr(Save, "_write", write_last)
    configure(SLOTS)
    reached_the_end = False
    with pytest.raises(SystemExit) as left, make(checkpoints=Checkpoints(tmp_path / "run", every=1000)) as ctx:
        for batch in DataLoader(Batches(5), reproducible=True):
            if where == "before it" and batch.step == 3:
                evaluate(ctx)
            step(ctx, batch)
            if where == "in a step" and batch.step == 3:
                evaluate(ctx)
            if where == "last step" and batch.step == 3:
                terminate()
            if where in {"behind a loop", "last step"} and batch.step == 3:
                break
        if where in {"behind a loop", "behind the end"}:
            evaluate(ctx)
        reached_the_end = True
    assert left.value.code == 75
    assert reached_the_end == (where == "last step")
    assert names(tmp_path / "run") == ["LATEST", f"step-{saved}"]
    with make(checkpoints=Checkpoints(tmp_path / "run", every=1000)) as ctx:  # this process was not asked to stop
        assert ctx.step == saved
        train(ctx, DataLoader(Batches(5), reproducible=True))
        assert ctx.step == 5
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_before_the_first_step_leaves_at_once(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with pytest.raises(SystemExit) as left, make(checkpoints=Checkpoints(tmp_path / "run")):
        for _ in DataLoader(Batches(5)):
            terminate()
            pytest.fail("the first step went on")
    assert left.value.code == 75
    assert names(tmp_path / "run") == []


def test_sigterm_comes_twice_and_the_run_is_saved(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Save._write

    def write_late(self: Save) -> None:
        terminate()
        write(self)

    monkeypatch.setattr(Save, "_write", write_late)
    configure(SLOTS)
    with pytest.raises(SystemExit) as left, make(checkpoints=Checkpoints(tmp_path / "run", every=1000)) as ctx:
        for batch in DataLoader(Batches(STEPS)):
            step(ctx, batch)
            if ctx.step == 3:
                terminate()
    assert left.value.code == 75
    assert names(tmp_path / "run") == ["LATEST", "step-3"]


def test_an_error_is_told_though_sigterm_came_before_it(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with (
        pytest.raises(ZeroDivisionError),
        make(checkpoints=Checkpoints(tmp_path / "run", every=1000)) as ctx,
    ):
        for batch in DataLoader(Batches(STEPS)):
            step(ctx, batch)
            terminate()
            raise ZeroDivisionError
    assert names(tmp_path / "run") == []


@pytest.mark.parametrize("where", ["in the loop", "behind it"])
def test_ctrl_c_saves_the_run_and_leaves(configure: Configure, tmp_path: Path, where: str) -> None:
    configure(SLOTS)
    with pytest.raises(SystemExit) as left, make(checkpoints=Checkpoints(tmp_path / "run", every=1000)) as ctx:
        for batch in DataLoader(Batches(STEPS), reproducible=True):
            step(ctx, batch)
            if ctx.step == 3:
                if where == "behind it":
                    break
                os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the context went on")
    assert left.value.code == 130
    assert names(tmp_path / "run") == ["LATEST", "step-3"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), make():
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_twice_ends_at_once(configure: Configure, tmp_path: Path) -> None:
    """The checkpoint that the first Ctrl-C requested cannot be written."""
    configure(SLOTS)
    script = f"""
import os, signal, threading
import test_checkpoints as test
from conftest import Batches
from persia.checkpoint.snapshot import Save
from persia.ctx import Checkpoints
from persia.data import DataLoader

def write(self):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

Save._write = write
with test.make(checkpoints=Checkpoints({str(tmp_path / "run")!r}, every=1000)) as ctx:
    for batch in DataLoader(Batches(9)):
        test.step(ctx, batch)
        if ctx.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
"""
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "Ctrl-C: saving the run after this step" in done.stderr
    assert "Ctrl-C again: ending without saving the run" in done.stderr
    assert not (tmp_path / "run" / "step-3" / "MANIFEST.json").exists()
