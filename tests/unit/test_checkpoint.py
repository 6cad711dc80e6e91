"""Checkpoints in scripts and on the command line. The commit protocol itself is tested in rust_core/store."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from conftest import Batches, Configure, TinyModel
from test_training import SLOTS, everything, loss_fn, make, train

from persia.backend.local import LocalBackend
from persia.backend.remote import RemoteBackend
from persia.checkpoint import rng_state
from persia.ctx import EmbeddingCtx, PreprocessMode, eval_ctx
from persia.data import DataLoader
from persia.embedding.optim import SGD, Adagrad
from persia.errors import CheckpointError, StorageError, UsageError


@pytest.fixture
def saved(configure: Configure, tmp_path: Path) -> Path:
    configure(SLOTS)
    path = tmp_path / "ckpt"
    with make() as ctx:
        train(ctx, DataLoader(Batches(10), reproducible=True))
        ctx.dump_checkpoint(path, with_jit_model=True)
        (tmp_path / "expected").write_bytes(everything(ctx))
    return path


@pytest.mark.stack
def test_a_checkpoint_holds_everything_and_plain_torch_reads_the_dense_part(saved: Path) -> None:
    names = {path.name for path in saved.iterdir()}
    assert {"MANIFEST.json", "dense.pt", "opt.pt", "jit_dense.pt", "rank-0.state"} <= names
    assert any(name.startswith("shard-") and name.endswith(".arrow") for name in names)
    assert not any(name.startswith(".") for name in names)
    TinyModel().load_state_dict(torch.load(saved / "dense.pt", weights_only=True))
    with make(seed=5) as ctx:
        ctx.load_checkpoint(saved)
        assert everything(ctx) == (saved.parent / "expected").read_bytes()
        assert ctx.step == 10


@pytest.mark.stack
def test_pyarrow_reads_the_rows(saved: Path) -> None:
    total = 0
    for file in sorted(saved.glob("shard-*.arrow")):
        table = pa.ipc.open_file(file).read_all()
        assert {"id", "weights", "state"} <= set(table.column_names)
        total += table.num_rows
    with make() as ctx:
        ctx.load_checkpoint(saved)
        assert ctx.get_embedding_size() == [total]


def test_a_second_dump_into_the_same_directory_replaces_the_first(saved: Path) -> None:
    with make(seed=3) as ctx:
        ctx.load_checkpoint(saved)
        train(ctx, DataLoader(Batches(4, seed=8), reproducible=True))
        ctx.dump_checkpoint(saved)
        expected = everything(ctx)
    with make(seed=4) as ctx:
        ctx.load_checkpoint(saved)
        assert everything(ctx) == expected
    assert not (saved / "jit_dense.pt").exists(), "files of the replaced checkpoint go with it"


def test_an_evaluation_needs_no_optimizer(saved: Path) -> None:
    model = TinyModel()
    with EmbeddingCtx(PreprocessMode.EVAL, model) as ctx:
        ctx.load_checkpoint(saved)
        size = ctx.get_embedding_size()
        assert size[0] > 0
        batch = Batches(1).batch(0, requires_grad=False)
        output, _ = ctx.forward(batch)
    with make() as trainer:
        trainer.load_checkpoint(saved)
        with eval_ctx(trainer.model) as inner:
            expected, _ = inner.forward(Batches(1).batch(0, requires_grad=False))
    assert torch.equal(output, expected)


def test_every_rank_loads_the_model_and_rank_0_the_rows(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "is_rank_0", False)  # as on the other ranks
    model, wanted = TinyModel(), torch.load(saved / "dense.pt", weights_only=True)
    with EmbeddingCtx(PreprocessMode.EVAL, model) as ctx:
        ctx.load_checkpoint(saved)
        assert ctx.get_embedding_size() == [0]
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_a_relative_directory_is_below_the_folder_of_checkpoints(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_CKPT_DIR", str(tmp_path / "all"))
    with make() as ctx:
        ctx.load_checkpoint(saved)
        ctx.dump_checkpoint("first")
        assert (tmp_path / "all" / "first" / "MANIFEST.json").is_file()
        ctx.load_checkpoint("first")
        assert everything(ctx) == (tmp_path / "expected").read_bytes()


def test_servers_have_one_folder_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context: RemoteBackend = object.__new__(RemoteBackend)
    with pytest.raises(UsageError, match="PERSIA_CKPT_DIR is not set; set it to the folder"):
        context.checkpoint_dir("first")
    monkeypatch.setenv("PERSIA_CKPT_DIR", str(tmp_path / "all"))
    assert context.checkpoint_dir("first") == context.checkpoint_dir(tmp_path / "all" / "first")
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "link").symlink_to(tmp_path)
    for outside in ("../other", tmp_path / "other", "a/../../other", "link/other"):
        with pytest.raises(UsageError, match="expected a folder below PERSIA_CKPT_DIR"):
            context.checkpoint_dir(outside)


def test_embeddings_alone(saved: Path, tmp_path: Path) -> None:
    with make() as ctx:
        ctx.load_checkpoint(saved)
        expected = everything(ctx)
        ctx.dump_embedding(tmp_path / "rows", blocking=False)
        ctx.wait_for_dump_embedding()
        ctx.clear_embeddings()
        ctx.load_embedding(tmp_path / "rows", blocking=False)
        ctx.wait_for_load_embedding()
        assert everything(ctx) == expected
        with pytest.raises(CheckpointError, match=r"no dense\.pt"):
            ctx.load_checkpoint(tmp_path / "rows")
        assert everything(ctx) == expected


def test_state_dicts_by_name(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with make() as ctx:
        assert ctx.model is not None
        ctx.dump_torch_state_dict(ctx.model, tmp_path / "states", "model.pt")
        other = TinyModel()
        ctx.load_torch_state_dict(other, tmp_path / "states" / "model.pt")
        assert all(torch.equal(x, y) for x, y in zip(ctx.model.parameters(), other.parameters(), strict=True))
        with pytest.raises(CheckpointError, match="no such file"):
            ctx.load_torch_state_dict(other, tmp_path / "states" / "absent.pt")
        (tmp_path / "states" / "junk.pt").write_bytes(b"junk")
        with pytest.raises(CheckpointError, match="not a state dict"):
            ctx.load_torch_state_dict(other, tmp_path / "states" / "junk.pt")


def corrupt_dense(path: Path) -> str:
    data = bytearray((path / "dense.pt").read_bytes())
    data[len(data) // 2] ^= 4
    (path / "dense.pt").write_bytes(data)
    return r"dense\.pt"


def truncate_shard(path: Path) -> str:
    shard = sorted(path.glob("shard-*.arrow"))[0]
    os.truncate(shard, shard.stat().st_size - 9)
    return shard.name


def remove_shard(path: Path) -> str:
    shard = sorted(path.glob("shard-*.arrow"))[-1]
    shard.unlink()
    return shard.name


def damage_manifest(path: Path) -> str:
    text = (path / "MANIFEST.json").read_text()
    (path / "MANIFEST.json").write_text(text.replace('"step"', '"stop"', 1))
    return r"MANIFEST\.json"


def remove_manifest(path: Path) -> str:
    (path / "MANIFEST.json").unlink()
    return r"MANIFEST\.json"


@pytest.mark.row("S4-26")
@pytest.mark.stack
@pytest.mark.parametrize("damage", [corrupt_dense, truncate_shard, remove_shard, damage_manifest, remove_manifest])
def test_a_damaged_checkpoint_is_refused_and_nothing_changes(saved: Path, damage: Callable[[Path], str]) -> None:
    text = damage(saved)
    with make(seed=6) as ctx:
        train(ctx, DataLoader(Batches(3, seed=2), reproducible=True))
        before = everything(ctx)
        with pytest.raises(CheckpointError, match=text):
            ctx.load_checkpoint(saved)
        assert everything(ctx) == before
        assert ctx.step == 3
        train(ctx, DataLoader(Batches(3, seed=2), reproducible=True))
    done = subprocess.run(
        [sys.executable, "-m", "persia", "ckpt", "verify", str(saved)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("error: ") and re.search(text, done.stderr)


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ("a: {dim: 8}\nb: {dim: 4}", "dim|8"),
        ("a: {dim: 4}\nc: {dim: 4}", r"table \"?b\b|\bb\b.*no such table|`b`"),
        (
            "a: {dim: 4}\nb: {dim: 4, hash_stack_config: {hash_stack_rounds: 2, embedding_size: 100}}",
            r"slot b were saved with hash_stack_config none, but this run has \{hash_stack_rounds: 2, embedding_size:",
        ),
        ("a: {dim: 4}\nb: {dim: 4, pooling: mean}", "slot b was trained with pooling sum, but this run has mean"),
        (
            "a: {dim: 4}\nb: {dim: 4, sqrt_scaling: true}",
            "slot b was trained with sqrt_scaling false, but this run has true",
        ),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(
    saved: Path, configure: Configure, slots: str, text: str
) -> None:
    configure(slots)
    with make() as ctx:
        with pytest.raises(CheckpointError, match=text):
            ctx.load_embedding(saved)
        assert ctx.get_embedding_size() == [0]


def test_a_checkpoint_of_another_optimizer_or_model_is_refused(saved: Path) -> None:
    with make(optimizer=Adagrad(0.1)) as ctx:
        with pytest.raises(CheckpointError, match="(?i)optimizer|state"):
            ctx.load_checkpoint(saved)
        assert ctx.get_embedding_size() == [0]
    other = TinyModel(dense=5)
    with EmbeddingCtx(PreprocessMode.EVAL, other) as ctx2:
        with pytest.raises(CheckpointError, match="model differs"):
            ctx2.load_checkpoint(saved)
        assert ctx2.get_embedding_size() == [0]


@pytest.mark.parametrize(
    ("missing", "lr", "text"),
    [(None, 0.0, "created with lr=0"), ("embedding_lr", 0.1, "KeyError"), ("cuda", 0.1, "cuda")],
)
def test_a_random_state_or_learning_rate_that_does_not_fit_changes_nothing(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None, lr: float, text: str
) -> None:
    configure(SLOTS)
    kept = rng_state.random_state
    monkeypatch.setattr(
        rng_state, "random_state", lambda optimizer: {k: v for k, v in kept(optimizer).items() if k != missing}
    )
    with make() as ctx:
        train(ctx, DataLoader(Batches(3)))
        ctx.dump_checkpoint(tmp_path / "ckpt")
    with make(optimizer=SGD(lr), seed=2) as ctx:
        assert ctx.model is not None
        before = torch.nn.utils.parameters_to_vector(ctx.model.parameters()).clone()
        with pytest.raises(
            CheckpointError, match=rf"rank-0\.state: the random state or the learning rate cannot.*{text}"
        ):
            ctx.load_checkpoint(tmp_path / "ckpt")
        assert ctx.get_embedding_size() == [0] and ctx.step == 0
        assert torch.equal(torch.nn.utils.parameters_to_vector(ctx.model.parameters()), before)


def test_a_directory_that_cannot_be_written_is_named(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    (tmp_path / "file").write_text("")
    with make() as ctx:
        train(ctx, DataLoader(Batches(2)))
        with pytest.raises(StorageError, match="file"):
            ctx.dump_checkpoint(tmp_path / "file")
        train(ctx, DataLoader(Batches(2)))


@pytest.mark.parametrize("state", [{"next": object()}, {3: 1}, {"next": (1, 2)}])
def test_a_state_that_no_checkpoint_can_keep_is_named(configure: Configure, state: dict[str, int]) -> None:
    configure(SLOTS)

    class Odd(Batches):
        def state_dict(self) -> dict[str, int]:
            return state

    with make() as ctx, pytest.raises(UsageError, match="state_dict"):
        train(ctx, DataLoader(Odd(3)))


def test_a_dense_optimizer_of_another_class_is_refused(saved: Path) -> None:
    with make() as ctx:
        ctx.dense_optimizer = torch.optim.Adam(ctx.model.parameters())  # type: ignore[union-attr]
        with pytest.raises(CheckpointError, match="dense optimizer differs.*betas"):
            ctx.load_checkpoint(saved)
        assert ctx.get_embedding_size() == [0]


@pytest.mark.parametrize("name", ["../victim", "{}/victim", "MANIFEST.json", ".hidden"])
def test_a_name_outside_the_checkpoint_overwrites_nothing(configure: Configure, tmp_path: Path, name: str) -> None:
    configure(SLOTS)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    with make() as ctx:
        with pytest.raises(UsageError, match="name"):
            ctx.dump_checkpoint(tmp_path / "ckpt", opt_filename=name.format(tmp_path))
        with pytest.raises(UsageError, match="name"):
            ctx.dump_torch_state_dict(ctx.dense_optimizer, tmp_path / "states", "../victim")
    assert victim.read_text() == "untouched"


def test_the_manifest_counts_what_was_saved(configure: Configure, tmp_path: Path) -> None:
    """The counts are correct even while look-ups in advance insert rows."""
    configure(SLOTS)
    with make() as ctx:
        for batch in DataLoader(Batches(20, batch_size=2000, ids=10**9), embedding_staleness=8):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            if batch.step % 5 == 0:
                ctx.dump_checkpoint(tmp_path / f"{batch.step}")
    for step in (5, 10, 15, 20):
        shards = (tmp_path / f"{step}").glob("shard-*.arrow")
        total = 0
        for shard in shards:
            with pa.ipc.open_file(shard) as reader:
                total += reader.read_all().num_rows
        manifest = json.loads((tmp_path / f"{step}" / "MANIFEST.json").read_text())
        assert sum(manifest["head"]["rows"].values()) == total
        assert manifest["head"]["step"] == step


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_training import make, loss_fn
from conftest import Batches
from persia.data import DataLoader
with make() as ctx:
    for batch in DataLoader(Batches(100000), reproducible=True):
        output, labels = ctx.forward(batch)
        ctx.backward(loss_fn(output, labels[0]))
        ctx.dump_checkpoint({target!r})
        print(ctx.step, flush=True)
"""


def test_kill_9_while_saving_leaves_a_whole_checkpoint(configure: Configure, tmp_path: Path) -> None:
    """A trainer that saves at every step is killed at random moments. A recent checkpoint always loads."""
    configure(SLOTS)
    target = tmp_path / "ckpt"
    here = Path(__file__).parent
    script = CHILD.format(path=[str(here), str(here.parent)], target=str(target))
    at_least = 0
    for lines in (1, 2, 5):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(lines):
            at_least = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with make(optimizer=SGD(0.1)) as ctx:
            ctx.load_checkpoint(target)
            assert ctx.step >= at_least
            train(ctx, DataLoader(Batches(2)))
    manifest = json.loads((target / "MANIFEST.json").read_text())
    assert manifest
