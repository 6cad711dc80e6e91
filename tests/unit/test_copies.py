"""Replicas of checkpoints in an object store. The store is S3, served by a real program."""

import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import Batches, Configure, Verb
from object_server import Server, use
from test_checkpoints import STEPS, flip, names, whole
from test_training import SLOTS, everything, make, train
from typer.testing import CliRunner

from persia.checkpoint.object_store import ObjectStore, copy
from persia.cli.main import app
from persia.ctx import Checkpoints
from persia.data import DataLoader
from persia.errors import CheckpointError, ConfigError, StorageError, UsageError
from persia.runtime.job import MANIFEST
from persia_core import checkpoint as core

URL = "s3://bucket/runs/census"


@pytest.fixture(autouse=True)
def environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the server, and set the variables of a store to the server."""
    server.empty()
    use(server.address, monkeypatch)


def objects(url: str = URL) -> list[str]:
    """Return the keys below ``url``."""
    import obstore

    return sorted(each["path"] for each in obstore.list(ObjectStore(url)._store).collect())


def checkpoint(configure: Configure, folder: Path, seed: int = 1) -> Path:
    whole(configure, folder, steps=11, seed=seed)  # one step more, because a checkpoint follows the body of the loop
    return folder / "step-10"


def test_a_run_goes_on_from_its_copy_on_a_new_disk_with_equal_bits(configure: Configure, tmp_path: Path) -> None:
    expected = whole(configure, tmp_path / "undisturbed")
    whole(configure, tmp_path / "run", steps=23, upload_to=URL, keep_last=1)
    assert {key.split("/")[0] for key in objects()} == {"step-20"}
    shutil.rmtree(tmp_path / "run")
    configure(SLOTS)
    with make(seed=5, checkpoints=Checkpoints(tmp_path / "run", every=10, upload_to=URL, keep_last=1)) as ctx:
        assert ctx.step == 20
        train(ctx, DataLoader(Batches(STEPS), reproducible=True))
        assert everything(ctx) == expected
    assert names(tmp_path / "run") == ["LATEST", "step-25"]
    assert [each.name for each in ObjectStore(URL).whole()] == ["step-25"]


def enter_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process part of the job ``census``."""
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("PERSIA_JOB", "census")
    monkeypatch.setenv("PERSIA_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PERSIA_CKPT_DIR", str(tmp_path / "checkpoints"))


def test_a_run_that_lost_its_disk_is_found_by_its_replicas(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run belongs to a job, so its folder is named after the run."""
    saved = checkpoint(configure, tmp_path / "elsewhere")
    enter_job(tmp_path, monkeypatch)
    name = "census-20260101-000000"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "RUN").write_text(f"{name}\n")
    checkpoints = Checkpoints(upload_to=URL)
    assert checkpoints.name() == name
    store = checkpoints.store()
    assert store is not None and store.url == f"{URL}/{name}"
    store.put(saved, saved.name)
    shutil.rmtree(tmp_path / "run")
    assert Checkpoints(upload_to=URL).name() == name, "not finished"
    checkpoints._mark_finished()
    assert [each.name for each in store.whole()] == ["step-10"]
    shutil.rmtree(tmp_path / "run")
    assert Checkpoints(upload_to=URL).name() != name


def test_the_newest_run_counts_wherever_it_is_found(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk that replaces a lost one may have an older run."""
    saved = checkpoint(configure, tmp_path / "elsewhere")
    enter_job(tmp_path, monkeypatch)
    older, newer = "census-20260101-000000", "census-20260102-000000"
    shutil.copytree(saved, tmp_path / "checkpoints" / older / saved.name)
    ObjectStore(f"{URL}/{newer}").put(saved, saved.name)
    assert Checkpoints(upload_to=URL).name() == newer
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(saved, tmp_path / "checkpoints" / "census-20260103-000000" / saved.name)
    assert Checkpoints(upload_to=URL).name() == "census-20260103-000000"
    shutil.rmtree(tmp_path / "run")
    with monkeypatch.context() as context:
        context.setattr(ObjectStore, "interrupted_run", _unreachable)
        assert Checkpoints(upload_to=URL).name() == "census-20260103-000000"
        assert "without looking for a newer run" in caplog.text
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "checkpoints")
        with pytest.raises(StorageError):
            Checkpoints(upload_to=URL).name()


def _unreachable(store: ObjectStore, of: str) -> str | None:
    raise StorageError(f"{store.url}: no answer about {of}")


