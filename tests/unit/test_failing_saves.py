"""Failed and slow saves: their retries, their reports, and the files that remain."""

import contextlib
import itertools
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Batches, Configure
from test_checkpoints import STEPS, names, step, whole
from test_training import SLOTS, everything, make, train
from waiting import wait_until

from persia.backend.local import LocalBackend
from persia.checkpoint import snapshot
from persia.checkpoint.run_state import RunState
from persia.checkpoint.snapshot import Save
from persia.ctx import Checkpoints
from persia.data import DataLoader
from persia.errors import RunLostError, StorageError, UnreachableError, UsageError


@pytest.mark.row("S4-27")
@pytest.mark.parametrize("in_the_background", [True, False])
@pytest.mark.parametrize("failure", [StorageError, UnreachableError, RunLostError])
def test_a_save_that_fails_is_tried_again_and_then_training_goes_on(
    failure: type[Exception],
    in_the_background: bool,
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = whole(configure, tmp_path / "undisturbed")
    refusals = itertools.chain([True] * 5, itertools.repeat(False))
    write, begin = Save._write, RunState.begin_save

    def refuse_to_write(self: Save) -> None:
        if in_the_background and next(refusals):
            raise failure("no space left on the device")
        write(self)

    def refuse_to_begin(self: RunState, directory: Path, more: dict[str, dict[str, Any]]) -> Save:
        if not in_the_background and next(refusals):
            raise failure("no space left on the device")
        return begin(self, directory, more)

    monkeypatch.setattr(Save, "_write", refuse_to_write)
    monkeypatch.setattr(RunState, "begin_save", refuse_to_begin)
    monkeypatch.setattr("persia.loop.autosave.RETRY_S", (0.0, 0.0, 0.0))
    checkpoints = Checkpoints(tmp_path / "run", every=10)
    configure(SLOTS)
    with make(checkpoints=checkpoints) as ctx:
        for batch in DataLoader(Batches(STEPS), reproducible=True):
            if ctx.common_context is not None and ctx.common_context.checkpoint_thread is not None:
                ctx.common_context.checkpoint_thread.wait()
            step(ctx, batch)
        assert everything(ctx) == expected
    assert checkpoints.failed == 1
    # The step is 10, or one soon after: a failed save is retried at a later step boundary.
    assert re.search(r"checkpoint of step 1\d abandoned, training continues: no space left", caplog.text)
    latest, saved, end = names(tmp_path / "run")
    assert (latest, saved[:-1], end) == ("LATEST", "step-2", "step-25")


@pytest.mark.row("S4-25")
def test_a_folder_that_takes_no_saves_is_told_before_training(configure: Configure) -> None:
    configure(SLOTS)
    told = rf"Checkpoint storage validation failed: .*/proc: user {os.geteuid()} cannot write here: .*; the folder"
    with pytest.raises(StorageError, match=told), make(checkpoints=Checkpoints("/proc")):  # read-only
        pytest.fail("training began")


def test_a_dump_that_failed_does_not_end_the_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged when it occurs, and raised at the next wait. In this test, the context waits at its end."""
    write = Save._write

    def refuse(self: Save) -> None:
        if "by hand" in self.what:
            raise StorageError("no space left on the device")
        write(self)

    monkeypatch.setattr(Save, "_write", refuse)
    configure(SLOTS)
    with (
        pytest.raises(StorageError, match="no space left"),
        make(checkpoints=Checkpoints(tmp_path / "run", every=10)) as ctx,
    ):
        for batch in DataLoader(Batches(STEPS)):
            step(ctx, batch)
            if ctx.step == 5:
                ctx.dump_checkpoint(tmp_path / "by hand", blocking=False)
        train(ctx, DataLoader(Batches(2)))
        assert ctx.step == STEPS + 2
    assert re.search(r"the save of step 5 into \S+by hand failed: no space left", caplog.text)
    assert names(tmp_path / "run") == ["LATEST", "step-20", "step-25", "step-27"]


@pytest.mark.parametrize("in_time", [True, False])
def test_a_context_that_fails_lets_its_save_be_written(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_time: bool,
) -> None:
    write, left = Save._write, threading.Event()

    def write_late(self: Save) -> None:
        if in_time:
            wait_until("the context to wait for it", lambda: "which is not complete" in caplog.text, 30)
        elif left.wait(30.0):
            raise StorageError("the context is gone")
        write(self)

    monkeypatch.setattr(Save, "_write", write_late)
    monkeypatch.setattr("persia.ctx.base._WRITTEN_S", 15.0 if in_time else 0.2)
    configure(SLOTS)
    with (
        pytest.raises(ZeroDivisionError, match="mine"),
        make(checkpoints=Checkpoints(tmp_path / "run", every=10)) as ctx,
    ):
        for batch in DataLoader(Batches(STEPS)):
            step(ctx, batch)
            if ctx.step == 12:
                raise ZeroDivisionError("mine")
    assert ("LATEST" in names(tmp_path / "run")) == in_time
    assert f"step-10 {'is complete' if in_time else 'is abandoned'}" in caplog.text
    left.set()
    for thread in threading.enumerate():
        if thread.name == "persia-save":
            thread.join(30)


@pytest.mark.parametrize("name", ["publish_latest", "prune"])
def test_a_save_is_written_though_what_comes_behind_it_fails(
    name: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no space left on the device")

    monkeypatch.setattr(f"persia_core.checkpoint.{name}", refuse)
    checkpoints = Checkpoints(tmp_path / "run", every=10, keep_last=1)
    configure(SLOTS)
    with make(checkpoints=checkpoints) as ctx:
        train(ctx, DataLoader(Batches(STEPS)))
    assert checkpoints.failed == 0
    assert "failed" not in caplog.text and caplog.text.count("is written, but") == 3
    saves = ["step-10", "step-20", "step-25"]
    assert names(tmp_path / "run") == (["step-25"] if name == "publish_latest" else ["LATEST", *saves])


def test_a_save_that_is_given_up_as_ranks_agree_is_counted(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "run", every=10)

    def all_gather(self: LocalBackend, what: str, mine: object) -> list[object]:
        checkpoints.failed += what == "checkpoint"  # as if the thread that writes gave up the save at this moment
        return [mine]

    monkeypatch.setattr(LocalBackend, "all_gather", all_gather)
    configure(SLOTS)
    with make(checkpoints=checkpoints) as ctx:
        train(ctx, DataLoader(Batches(STEPS)))
    assert checkpoints.failed == 3


def test_a_long_wait_for_a_save_is_logged(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    def end() -> None:
        wait_until("a word about it", lambda: "still waits for the save" in caplog.text, 20)
        released.set()

    monkeypatch.setattr(Save, "_write", lambda _: released.wait(30))
    monkeypatch.setattr("persia.checkpoint.snapshot.REMIND_S", 0.1)
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(5)))
        ctx.dump_checkpoint(tmp_path / "run", blocking=False)
        ends = threading.Thread(target=end)
        ends.start()
        ctx.wait_for_dump_embedding()
        ends.join()
    assert re.search(r"rank 0 still waits for the save of step 5 into \S+run, which began \d+ s ago", caplog.text)


@pytest.mark.parametrize("what", ["one name for two", "what cannot be pickled", "what cannot be read"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_state_that_cannot_be_saved_leaves_nothing_behind(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, blocking: bool
) -> None:
    configure(SLOTS)

    def unreadable() -> dict[str, object]:
        raise RuntimeError("the device is gone")

    with make() as ctx:
        train(ctx, DataLoader(Batches(2)))
        with monkeypatch.context() as patch:
            if what == "what cannot be pickled":
                patch.setattr(ctx.dense_optimizer, "state_dict", lambda: {"schedule": lambda: 1})
            if what == "what cannot be read":
                patch.setattr(torch, "save", lambda *_: unreadable())
            name = "dense.pt" if what == "one name for two" else "opt.pt"
            error, text = {
                "one name for two": (
                    UsageError,
                    r"file name 'dense\.pt': the checkpoint already has a file of that name",
                ),
                "what cannot be pickled": (
                    UsageError,
                    r"cannot save opt\.pt: its state has an object that cannot be pickled",
                ),
                "what cannot be read": (StorageError, r"cannot save dense\.pt: the device is gone"),
            }[what]
            with pytest.raises(error, match=text) as caught:
                ctx.dump_checkpoint(tmp_path / "run" / "first", opt_filename=name, blocking=blocking)
        assert not [path for path in tmp_path.rglob("*") if "first" in path.parts]  # while the error is still held
        del caught
        ctx.dump_checkpoint(tmp_path / "run" / "first")


@pytest.mark.parametrize("fails", [True, False])
def test_a_save_that_was_written_keeps_no_copy_of_the_model(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(2)))
        save = ctx._run_state.begin_save(tmp_path / "run", {})
        if fails:
            monkeypatch.setattr(snapshot.Save, "_write", lambda self: self.add_state("bad/name", {}))
        with pytest.raises(UsageError) if fails else contextlib.nullcontext():
            save.write()
        assert not save._files


@pytest.mark.parametrize("fails", [4, 8, None])
def test_a_run_whose_last_save_is_missing_is_not_finished(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: int | None,
) -> None:
    """The save is retried at the end of the context. If it fails again, a restarted run repeats the missing steps."""
    expected = whole(configure, tmp_path / "undisturbed")
    write, tries = Save._write, itertools.count(1)

    def refuse(self: Save) -> None:
        if "step 25" in self.what and (fails is None or next(tries) <= fails):
            raise StorageError("no space left on the device")
        write(self)

    configure(SLOTS)
    with monkeypatch.context() as patch:
        patch.setattr(Save, "_write", refuse)
        patch.setattr("persia.loop.autosave.RETRY_S", (0.0, 0.0, 0.0))
        saved = fails == 4
        told = r"the run is not finished: its last checkpoint, of step 25, cannot be written: no space left.*step 20"
        with (
            contextlib.nullcontext() if saved else pytest.raises(StorageError, match=told) as caught,
            make(checkpoints=Checkpoints(tmp_path / "run", every=10)) as ctx,
        ):
            train(ctx, DataLoader(Batches(STEPS), reproducible=True))
        assert "checkpoint of step 25 abandoned: no space left" in caplog.text
        assert "training continues" not in caplog.text, "no step follows"
        if not saved:
            assert caught is not None and "resumes after its newest checkpoint" in caught.value.hint
    assert names(tmp_path / "run")[-1] == ("step-25" if saved else "step-20")
    with make(checkpoints=Checkpoints(tmp_path / "run", every=10)) as ctx:
        assert len(train(ctx, DataLoader(Batches(STEPS), reproducible=True))) == (0 if saved else 5)
        assert everything(ctx) == expected
    assert names(tmp_path / "run")[-1] == "step-25"


def test_a_state_that_cannot_be_pickled_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    class Unpicklable(torch.nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {**super().state_dict(*args, **options), "hook": lambda: 0}

    with pytest.raises(UsageError, match=r"cannot save dense\.pt: its state has an object that cannot be pickled"):
        snapshot.dump_state(Unpicklable(1, 1), tmp_path, "dense.pt", False)
    assert not [*tmp_path.iterdir()]
