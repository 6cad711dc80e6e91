"""Retention, pruning, verification and retries of checkpoints, and a full disk."""

import errno
import itertools
import math
import os
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from conftest import Batches, Configure, Verb
from test_checkpoints import STEPS, flip, names, step, whole
from test_training import SLOTS, everything, make, train
from trainer_files import config_of, fit

from persia.checkpoint import retention
from persia.checkpoint.retention import Saved, kept
from persia.checkpoint.snapshot import Save
from persia.ctx import Checkpoints
from persia.data import DataLoader
from persia.errors import StorageError, UsageError
from persia_core import checkpoint

NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)


@pytest.fixture
def in_ten_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_now", lambda: datetime.now(timezone.utc) + timedelta(days=10))


@pytest.mark.row("S4-53")
@pytest.mark.parametrize(
    ("days", "least", "stay"),
    [([1, 2, 3, 8, 9], 1, 3), ([8, 9], 1, 1), ([8, 9, 10], 2, 2), ([1, 8, 2, 9], 1, 3), ([1, 2], 5, 5), ([], 1, 1)],
)
def test_the_newest_and_those_within_the_age_stay(
    days: list[int], least: int, stay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_now", lambda: NOW)
    found = [Saved(Path(f"step-{-n}"), -n, 1, NOW - timedelta(days=each)) for n, each in enumerate(days)]
    assert kept(found, timedelta(days=7), least=least) == stay


@pytest.mark.row("S4-53")
@pytest.mark.parametrize(("days", "left"), [(1.0, ["step-10", "step-20", "step-25"]), (1e-9, ["step-25"])])
def test_checkpoints_older_than_keep_days_are_deleted_but_the_newest(
    configure: Configure, tmp_path: Path, days: float, left: list[str]
) -> None:
    configure(SLOTS)
    with make(checkpoints=Checkpoints(tmp_path / "run", every=10, keep_last=9, keep_days=days)) as ctx:
        train(ctx, DataLoader(Batches(STEPS)))
    assert names(tmp_path / "run") == ["LATEST", *left]
    for wrong in (0, math.inf, math.nan, 1e9):
        with pytest.raises(UsageError, match=f"keep_days={wrong}"):
            Checkpoints(tmp_path / "run", keep_days=wrong)


@pytest.fixture
def damaged(configure: Configure, tmp_path: Path) -> Path:
    """The folder of checkpoints of the steps 10, 20 and 25. The newest has a damaged file."""
    configure(SLOTS)
    with make(checkpoints=Checkpoints(tmp_path / "run", every=10)) as ctx:
        train(ctx, DataLoader(Batches(STEPS)))
    flip(tmp_path / "run" / "step-25" / "dense.pt")
    return tmp_path / "run"


@pytest.mark.row("S4-53")
def test_a_damaged_checkpoint_makes_no_young_one_old(damaged: Path, verb: Verb) -> None:
    before = names(damaged)
    assert [each.step for each in retention.checkpoints_in(damaged)] == [25, 20, 10]  # files are not read
    assert "would delete 0 of 3 checkpoints, " in verb("ckpt", "prune", "run", "--older", "7d", "--dry-run")[0]
    assert "ok: deleted 0 of 3 checkpoints, " in verb("ckpt", "prune", "run", "--older", "7d")[0]
    assert retention.prune(damaged, lambda found: kept(found, timedelta(days=7))) == []
    assert names(damaged) == before


@pytest.mark.row("S4-53")
@pytest.mark.parametrize("option", [("--older", "7d"), ("--keep-last", "1")])
def test_a_dry_run_lists_what_is_deleted(damaged: Path, verb: Verb, in_ten_days: None, option: tuple[str, str]) -> None:
    """The newest checkpoint is kept, and so is the newest intact one."""
    del in_ten_days
    listed = verb("ckpt", "prune", "run", *option, "--dry-run")[0].splitlines()
    assert [line.split()[0] for line in listed[:-1]] == ["run/step-10"]
    assert verb("ckpt", "prune", "run", *option)[0].splitlines()[:-1] == listed[:-1]
    assert names(damaged) == ["LATEST", "step-20", "step-25"]


@pytest.mark.row("S4-53")
def test_prune_lists_what_is_old_and_then_deletes_it(tmp_path: Path, verb: Verb, in_ten_days: None) -> None:
    del in_ten_days
    config = config_of(tmp_path, checkpoint={"every": 3, "keep": 9})
    trainer, _ = fit(config)
    assert trainer.folder is not None
    saves = Path(trainer.folder.saves(config))
    before = names(saves)
    assert len(before) > 4
    out = verb("ckpt", "prune", "runs/one", "--older", "7d", "--dry-run")[0].splitlines()
    listed = sorted(re.findall(r"step-\d+  ", "\n".join(out)))
    newest = max((name for name in before if name != "LATEST"), key=lambda name: int(name[5:]))
    assert listed == sorted(f"{name}  " for name in before if name not in ("LATEST", newest))
    assert out[-1].startswith(f"would delete {len(before) - 2} of {len(before) - 1} checkpoints, ")
    assert names(saves) == before
    assert "0 of" in verb("ckpt", "prune", str(saves), "--older", "11d")[0] and names(saves) == before
    assert "deleted" in verb("ckpt", "prune", str(saves), "--older", "7d", "--keep-last", "2")[0]
    assert len(names(saves)) == 3
    assert "ok: deleted 1 of 2" in verb("ckpt", "prune", str(saves), "--older", "240h")[0]
    assert names(saves) == ["LATEST", newest]
    verb("ckpt", "verify", str(saves / newest))


def test_prune_refuses_what_it_would_not_understand(tmp_path: Path, verb: Verb) -> None:
    (tmp_path / "saves").mkdir()
    for age in ("36501d", "9" * 20 + "d", "9" * 5000 + "m"):
        assert "expected at most 36500d" in verb("ckpt", "prune", "saves", "--older", age, code=2)[1]
    assert "such as 7d" in verb("ckpt", "prune", "saves", "--older", "7", code=2)[1]
    assert "pass --older AGE" in verb("ckpt", "prune", "saves", code=2)[1]
    assert "expected a run, or a folder" in verb("ckpt", "prune", "none", "--keep-last", "1", code=2)[1]
    assert "0 of 0" in verb("ckpt", "prune", "saves", "--older", "7d")[0]


def failing(times: int, error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first ``times`` saves fail."""
    write, tries = Save._write, itertools.count(1)

    def refuse(self: Save) -> None:
        if next(tries) <= times:
            raise error()
        write(self)

    monkeypatch.setattr(Save, "_write", refuse)
    monkeypatch.setattr("persia.loop.autosave.RETRY_S", (0.0, 0.0, 0.0))


@pytest.mark.row("S4-27")
def test_the_log_counts_the_attempts_of_a_checkpoint(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    failing(2, lambda: StorageError("a bad disk", hint="replace it"), monkeypatch)
    configure(SLOTS)
    with make(checkpoints=Checkpoints(tmp_path / "run", every=1000)) as ctx:
        train(ctx, DataLoader(Batches(5)))
    for attempt in (1, 2):
        line = f"checkpoint of step 5 failed, retrying in 0 s: a bad disk (attempt={attempt}); next: replace it"
        assert line in caplog.text
    assert re.search(r"step-5 written in \d+\.\d s \(attempt=3\)", caplog.text)


@pytest.mark.row("S4-27")
def test_a_checkpoint_that_reads_back_differently_is_written_again(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = whole(configure, tmp_path / "undisturbed")
    write, tries = Save._write, itertools.count(1)

    def write_badly(self: Save) -> None:
        write(self)
        if next(tries) == 1:
            flip(tmp_path / "run" / "step-10" / "dense.pt")

    caplog.set_level("INFO")
    monkeypatch.setattr(Save, "_write", write_badly)
    monkeypatch.setattr("persia.loop.autosave.RETRY_S", (0.0, 0.0, 0.0))
    configure(SLOTS)
    with make(checkpoints=Checkpoints(tmp_path / "run", every=10, verify=True)) as ctx:
        for batch in DataLoader(Batches(STEPS), reproducible=True):
            if ctx.common_context is not None and ctx.common_context.checkpoint_thread is not None:
                ctx.common_context.checkpoint_thread.wait()
            step(ctx, batch)
        assert everything(ctx) == expected
    hint = f"check the storage of {tmp_path / 'run'}: it lost or changed files of this checkpoint"
    failed = rf"checkpoint of step 10 failed, retrying in 0 s: .*dense\.pt.* \(attempt=1\); next: {re.escape(hint)}\n"
    assert re.search(failed, caplog.text)
    assert re.search(r"step-1\d written in .*\(attempt=2\)", caplog.text)


@pytest.mark.row("S4-27")
def test_a_checkpoint_that_reads_back_differently_is_not_left(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Save._write

    def write_badly(self: Save) -> None:
        write(self)
        flip(tmp_path / "run" / "step-5" / "dense.pt")

    monkeypatch.setattr(Save, "_write", write_badly)
    monkeypatch.setattr("persia.loop.autosave.RETRY_S", (0.0,))
    configure(SLOTS)
    with (
        pytest.raises(StorageError, match="the run is not finished"),
        make(checkpoints=Checkpoints(tmp_path / "run", every=1000, verify=True)) as ctx,
    ):
        train(ctx, DataLoader(Batches(5)))
    assert not [*(tmp_path / "run").glob("step-*")] and checkpoint.latest(tmp_path / "run") is None


@pytest.mark.row("S4-53")
@pytest.mark.parametrize("has_space", [False, True])
def test_a_full_disk_is_told_with_the_folder_what_is_needed_and_what_is_free(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_space: bool,
) -> None:
    whole(configure, tmp_path / "run")
    size = retention.checkpoints_in(tmp_path / "run")[0].size
    text = "input/output error" if has_space else f"{os.strerror(errno.ENOSPC)} (os error 28)"
    failing(99, lambda: StorageError(f"/disk/shard-1: {text}"), monkeypatch)
    with (
        pytest.raises(StorageError, match=text.partition(" (")[0]) as caught,
        make(checkpoints=Checkpoints(tmp_path / "run", every=10)) as ctx,
    ):
        train(ctx, DataLoader(Batches(STEPS), reproducible=True))
    told = f"; {tmp_path / 'run'} has "
    for each in (caplog.text, str(caught.value)):
        assert (told in each) != has_space
        assert (
            f"bytes free, the last checkpoint has {size:,} bytes. Enlarge the volume, or delete old checkpoints: "
            "persia ckpt prune" in each
        ) != (has_space)
    assert ("; next: check the path" in caplog.text) == has_space, "the text about a full disk has its own next step"


@pytest.mark.row("S4-26")
def test_verify_lists_keys_and_shapes_of_the_model(configure: Configure, tmp_path: Path, verb: Verb) -> None:
    whole(configure, tmp_path / "run")
    lines = verb("ckpt", "verify", "run/step-20", "--keys")[0].splitlines()
    state = torch.load(tmp_path / "run" / "step-20" / "dense.pt", weights_only=True)
    expected = [f"dense.pt  {key}  {'x'.join(map(str, value.shape))}  float32" for key, value in state.items()]
    assert lines[:-1] == expected and lines[-1].startswith("ok: run/step-20: ")
    flip(tmp_path / "run" / "step-20" / "dense.pt")
    assert "dense.pt" in verb("ckpt", "verify", "run/step-20", "--keys", code=4)[1]
