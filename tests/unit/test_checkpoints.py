"""Runs with automatic checkpoints, and their resumption, in the embedded mode."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Batches, Configure
from test_training import SLOTS, everything, loss_fn, make, train

from persia.checkpoint.snapshot import Save
from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.errors import CheckpointError, PersiaError, StorageError, UsageError
from persia_core.forward import TrainingBatch
from persia_core.serving import blake3

STEPS = 25


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def whole(configure: Configure, folder: Path, steps: int = STEPS, seed: int = 1, **options: object) -> bytes:
    """Train up to ``steps`` with a checkpoint after every tenth."""
    configure(SLOTS)
    with make(seed, checkpoints=Checkpoints(folder, every=10, **options)) as ctx:  # type: ignore[arg-type]
        train(ctx, DataLoader(Batches(STEPS), reproducible=True), steps - ctx.step)
        return everything(ctx)


def step(ctx: TrainCtx, batch: TrainingBatch) -> None:
    output, labels = ctx.forward(batch)
    ctx.backward(loss_fn(output, labels[0]))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.stack
def test_a_run_goes_on_behind_its_newest_save_with_equal_bits(configure: Configure, tmp_path: Path) -> None:
    expected = whole(configure, tmp_path / "undisturbed")
    whole(configure, tmp_path / "run", steps=23)
    assert names(tmp_path / "run") == ["LATEST", "step-10", "step-20"]
    torch.manual_seed(99)  # the initial state of the new process does not matter
    configure(SLOTS)
    with make(seed=5, checkpoints=Checkpoints(tmp_path / "run", every=10)) as ctx:
        assert ctx.step == 20
        assert len(train(ctx, DataLoader(Batches(STEPS), reproducible=True))) == STEPS - 20
        assert everything(ctx) == expected


@pytest.mark.usefixtures("forks")
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    config = tmp_path / "embedding_config.yml"
    config.write_text("slots_config:\n  a: {dim: 4}\n  b: {dim: 4}\n")
    script = f"""
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any
import test_checkpoints as test
from conftest import Batches
from persia.ctx import Checkpoints
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.data import PersiaBatch

last, folder = int(sys.argv[1]), sys.argv[2]
with test.make(checkpoints=Checkpoints(folder, every=10)) as ctx:
    test.train(ctx, DataLoader(Batches({STEPS}), reproducible=True), last - ctx.step)
    if last < {STEPS}:
        os.kill(os.getpid(), signal.SIGKILL)
    Path(folder, "rows").write_bytes(test.everything(ctx))