def test_the_newer_one_of_folder_and_store_counts(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole(configure, tmp_path / "run", steps=11)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    whole(configure, tmp_path / "run", steps=21, upload_to=URL)
    assert [each.name for each in ObjectStore(URL).whole()] == ["step-20"]
    for folder, older in (("old", True), ("run", False)):
        caplog.clear()
        with make(checkpoints=Checkpoints(tmp_path / folder, every=10, upload_to=URL)) as ctx:
            assert ctx.step == 20
        assert (f"downloading the checkpoint {URL}/step-20" in caplog.text) == older
    assert names(tmp_path / "old") == ["LATEST", "step-10", "step-20"]
    ObjectStore(URL)._delete("step-20")
    ObjectStore(URL).put(tmp_path / "run" / "step-10", "step-10")
    with make(checkpoints=Checkpoints(tmp_path / "run", every=10, upload_to=URL)) as ctx:
        assert ctx.step == 20, "an older copy changes nothing"


def test_large_files_go_in_parts(
    configure: Configure, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persia.checkpoint.object_store.PART_BYTES", 5 << 20)  # the smallest size that S3 accepts
    saved = checkpoint(configure, tmp_path / "run")
    content = os.urandom(12 << 20)
    (tmp_path / "large").write_bytes(content)
    ObjectStore(URL)._put("large", tmp_path / "large")
    assert {"1", "2", "3"} == set(re.findall(r"PUT /\S*/large\?partNumber=(\d+)", server.log.read_text()))
    assert ObjectStore(URL)._read("large") == content
    ObjectStore(URL).put(saved, "step-10")
    ObjectStore(URL).get("step-10", tmp_path / "back")
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == {
        path.name: path.read_bytes() for path in saved.iterdir()
    }


def test_a_copy_that_is_broken_off_is_none(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = ObjectStore._put
    puts: list[str] = []

    def broken_off(self: ObjectStore, key: str, path: Path) -> None:
        puts.append(key)
        if key.startswith("step-10/") and len(puts) > 2:
            raise StorageError("the store is gone", hint="find it")
        put(self, key, path)

    monkeypatch.setattr(ObjectStore, "_put", broken_off)
    checkpoints = Checkpoints(tmp_path / "run", every=10, upload_to=URL, keep_last=1)
    configure(SLOTS)
    with make(checkpoints=checkpoints) as ctx:
        train(ctx, DataLoader(Batches(STEPS), reproducible=True), 11)
        assert ctx.common_context is not None and ctx.common_context.checkpoint_thread is not None
        ctx.common_context.checkpoint_thread.wait()
        assert 0 < len([key for key in objects() if key.startswith("step-10/")]) < len(set(puts))
        assert ObjectStore(URL).whole() == []
        train(ctx, DataLoader(Batches(STEPS), reproducible=True), 10)
    assert checkpoints.not_uploaded == 1
    assert "step-10 is written, but not uploaded: the store is gone; next: find it" in caplog.text
    assert {key.split("/")[0] for key in objects()} == {"step-20"}, "what was broken off is deleted"


def test_another_checkpoint_of_the_same_name_is_never_mixed_with_the_first(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint(configure, tmp_path / "first")
    ObjectStore(URL).put(first, "step-10")
    before = objects()

    def refuse(self: ObjectStore, key: str, path: Path) -> None:
        raise StorageError("the store is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "_put", refuse)
        ObjectStore(URL).put(first, "step-10")  # the same checkpoint, so nothing is uploaded
        second = checkpoint(configure, tmp_path / "second", seed=2)
        with pytest.raises(StorageError, match="the store is gone"):
            ObjectStore(URL).put(second, "step-10")
    assert objects() == [key for key in before if not key.endswith(MANIFEST)]
    ObjectStore(URL).put(second, "step-10")
    ObjectStore(URL).get("step-10", tmp_path / "back")
    assert (tmp_path / "back" / MANIFEST).read_bytes() == (second / MANIFEST).read_bytes()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_copy_is_refused_and_leaves_nothing(damage: str, configure: Configure, tmp_path: Path) -> None:
    import obstore

    saved = checkpoint(configure, tmp_path / "run")
    ObjectStore(URL).put(saved, "step-10")
    store = ObjectStore(URL)._store
    damaged = (
        MANIFEST if damage == "manifest" else max(saved.glob("shard-*"), key=lambda path: path.stat().st_size).name
    )
    if damage == "remove":
        obstore.delete(store, f"step-10/{damaged}")
    elif damage == "cut":
        obstore.put(store, f"step-10/{damaged}", (saved / damaged).read_bytes()[:-1])
    else:
        shutil.copy(saved / damaged, tmp_path / "damaged")
        flip(tmp_path / "damaged")
        obstore.put(store, f"step-10/{damaged}", tmp_path / "damaged")
    with pytest.raises(CheckpointError, match=re.escape(f"{URL}/step-10/{damaged}")):
        ObjectStore(URL).get("step-10", tmp_path / "new" / "step-10")
    assert names(tmp_path / "new") == []


def test_a_damaged_replica_is_listed_beside_the_whole_ones(verb: Verb, configure: Configure, tmp_path: Path) -> None:
    import obstore

    saved = checkpoint(configure, tmp_path / "run")
    for name in ("step-9", "step-10"):
        ObjectStore(URL).put(saved, name)
    shutil.copy(saved / MANIFEST, tmp_path / "damaged")
    flip(tmp_path / "damaged")
    obstore.put(ObjectStore(URL)._store, f"step-9/{MANIFEST}", tmp_path / "damaged")
    whole_one, broken = verb("ckpt", "list", URL)[0].splitlines()
    assert whole_one.startswith(f"{URL}/step-10  step 10  ")
    assert broken.startswith(f"{URL}/step-9  BROKEN: ") and MANIFEST in broken
    with pytest.raises(CheckpointError, match=re.escape(f"{URL}/step-9")):
        ObjectStore(URL).whole()  # the newest checkpoint is unknown


def test_a_store_that_does_not_answer_holds_up_no_run_that_has_a_save(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole(configure, tmp_path / "run", steps=11)
    monkeypatch.setattr("persia.checkpoint.object_store.RETRY_S", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    configure(SLOTS)
    checkpoints = Checkpoints(tmp_path / "run", every=10, upload_to=URL)
    with make(checkpoints=checkpoints) as ctx:
        assert ctx.step == 10
        train(ctx, DataLoader(Batches(STEPS), reproducible=True), 11)
    assert "without looking for a newer replica" in caplog.text
    assert checkpoints.not_uploaded == 1
    assert names(tmp_path / "run") == ["LATEST", "step-10", "step-20"]
    with (
        pytest.raises(StorageError, match=f"cannot list the checkpoints below {URL}: Generic S3 error: .*127.0.0.1:1/"),
        make(checkpoints=Checkpoints(tmp_path / "other", upload_to=URL)),
    ):
        pass  # whether there is a checkpoint to resume from is unknown


def test_the_command_copies_there_and_back(configure: Configure, tmp_path: Path) -> None:
    saved = checkpoint(configure, tmp_path / "run")
    run = CliRunner().invoke
    assert f"{URL}: no checkpoints" in run(app, ["ckpt", "list", URL]).output
    assert run(app, ["ckpt", "copy", str(saved), f"{URL}/best"]).exit_code == 0
    listed = run(app, ["ckpt", "list", URL]).output
    assert re.search(rf"^{URL}/best  step 10  [\d,]+ rows  [\d,]+ bytes  20", listed)
    assert run(app, ["ckpt", "copy", f"{URL}/best", str(tmp_path / "back")]).exit_code == 0
    core.Checkpoint(str(tmp_path / "back")).verify()
    assert "ok: " in run(app, ["ckpt", "verify", f"{URL}/best"]).output
    for wrong in ([str(saved), str(tmp_path / "x")], [URL, URL], [str(saved), "s3://bucket"], [str(saved), "xy://a/b"]):
        with pytest.raises(ConfigError, match="s3://bucket/|xy://a as an object store"):
            copy(*wrong)
    with pytest.raises(StorageError, match="already exists"):
        copy(f"{URL}/best", str(tmp_path / "back"))
    with pytest.raises(CheckpointError, match=f"{URL}/none is not a checkpoint"):
        copy(f"{URL}/none", str(tmp_path / "none"))
    flip(max(saved.glob("shard-*"), key=lambda path: path.stat().st_size))
    with pytest.raises(CheckpointError, match="shard-"):
        copy(str(saved), f"{URL}/damaged")


def test_a_url_is_wanted_for_replicas(tmp_path: Path) -> None:
    for given in ("", "bucket/prefix", "s3:/bucket/prefix", tmp_path):
        said = f"Checkpoints(upload_to=...): {given!r} is not a URL, because it does not begin with a scheme and ://; "
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}expected a URL such as s3://bucket/prefix$"):
            Checkpoints(tmp_path, upload_to=given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^Checkpoints\(copy_to=\.\.\.\): cannot use xy://a as an object store: "):
        Checkpoints(tmp_path, copy_to="xy://a")


def test_the_old_names_of_an_upload_work(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    checkpoints = Checkpoints(tmp_path / "run", every=10, copy_to=URL)
    with make(checkpoints=checkpoints) as ctx:
        train(ctx, DataLoader(Batches(3), reproducible=True))
    assert [each.name for each in ObjectStore(URL).whole()] == ["step-3"]
    assert checkpoints.uncopied == checkpoints.not_uploaded == 0
    with pytest.raises(UsageError, match="two names of one argument"):
        Checkpoints(tmp_path, copy_to=URL, upload_to=URL)
