"""Resumed scripts with several passes over the data. Each way to count passes trains like an uninterrupted run."""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Batches, Configure
from test_training import SLOTS, everything, loss_fn, make

from persia.backend.local import LocalBackend
from persia.checkpoint.run_state import PASSES, RunState
from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import PersiaBatch
from persia.errors import UsageError

PASS, EPOCHS = 4, 3


class CrashError(Exception):
    pass


class Counter:
    """An epoch number with a state dict, which a script stores itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class AllEpochs(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        for _ in range(EPOCHS):
            yield from Batches(PASS)


class Script:
    """A training script that crashes after the step ``until``. Each start behaves like a new process.

    Args:
        folder: The folder of the checkpoints.
        kind: The way in which the script counts its passes.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.seen: list[tuple[int, int]] = []  # epoch and step
        self.ended: list[int] = []

    def start(self, until: int | None = None, between: int | None = None) -> bytes | None:
        """Return rows and weights at the end; None after a crash."""
        own = Counter()
        state = {"epoch": own} if self.kind == "own" else None
        try:
            with make(checkpoints=Checkpoints(self.folder, every=3, state=state)) as ctx:
                loader = DataLoader(AllEpochs() if self.kind == "one data set" else Batches(PASS), reproducible=True)
                ways: dict[str, Callable[[], Iterable[int]]] = {
                    "ctx.epochs": lambda: ctx.epochs(EPOCHS),
                    "own": lambda: range(own.epoch, EPOCHS),
                    "by step": lambda: range(ctx.step // PASS, EPOCHS),
                    "one data set": lambda: range(1),
                    "range": lambda: range(EPOCHS),
                }
                for epoch in ways[self.kind]():
                    own.epoch = epoch
                    self.one(ctx, loader, epoch, until)
                    if between == epoch:
                        raise CrashError
                return everything(ctx)
        except CrashError:
            return None

    def one(self, ctx: TrainCtx, loader: DataLoader, epoch: int, until: int | None) -> None:
        for batch in loader:
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            self.seen.append((epoch, ctx.step))
            if ctx.step == until:
                raise CrashError
        self.ended.append(epoch)


_whole: list[bytes] = []


@pytest.fixture
def whole(configure: Configure, tmp_path: Path) -> bytes:
    """Return rows and weights of a run that was not interrupted."""
    configure(SLOTS)
    if not _whole:
        found = Script(tmp_path / "whole", "range").start()
        assert found is not None
        _whole.append(found)
    return _whole[0]


@pytest.mark.parametrize(("kind", "until"), [
    *((kind, until) for kind in ("ctx.epochs", "own", "one data set") for until in (4, 5, 11)),
    *(("by step", until) for until in (4, 11)),
])  # fmt: skip
def test_a_resumed_script_trains_as_often_as_one_that_was_whole(
    whole: bytes, tmp_path: Path, kind: str, until: int
) -> None:
    script = Script(tmp_path / "run", kind)
    assert script.start(until) is None
    assert script.start() == whole
    assert script.seen[-1][1] == PASS * EPOCHS
    if kind == "ctx.epochs":
        assert all(epoch == (step - 1) // PASS for epoch, step in script.seen)
        assert script.ended[-1] == EPOCHS - 1


@pytest.mark.parametrize("kind", ["ctx.epochs", "one data set"])
def test_a_crash_between_two_epochs_repeats_what_follows_the_loop(whole: bytes, tmp_path: Path, kind: str) -> None:
    script = Script(tmp_path / "run", kind)
    script.start(between=0)
    again = Script(tmp_path / "run", kind)
    assert again.start() == whole
    assert again.ended[0] == 0, "its evaluation, for example"
    assert 0 not in [epoch for epoch, _ in again.seen]


def test_passes_that_are_counted_from_0_again_are_a_warning(
    whole: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(tmp_path / "run", "range")
    script.start(11)
    with caplog.at_level(logging.WARNING):
        assert script.start() != whole
    assert caplog.text.count("the run's checkpoint was written after 2 finished passes") == 1
    assert "ctx.epochs(N)" in caplog.text


def test_a_pass_that_was_at_its_end_is_a_warning(
    whole: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both the step and the position show that the pass has ended, so a script may count the pass twice."""
    script = Script(tmp_path / "run", "by step")
    script.start(5)
    with caplog.at_level(logging.WARNING):
        assert script.start() != whole
    assert caplog.text.count("had no batch: its checkpoint is at the end of pass 1 over the data") == 1
    assert "second training loop" not in caplog.text
    assert script.seen[-1][1] == PASS * (EPOCHS - 1)


def test_a_run_that_is_resumed_in_its_first_pass_is_exact(
    whole: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(tmp_path / "run", "range")
    script.start(4)
    with caplog.at_level(logging.WARNING):
        assert script.start() == whole
    assert "second training loop" not in caplog.text


def test_a_script_that_is_changed_to_epochs_continues(whole: bytes, tmp_path: Path) -> None:
    Script(tmp_path / "run", "range").start(11)
    assert Script(tmp_path / "run", "ctx.epochs").start() == whole


def test_a_finished_run_has_no_epoch_left_but_the_end_of_the_last(whole: bytes, tmp_path: Path) -> None:
    script = Script(tmp_path / "run", "ctx.epochs")
    assert script.start() == whole
    again = Script(tmp_path / "run", "ctx.epochs")
    assert again.start() == whole
    assert (again.seen, again.ended) == ([], [EPOCHS - 1])


def test_a_checkpoint_by_hand_between_two_epochs_continues_with_the_next(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with make() as ctx:
        for epoch in ctx.epochs(3):
            Script.one(Script(tmp_path, ""), ctx, DataLoader(Batches(PASS)), epoch, None)
            if epoch == 1:
                ctx.dump_checkpoint(tmp_path / "by hand")
                break
    with make() as ctx:
        ctx.load_checkpoint(tmp_path / "by hand")
        assert [*ctx.epochs(4)] == [2, 3]
        assert [*ctx.epochs(4)] == []
        assert [*ctx.epochs(5)] == [4]


def test_a_checkpoint_of_an_older_version_is_counted_from_0(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configure(SLOTS)
    rank_state = RunState.rank_state

    def old(self: RunState) -> dict[str, Any]:
        return {key: value for key, value in rank_state(self).items() if key != PASSES}

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "rank_state", old)
        Script(tmp_path / "run", "range").start(11)
    with caplog.at_level(logging.WARNING):
        script = Script(tmp_path / "run", "ctx.epochs")
        script.start()
    assert "older version, which did not count epochs" in caplog.text
    assert script.seen[0] == (0, 10)
    caplog.clear()
    (tmp_path / "run").rename(tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(RunState, "rank_state", old)
        Script(tmp_path / "run", "range").start(4)
        with caplog.at_level(logging.WARNING):
            Script(tmp_path / "run", "range").start()
    assert "an older version, which did not count passes" in caplog.text


def test_what_a_checkpoint_cannot_tell_apart_is_a_warning(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(SLOTS)
    with make(checkpoints=Checkpoints(tmp_path / "run")) as ctx, caplog.at_level(logging.WARNING):
        for _ in ctx.epochs(1):
            for _ in range(2):
                for batch in DataLoader(Batches(PASS)):
                    output, labels = ctx.forward(batch)
                    ctx.backward(loss_fn(output, labels[0]))
    assert "epoch 0 has more than one training loop" in caplog.text
    caplog.clear()
    with make() as ctx, caplog.at_level(logging.WARNING):
        for _ in ctx.epochs(2):
            for batch in DataLoader(Batches(PASS)):
                output, labels = ctx.forward(batch)
                ctx.backward(loss_fn(output, labels[0]))
                break
    assert caplog.text.count("epoch 0: its training loop was left before the end") == 1


def test_a_wrong_number_of_epochs_is_refused(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(SLOTS)
    ctx = make()
    with pytest.raises(UsageError, match="outside its `with` block"):
        ctx.epochs(2)
    with ctx:
        for wrong in (-1, 2.0, True):
            with pytest.raises(UsageError, match="an integer"):
                ctx.epochs(wrong)  # type: ignore[arg-type]
        for _ in ctx.epochs(1):
            with pytest.raises(UsageError, match="epochs cannot be nested"):
                ctx.epochs(1)
        monkeypatch.setattr(LocalBackend, "all_gather", lambda _, what, mine: [mine, [mine[0] + 1, mine[1]]])
        with pytest.raises(UsageError, match=r"ctx.epochs: 2 on rank 0, 3 on rank 1"):
            ctx.epochs(2)