"""
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )

    def run(last: int, folder: str) -> int:
        env = {**os.environ, "PYTHONPATH": path, "PERSIA_EMBEDDING_CONFIG": str(config)}
        words = [sys.executable, "-c", script, str(last), folder]
        return subprocess.run(words, cwd=tmp_path, env=env, check=False).returncode

    assert run(STEPS, "undisturbed") == 0
    assert [run(last, "run") for last in (4, 23, STEPS)] == [*[-signal.SIGKILL] * 2, 0]
    assert (tmp_path / "run" / "rows").read_bytes() == (tmp_path / "undisturbed" / "rows").read_bytes()


def test_old_saves_are_removed(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with make(checkpoints=Checkpoints(tmp_path / "run", every=5, keep_last=2)) as ctx:
        train(ctx, DataLoader(Batches(STEPS)))
    assert names(tmp_path / "run") == ["LATEST", "step-20", "step-25"]
    assert (tmp_path / "run" / "LATEST").read_text() == "step-25\n"


def test_a_schedulers_state_belongs_to_the_run(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)

    def ctx_and_scheduler() -> tuple[TrainCtx, torch.optim.lr_scheduler.StepLR]:
        bare = make()
        scheduler = torch.optim.lr_scheduler.StepLR(bare.dense_optimizer, step_size=3, gamma=0.5)
        checkpoints = Checkpoints(tmp_path / "run", every=4, state={"decay": scheduler})
        return TrainCtx(
            bare.embedding_optimizer,
            bare.dense_optimizer,
            mixed_precision=False,
            model=bare.model,
            checkpoints=checkpoints,
        ), scheduler

    ctx, scheduler = ctx_and_scheduler()
    with ctx:
        for batch in DataLoader(Batches(8)):
            step(ctx, batch)
            scheduler.step()
    again, restored = ctx_and_scheduler()
    with again:
        assert restored.state_dict() == scheduler.state_dict()
        assert restored.last_epoch == 8
        again.dump_checkpoint(tmp_path / "by hand")
    with pytest.raises(CheckpointError, match=r"the states differ; in the checkpoint: decay; in .*: none"):
        make(checkpoints=Checkpoints(tmp_path / "run")).__enter__()
    (tmp_path / "run").rename(tmp_path / "other")
    third, loaded = ctx_and_scheduler()
    with third:
        third.load_checkpoint(tmp_path / "by hand")  # this checkpoint has no states, so the objects do not change
        assert loaded.last_epoch == 0
        third.load_checkpoint(tmp_path / "other" / "step-8")
        assert loaded.state_dict() == scheduler.state_dict()
        train(third, DataLoader(Batches(9)))
    assert names(tmp_path / "run") == ["LATEST", "step-9"]
    with make(checkpoints=Checkpoints(tmp_path / "third")) as stranger:
        with pytest.raises(CheckpointError, match=r"the states differ; in the checkpoint: decay; in .*: none"):
            stranger.load_checkpoint(tmp_path / "other" / "step-8")
        assert stranger.step == 0


@pytest.mark.parametrize("damaged", ["MANIFEST.json", "dense.pt", "shard-*.arrow"])
def test_a_damaged_newest_save_is_never_passed_over_unasked(configure: Configure, tmp_path: Path, damaged: str) -> None:
    folder = tmp_path / "run"
    expected = whole(configure, folder, 23)
    flip(next((folder / "step-20").glob(damaged)))
    with pytest.raises(CheckpointError, match=r"(?s)step-20.*step-10 is intact$") as refused:
        whole(configure, folder)
    assert "--set checkpoint.allow_previous=true" in refused.value.hint
    assert refused.value.hint.endswith(f"rm -r {folder / 'step-20'}")
    with make(checkpoints=Checkpoints(folder, every=10, allow_previous=True)) as ctx:
        assert ctx.step == 10
        train(ctx, DataLoader(Batches(STEPS), reproducible=True), 23 - 10)
        assert everything(ctx) == expected
    for newer in folder.glob("step-2*"):  # a checkpoint whose folder is damaged is retried under the next name
        shutil.rmtree(newer)
    (folder / "LATEST").write_text("step-10\n")
    flip(next((folder / "step-10").glob(damaged)))
    with pytest.raises(CheckpointError, match="step-10"):
        whole(configure, folder, allow_previous=True)


def test_a_checkpoint_in_a_newer_format_is_never_called_damaged(configure: Configure, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole(configure, folder, 23)
    manifest = folder / "step-20" / "MANIFEST.json"
    known = int(json.loads(manifest.read_text())["format"])
    body, _, _ = manifest.read_text().replace(f'"format": {known}', '"format": 99', 1).rpartition(',\n  "blake3": "')
    manifest.write_text(f'{body},\n  "blake3": "{blake3(body.encode())}"\n}}\n')
    with pytest.raises(
        CheckpointError, match=r"(?s)has format 99.*install a newer Persia.*step-10 is intact$"
    ) as refused:
        whole(configure, folder)
    assert "allow_previous=true" in refused.value.hint and "rm -r" not in refused.value.hint


@pytest.mark.row("S4-29")
def test_training_goes_on_while_a_save_is_written(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have the state of the cut, although training continues. The next checkpoint waits for them."""
    expected = whole(configure, tmp_path / "undisturbed")
    write, trained = Save._write, threading.Event()

    def write_late(self: Save) -> None:
        assert trained.wait(30)
        write(self)

    configure(SLOTS)
    with make(checkpoints=Checkpoints(tmp_path / "run", every=10)) as ctx:
        monkeypatch.setattr(Save, "_write", write_late)
        for batch in DataLoader(Batches(STEPS), reproducible=True):
            step(ctx, batch)
            if ctx.step == 19:  # no file of step 10's save is written yet
                trained.set()
        assert everything(ctx) == expected
    for saved in (10, 20):
        folder = tmp_path / f"from-{saved}"
        folder.mkdir()
        shutil.copytree(tmp_path / "run" / f"step-{saved}", folder / f"step-{saved}")
        assert whole(configure, folder) == expected


