"""Failures after which a checkpoint in an object store must still exist, and imported rows in a store."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Batches, Configure
from object_server import LOSE, UNCONDITIONAL, Answer, Proxy, Request, Server
from test_object_store import RUN, URL, damage, exactly, small
from test_training import SLOTS, make, train

from persia.checkpoint.snapshot import Load, Save
from persia.ctx import Checkpoints
from persia.data import DataLoader
from persia.errors import CheckpointError, ConfigError, StorageError
from persia.runtime.places import Url
from persia.trainer.start_rows import start_folder
from persia_core import checkpoint as core


def test_the_files_of_a_save_that_begins_during_a_commit_stay(
    configure: Configure, store: Server, proxy: Proxy
) -> None:
    """After the put of the manifest, only files that existed before it are deleted."""
    configure(SLOTS)
    small(f"{URL}/one", 1)
    old, new = ".saving-76/shard-000.arrow", ".saving-77/shard-000.arrow"
    store.request("PUT", f"/bucket/{RUN}/one/{old}", b"half")

    def begin_another(request: Request) -> None:
        if request.is_manifest:
            store.request("PUT", f"/bucket/{RUN}/one/{new}", b"half")

    proxy.set_rule(begin_another)
    small(f"{URL}/one", 2, first=1)
    left = store.keys(f"{RUN}/one/")
    assert old not in left and new in left
    proxy.set_rule(lambda _: None)
    small(f"{URL}/one", 3, first=2)
    exactly(store, f"{URL}/one")


def test_a_save_whose_remains_cannot_be_deleted_is_complete(
    configure: Configure, store: Server, proxy: Proxy, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(SLOTS)
    small(f"{URL}/one", 1)

    def refuse(request: Request) -> Answer | None:
        deletes = request.method == "DELETE" or "delete" in request.query
        committed = any(each.is_manifest for each in proxy.seen)
        return Answer(403, "AccessDenied") if committed and deletes else None

    proxy.set_rule(refuse)
    small(f"{URL}/one", 2, first=1)
    said = capfd.readouterr().err
    assert "saved, but cannot delete the files of earlier saves" in said and "AccessDenied" in said
    assert core.Checkpoint(f"{URL}/one").step == 2
    proxy.set_rule(lambda _: None)
    small(f"{URL}/one", 3, first=2)
    exactly(store, f"{URL}/one")


def test_a_save_that_cannot_be_read_back_is_not_deleted(configure: Configure, store: Server, proxy: Proxy) -> None:
    """The files of a save that cannot be read may be intact. Only the first save cannot be read here."""
    configure(SLOTS)
    there: list[bool] = []  # whether the checkpoint exists when a save commits

    def refuse(request: Request) -> Answer | None:
        if request.is_manifest:
            there.append("MANIFEST.json" in store.keys(f"{RUN}/step-3/"))
        if len(there) == 1 and request.method == "GET" and "/shard-" in request.key:
            return Answer(403, "ExpiredToken")
        return None

    proxy.set_rule(refuse)
    checkpoints = Checkpoints(URL, every=100, verify=True)
    with make(checkpoints=checkpoints) as ctx:
        train(ctx, DataLoader(Batches(3), reproducible=True))
    assert (checkpoints.written, checkpoints.failed) == (3, 0)
    assert there == [False, True]
    exactly(store, f"{URL}/step-3")
    proxy.set_rule(lambda request: Answer(403, "ExpiredToken") if "/shard-" in request.key else None)
    with pytest.raises(StorageError, match="ExpiredToken"):
        Load(f"{URL}/step-3")


def test_the_advice_to_delete_damaged_checkpoints_spares_one_that_cannot_be_read(
    configure: Configure, store: Server, proxy: Proxy
) -> None:
    configure(SLOTS)
    for at in (1, 2, 3):
        small(f"{URL}/step-{at}", at, first=at - 1)
    damage(store, f"{URL}/step-3", "dense.pt")
    proxy.set_rule(
        lambda request: Answer(403, "ExpiredToken") if "/step-2/" in request.key and "/shard-" in request.key else None
    )
    with (
        pytest.raises(CheckpointError, match=f"{URL}/step-1 is intact") as raised,
        make(checkpoints=Checkpoints(URL, every=10)),
    ):
        pass
    hint = str(raised.value.hint)
    assert f"delete the objects below {URL}/step-3" in hint and f"{URL}/step-2" not in hint


def test_an_upload_whose_last_response_is_lost_is_complete(configure: Configure, store: Server, proxy: Proxy) -> None:
    """The store has assembled the object, so the upload no longer exists."""
    configure(SLOTS)
    large = {"weights": torch.arange(3 << 20, dtype=torch.float32)}  # 12 MiB
    completions: list[Request] = []

    def lose(request: Request) -> Answer | str | None:
        if request.method != "POST" or "uploadId" not in request.query:
            return None
        completions.append(request)
        return LOSE if len(completions) == 1 else Answer(404, "NoSuchUpload")

    proxy.set_rule(lose)
    with make() as ctx:
        with Save(ctx.engine, f"{URL}/one", 0) as save:
            save.add_state("large.pt", large)
        assert completions
        assert torch.equal(Load(f"{URL}/one").state("large.pt")["weights"], large["weights"])
        exactly(store, f"{URL}/one")
        proxy.set_rule(
            lambda request: (
                Answer(404, "NoSuchUpload") if request.method == "POST" and "uploadId" in request.query else None
            )
        )
        with pytest.raises(StorageError, match="NoSuchUpload"), Save(ctx.engine, f"{URL}/two", 0) as save:
            save.add_state("large.pt", large)
    assert store.keys(f"{RUN}/two/") == []


@pytest.mark.parametrize(("given", "in_job"), [("one", True), (f"{URL}/one", True), (f"{URL}/one", False)])
def test_a_run_may_start_from_rows_in_the_store(
    configure: Configure, store: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, in_job: bool
) -> None:
    """A checkpoint of a run is refused, and the message has its URL."""
    configure(SLOTS)
    small(f"{URL}/one", 1)
    monkeypatch.setenv("PERSIA_CKPT_DIR", URL)
    config: Any = SimpleNamespace(train=SimpleNamespace(start_from=given), folder=tmp_path)
    with pytest.raises(ConfigError, match=f"{URL}/one is a checkpoint of a run"):
        start_folder(config, in_job=in_job)
    monkeypatch.setattr("persia.trainer.start_rows.is_imported", lambda _: True)
    assert start_folder(config, in_job=in_job) == Url(f"{URL}/one")
    store.request("DELETE", f"/bucket/{RUN}/one/MANIFEST.json")
    with pytest.raises(CheckpointError, match=f"{URL}/one"):
        start_folder(config, in_job=in_job)


@pytest.mark.parametrize("fault", [UNCONDITIONAL, Answer(501, "NotImplemented")])
def test_a_store_without_conditional_puts_is_found_before_training(
    configure: Configure, store: Server, proxy: Proxy, fault: "Answer | str", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs that save to one URL would replace each other's checkpoints."""
    configure(SLOTS)
    probes = 0

    def rule(request: Request) -> "Answer | str | None":
        nonlocal probes
        if request.method != "PUT" or ".probe-" not in request.key:
            return UNCONDITIONAL if fault == UNCONDITIONAL else None
        probes += 1
        return fault if probes >= 2 else None

    proxy.set_rule(rule)
    with pytest.raises(StorageError, match=r"committed by conditional puts.*AWS_CONDITIONAL_PUT=disabled"):
        core.probe(URL)
    assert probes >= 2 and not store.keys(), "the object of the probe is deleted"
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    probes = 0
    core.probe(URL)
    assert probes == 1