def test_a_dump_that_does_not_block(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(5), reproducible=True))
        expected = everything(ctx)
        write, trained = Save._write, threading.Event()

        def write_late(self: Save) -> None:
            assert trained.wait(30)
            write(self)

        def refuse(self: Save) -> None:
            raise StorageError("no space left on the device")

        monkeypatch.setattr(Save, "_write", write_late)
        ctx.dump_checkpoint(tmp_path / "run", blocking=False)
        assert names(tmp_path / "run") == [".saving-1"]
        trained.set()
        ctx.wait_for_dump_embedding()
        ctx.load_checkpoint(tmp_path / "run")
        assert everything(ctx) == expected
        monkeypatch.setattr(Save, "_write", refuse)
        for ask in (ctx.wait_for_dump_embedding, ctx.clear_embeddings, lambda: ctx.load_checkpoint(tmp_path / "run")):
            ctx.dump_embedding(tmp_path / "rows", blocking=False)
            with pytest.raises(StorageError, match="no space left"):
                ask()
        assert everything(ctx) == expected  # nothing was cleared
        ctx.clear_embeddings()  # raises no error, because the error was already reported


def test_the_save_of_a_step_that_was_passed_over_is_made_up_for(configure: Configure, tmp_path: Path) -> None:
    """The script leaves one batch untrained, so no save happens at the step of the interval."""
    configure(SLOTS)
    with make(checkpoints=Checkpoints(tmp_path / "run", every=10)) as ctx:
        loader = DataLoader(Batches(STEPS))
        train(ctx, loader, 10)
        assert names(tmp_path / "run") == []
        for batch in loader:
            if batch.step == 20:
                continue
            step(ctx, batch)
            if ctx.step == 22:
                break
        ctx.wait_for_dump_embedding()
        assert names(tmp_path / "run") == ["LATEST", "step-10", "step-21"]


def test_what_makes_no_sense_is_refused(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    for options, named in (
        ({"every": 0}, "every=0"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"every": 2.5}, r"every=2\.5"),
        ({"state": {"loss": 3.0}}, "expected an object with state_dict and load_state_dict, found float"),
    ):
        with pytest.raises(UsageError, match=named):
            Checkpoints(tmp_path, **options)
    with pytest.raises(UsageError, match="pass a folder"):
        Checkpoints()
    with pytest.raises(UsageError, match=r"expected persia\.ctx\.Checkpoints, found str"):
        make(checkpoints="run")
    (tmp_path / "file").write_text("")
    with pytest.raises(PersiaError, match="file"), make(checkpoints=Checkpoints(tmp_path / "file")):
        pass


def test_the_end_of_the_loop_is_saved(configure: Configure, tmp_path: Path) -> None:
    """If code after the loop, such as an evaluation, is interrupted and restarted, nothing is trained twice."""
    configure(SLOTS)
    for trained in (STEPS, 0):
        with make(checkpoints=Checkpoints(tmp_path / "run", every=1000)) as ctx:
            assert len(train(ctx, DataLoader(Batches(STEPS)))) == trained
            assert ctx.step == STEPS


def test_a_second_loop_of_a_resumed_run_is_a_warning(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed script repeats the passes before its checkpoint. In this test, it is at the end of the third pass."""
    configure(SLOTS)
    for resumed in (False, True):
        with make(checkpoints=Checkpoints(tmp_path / "run", every=3)) as ctx, caplog.at_level(logging.WARNING):
            for _ in range(3):
                train(ctx, DataLoader(Batches(2)))
        assert caplog.text.count("its checkpoint is at the end of pass 3 over the data") == int(resumed)
        assert caplog.text.count("ctx.epochs(N)") == int(resumed)


def test_a_checkpoint_is_complete_before_another_generation_begins(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a generation begins, servers cancel the unfinished files of earlier generations."""
    configure(SLOTS)
    found: list[bool] = []
    with make() as ctx:
        train(ctx, DataLoader(Batches(2)))
        begin = ctx._backend._begin

        def begins(*arguments: Any) -> None:
            found.append((tmp_path / "save" / "MANIFEST.json").exists())
            begin(*arguments)

        monkeypatch.setattr(ctx._backend, "_begin", begins)
        ctx.dump_checkpoint(tmp_path / "save", blocking=False)
        ctx.configure_embedding_parameter_servers(EmbeddingConfig())
    assert found[0]
