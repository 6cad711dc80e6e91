"""Checkpoints that are written directly to an object store. The store is S3, served by a real program."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Batches, Configure
from object_server import CUT, HALF, LOSE, PRETEND, Answer, Proxy, Request, Rule, Server
from test_checkpoints import STEPS, step, whole
from test_training import SLOTS, everything, make, train
from typer.testing import CliRunner
from waiting import wait_until

from persia.checkpoint.object_store import ObjectStore
from persia.checkpoint.snapshot import Load, Save
from persia.cli.main import app
from persia.ctx import Checkpoints
from persia.data import DataLoader
from persia.errors import CheckpointError, PersiaError, StorageError, UsageError
from persia.runtime.places import place
from persia_core import checkpoint as core

RUN = "runs/census"
URL = f"s3://bucket/{RUN}"


def files(url: str) -> dict[str, str]:
    """Verify a checkpoint, and return the hash of each file."""
    opened = core.Checkpoint(url)
    opened.verify()
    return {file["name"]: file["blake3"] for file in opened.files}


def trained(url: str) -> dict[str, str]:
    """Return the hashes of all files except that of the random state, which differs between processes."""
    return {name: found for name, found in files(url).items() if name != "rank-0.state"}


def staged(url: str) -> str:
    """Return the prefix of the files of a checkpoint."""
    return re.sub(r".*\"generation\": (\d+).*", r".saving-\1", core.Checkpoint(url).manifest, flags=re.DOTALL)


def exactly(store: Server, url: str) -> None:
    """Assert that there is nothing below the URL except the files of its checkpoint."""
    folder, names = staged(url), files(url)
    keys = store.keys(url.removeprefix("s3://bucket/") + "/")
    assert keys == sorted(["MANIFEST.json", *(f"{folder}/{name}" for name in names)])


def small(url: str, steps: int, first: int = 0) -> None:
    """Train on batches of three ids, and save after each step above ``first``."""
    with make() as ctx:
        for batch in DataLoader(Batches(steps, ids=3, batch_size=4), reproducible=True):
            step(ctx, batch)
            if ctx.step > first:
                ctx.dump_checkpoint(url)


def test_a_run_resumes_from_the_store_with_equal_bits(configure: Configure, tmp_path: Path, store: Server) -> None:
    expected = whole(configure, tmp_path / "undisturbed")
    whole(configure, URL, steps=23, keep_last=1)  # type: ignore[arg-type]
    assert {key.split("/")[0] for key in store.keys(f"{RUN}/")} == {"LATEST", "step-20"}
    assert not (tmp_path / "s3:").exists() and not Path("s3:").exists()
    torch.manual_seed(99)
    configure(SLOTS)
    with make(seed=5, checkpoints=Checkpoints(URL, every=10, keep_last=1)) as ctx:
        assert ctx.step == 20
        assert len(train(ctx, DataLoader(Batches(STEPS), reproducible=True))) == STEPS - 20
        assert everything(ctx) == expected
    assert store.request("GET", f"/bucket/{RUN}/LATEST") == b"step-25\n"
    assert {key.split("/")[0] for key in store.keys(f"{RUN}/")} == {"LATEST", "step-25"}
    exactly(store, f"{URL}/step-25")


def test_a_checkpoint_by_hand_replaces_the_last_one_and_is_loaded(configure: Configure, store: Server) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(5), reproducible=True))
        ctx.dump_checkpoint(f"{URL}/one")
        first, saved = staged(f"{URL}/one"), everything(ctx)
        train(ctx, DataLoader(Batches(5, seed=1), reproducible=True))
        ctx.dump_checkpoint(f"{URL}/one", blocking=False)
        ctx.wait_for_dump_embedding()
        second = everything(ctx)
        assert staged(f"{URL}/one") != first and second != saved
        exactly(store, f"{URL}/one")
    configure(SLOTS)
    with make(seed=7) as ctx:
        ctx.load_checkpoint(f"{URL}/one")
        assert everything(ctx) == second and ctx.step == 10


def test_a_replica_of_a_folder_is_loaded_where_it_is_and_copied_back(
    configure: Configure, tmp_path: Path, store: Server
) -> None:
    whole(configure, tmp_path / "run", steps=11)
    ObjectStore(URL).put(tmp_path / "run" / "step-10", "step-10")
    assert files(f"{URL}/step-10") == files(str(tmp_path / "run" / "step-10"))
    configure(SLOTS)
    with make(seed=5, checkpoints=Checkpoints(URL, every=100)) as ctx:
        assert ctx.step == 10
        step_12 = train(ctx, DataLoader(Batches(STEPS), reproducible=True), 2)
        assert len(step_12) == 2
        ctx.dump_checkpoint(f"{URL}/step-12")
    ObjectStore(URL).get("step-12", tmp_path / "back")
    assert files(str(tmp_path / "back")) == files(f"{URL}/step-12")
    assert [each.name for each in ObjectStore(URL).whole()] == ["step-12", "step-10"]


SCRIPT = """
import http.client
import os
import sys
import test_checkpoints as test
from conftest import Batches
from persia.data import DataLoader

url = sys.argv[1]
with test.make() as ctx:
    for batch in DataLoader(Batches(2, ids=3, batch_size=4), reproducible=True):
        test.step(ctx, batch)
        ctx.dump_checkpoint(url)
        if ctx.step == 1:
            connection = http.client.HTTPConnection(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"))
            connection.request("PUT", "/bucket/armed")
            connection.getresponse().read()
"""


def run_script(tmp_path: Path, url: str) -> "subprocess.Popen[bytes]":
    config = tmp_path / "embedding_config.yml"
    config.write_text("slots_config:\n  a: {dim: 4}\n  b: {dim: 4}\n")
    tests = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(tests), "PERSIA_EMBEDDING_CONFIG": str(config)}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, url], cwd=tmp_path, env=env)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.nightly)])
def test_a_save_that_is_killed_at_any_request_leaves_the_old_checkpoint_or_the_new_one(
    configure: Configure, tmp_path: Path, store: Server, proxy: Proxy, when: str
) -> None:
    """The process is killed before or after the store receives a request, for each request of the save."""
    configure(SLOTS)
    small(f"{URL}/expected-1", 1)
    small(f"{URL}/expected-2", 2)
    by_step = {at: trained(f"{URL}/expected-{at}") for at in (1, 2)}
    outcomes = []
    for number in range(1000):
        url = f"{URL}/killed-{number}"
        victim: list[subprocess.Popen[bytes]] = []
        armed: list[int] = []

        def rule(request: Request, at: int = number, victim: list = victim, armed: list = armed) -> str | None:  # type: ignore[type-arg]
            if request.key == "armed":
                armed.append(request.number)
            elif armed and request.number == armed[0] + 1 + at:
                wait_until("the process to be known", lambda: victim, 10)
                victim[0].send_signal(signal.SIGKILL)
                return CUT if when == "before" else LOSE
            return None

        proxy.set_rule(rule)
        victim.append(run_script(tmp_path, url))
        code = victim[0].wait(60)
        assert armed, f"the script ended with {code} before its second save"
        found = core.Checkpoint(url).step
        assert trained(url) == by_step[found], "the checkpoint is whole"
        outcomes.append(found)
        proxy.set_rule(lambda _: None)
        small(url, 2, first=1)
        assert trained(url) == by_step[2]
        exactly(store, url)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert outcomes == sorted(outcomes) and outcomes[0] == 1 and outcomes[-1] == 2
    assert len(outcomes) > 2 * len(by_step[2]), "each file has a request of its own at least"


def once(fault: "Answer | str", which: Rule) -> Rule:
    """Fail each kind of request once, if ``which`` selects it."""
    failed = set()

    def rule(request: Request) -> Answer | str | None:
        kind = (request.method, request.target)
        if kind in failed or which(request) is None:
            return None
        failed.add(kind)
        return fault

    return rule


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Answer(503, "SlowDown"), id="throttled"),
        pytest.param(Answer(503, "ServiceUnavailable"), id="503"),
        pytest.param(Answer(500, "InternalError"), id="500"),
        pytest.param(Answer(429, "TooManyRequests"), id="429"),
        pytest.param(CUT, id="cut"),
        pytest.param(HALF, id="half"),
        pytest.param(LOSE, id="lost"),
    ],
)
def test_every_request_may_fail_once(configure: Configure, store: Server, proxy: Proxy, fault: "Answer | str") -> None:
    """If the connection breaks during the put of the manifest, the put is not retried: another save may be first."""
    configure(SLOTS)
    small(f"{URL}/expected", 2)
    except_manifest = fault in (CUT, HALF)
    proxy.set_rule(once(fault, lambda request: None if except_manifest and request.is_manifest else "fail"))
    small(f"{URL}/one", 2)
    assert len([each for each in proxy.seen if each.method == "PUT"]) > 4
    proxy.set_rule(lambda _: None)
    assert files(f"{URL}/one") == files(f"{URL}/expected")
    exactly(store, f"{URL}/one")


@pytest.mark.parametrize("fault", [CUT, HALF, Answer(403, "AccessDenied"), Answer(412, "PreconditionFailed")])
def test_a_manifest_that_is_not_put_leaves_the_old_checkpoint(
    configure: Configure, store: Server, proxy: Proxy, fault: "Answer | str"
) -> None:
    configure(SLOTS)
    small(f"{URL}/one", 1)
    before = files(f"{URL}/one")
    proxy.set_rule(lambda request: fault if request.is_manifest else None)
    with pytest.raises(StorageError, match=f"{URL}/one"):
        small(f"{URL}/one", 2, first=1)
    assert files(f"{URL}/one") == before and core.Checkpoint(f"{URL}/one").step == 1
    proxy.set_rule(lambda _: None)
    small(f"{URL}/one", 2, first=1)
    exactly(store, f"{URL}/one")
    assert core.Checkpoint(f"{URL}/one").step == 2


def test_a_save_that_another_one_has_overtaken_is_refused(configure: Configure, store: Server, proxy: Proxy) -> None:
    """The manifest of the other save remains, with all its files."""
    configure(SLOTS)
    small(f"{URL}/other", 1)
    other = store.request("GET", f"/bucket/{RUN}/other/MANIFEST.json")

    def overtake(request: Request) -> None:
        if request.is_manifest and "/one/" in request.key:
            store.request("PUT", f"/bucket/{RUN}/one/MANIFEST.json", other)

    proxy.set_rule(overtake)
    with pytest.raises(StorageError, match="another process is saving, or has just saved, here"):
        small(f"{URL}/one", 1)
    assert store.request("GET", f"/bucket/{RUN}/one/MANIFEST.json") == other
    assert store.keys(f"{RUN}/one/") == ["MANIFEST.json"], "the files of the refused save are deleted"


def test_a_manifest_never_names_a_file_that_its_writer_put_elsewhere(
    configure: Configure, proxy: Proxy, store: Server
) -> None:
    configure(SLOTS)
    small(f"{URL}/one", 1)
    proxy.set_rule(lambda request: PRETEND if "shard-" in request.key and request.method == "PUT" else None)
    with pytest.raises(PersiaError, match=r"shard-\d+.arrow is missing.*AWS_ENDPOINT_URL"):
        small(f"{URL}/one", 2, first=1)
    assert core.Checkpoint(f"{URL}/one").step == 1
    exactly(store, f"{URL}/one")


def test_a_run_resumes_though_listings_lag(configure: Configure, tmp_path: Path, proxy: Proxy, store: Server) -> None:
    """No listing shows an object of the run, so the newest checkpoint is found by ``LATEST``."""
    expected = whole(configure, tmp_path / "undisturbed")
    proxy.lag()
    whole(configure, URL, steps=23, keep_last=1)  # type: ignore[arg-type]
    assert core.listing(URL)[0]["step"] == 20
    configure(SLOTS)
    with make(seed=5, checkpoints=Checkpoints(URL, every=10, keep_last=1)) as ctx:
        assert ctx.step == 20
        train(ctx, DataLoader(Batches(STEPS), reproducible=True))
        assert everything(ctx) == expected
    proxy.lag(False)
    assert core.prune(URL, 1) == [f"{URL}/step-20", f"{URL}/step-10"]
    assert {key.split("/")[0] for key in store.keys(f"{RUN}/")} == {"LATEST", "step-25"}


def test_a_listing_that_still_shows_what_was_deleted_does_no_harm(configure: Configure, store: Server) -> None:
    configure(SLOTS)
    small(f"{URL}/step-1", 1)
    small(f"{URL}/step-2", 2, first=1)
    store.request("DELETE", f"/bucket/{RUN}/step-2/MANIFEST.json")
    store.request("PUT", f"/bucket/{RUN}/LATEST", b"step-2\n")
    assert core.latest(URL) == f"{URL}/step-1"


def test_what_a_killed_save_has_left_is_deleted_once_it_is_old(configure: Configure, store: Server) -> None:
    """Files that are newer than the newest checkpoint may belong to a save in progress."""
    configure(SLOTS)
    small(f"{URL}/step-1", 1)
    store.request("PUT", f"/bucket/{RUN}/step-2/.saving-77/shard-000.arrow", b"half")
    store.request("PUT", f"/bucket/{RUN}/step-2/notes.txt", b"foreign")
    core.prune(URL, 3)
    assert ".saving-77/shard-000.arrow" in store.keys(f"{RUN}/step-2/")

    def saved_later() -> bool:
        """Save until the remains are older than the newest checkpoint: times of the store have whole seconds."""
        small(f"{URL}/step-3", 3, first=2)
        core.prune(URL, 3)
        return store.keys(f"{RUN}/step-2/") == ["notes.txt"]

    wait_until("the remains to be deleted", saved_later, 20)
    assert [each["step"] for each in core.listing(URL)] == [3, 1]


def test_a_large_file_is_put_in_parts_in_bounded_memory(configure: Configure, store: Server, proxy: Proxy) -> None:
    configure(SLOTS)
    large = {"weights": torch.arange(6 << 20, dtype=torch.float32)}  # 24 MiB
    proxy.set_rule(once(Answer(503, "SlowDown"), lambda request: "fail" if "partNumber" in request.query else None))
    with make() as ctx:
        with Save(ctx.engine, f"{URL}/one", 0) as save:
            save.add_state("large.pt", large)
        parts = [each for each in proxy.seen if "partNumber" in each.query]
        assert len(parts) == 2 * 4 and max(each.size for each in proxy.seen) == 8 << 20
        assert torch.equal(Load(f"{URL}/one").state("large.pt")["weights"], large["weights"])
        exactly(store, f"{URL}/one")
        proxy.set_rule(lambda request: Answer(403, "AccessDenied") if "partNumber" in request.query else None)
        with (
            pytest.raises(StorageError, match="large.pt: the store answered 403 Forbidden: AccessDenied"),
            Save(ctx.engine, f"{URL}/two", 0) as save,
        ):
            save.add_state("large.pt", large)
    aborted = [each for each in proxy.seen if each.method == "DELETE" and "uploadId" in each.query]
    assert aborted, "the parts are deleted"
    assert store.keys(f"{RUN}/two/") == []


def damage(store: Server, url: str, name: str) -> None:
    path = f"/bucket/{url.removeprefix('s3://bucket/')}/{staged(url)}/{name}"
    content = bytearray(store.request("GET", path))
    content[len(content) // 2] ^= 1
    store.request("PUT", path, bytes(content))


@pytest.mark.parametrize("what", ["flipped", "missing", "shorter"])
@pytest.mark.parametrize("kind", ["shard-", "dense.pt"])
def test_a_damaged_object_is_named_and_nothing_is_loaded(
    configure: Configure, store: Server, what: str, kind: str
) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(3), reproducible=True))
        ctx.dump_checkpoint(f"{URL}/one")
        name = next(name for name in files(f"{URL}/one") if name.startswith(kind))
        path = f"/bucket/{RUN}/one/{staged(f'{URL}/one')}/{name}"
        if what == "flipped":
            damage(store, f"{URL}/one", name)
        elif what == "missing":
            store.request("DELETE", path)
        else:
            store.request("PUT", path, store.request("GET", path)[:-1])
        train(ctx, DataLoader(Batches(3, seed=1), reproducible=True))
        before = everything(ctx)
        with pytest.raises(CheckpointError, match=re.escape(f"{URL}/one/{name}")):
            ctx.load_checkpoint(f"{URL}/one")
        assert everything(ctx) == before


def test_the_newest_intact_checkpoint_is_resumed_on_demand(
    configure: Configure, store: Server, caplog: pytest.LogCaptureFixture
) -> None:
    whole(configure, URL, steps=21)  # type: ignore[arg-type]
    damage(store, f"{URL}/step-20", "dense.pt")
    configure(SLOTS)
    with (
        pytest.raises(CheckpointError, match=f"{URL}/step-10 is intact") as raised,
        make(checkpoints=Checkpoints(URL, every=10)),
    ):
        pass
    assert f"delete the objects below {URL}/step-20" in str(raised.value.hint)
    with make(checkpoints=Checkpoints(URL, every=10, allow_previous=True)) as ctx:
        assert ctx.step == 10
    assert "the newest intact checkpoint; another one cannot be used" in caplog.text


def test_a_save_that_reads_back_damaged_is_deleted(configure: Configure, store: Server, proxy: Proxy) -> None:
    """``verify=True`` reads each checkpoint back."""
    configure(SLOTS)
    done: list[Request] = []

    def flip_one(request: Request) -> None:
        if not done and request.is_manifest:
            done.append(request)
            name = next(each.key for each in proxy.seen if "/shard-" in each.key and each.method == "PUT")
            content = bytearray(store.request("GET", f"/bucket/{name}"))
            content[-20] ^= 1
            store.request("PUT", f"/bucket/{name}", bytes(content))

    proxy.set_rule(flip_one)
    checkpoints = Checkpoints(URL, every=100, verify=True)
    with make(checkpoints=checkpoints) as ctx:
        train(ctx, DataLoader(Batches(3), reproducible=True))
    assert done and (checkpoints.written, checkpoints.failed) == (3, 0)
    assert core.latest(URL) == f"{URL}/step-3"
    exactly(store, f"{URL}/step-3")


@pytest.mark.parametrize("fault", [Answer(403, "InvalidAccessKeyId"), Answer(503, "SlowDown")])
def test_a_store_that_refuses_is_found_before_training(
    configure: Configure, proxy: Proxy, fault: Answer, tmp_path: Path
) -> None:
    configure(SLOTS)
    proxy.set_rule(lambda _: fault)
    with pytest.raises(StorageError) as raised, make(checkpoints=Checkpoints(URL, every=10)):
        pass
    found = str(raised.value)
    assert found.startswith(f"Checkpoint storage validation failed: {URL}/") and fault.code in found
    assert f"persia doctor --only disk --dir {URL}" in str(raised.value.hint)
    if fault.status == 403:
        assert "check AWS_ACCESS_KEY_ID" in found
    checked = CliRunner().invoke(app, shlex.split(f"doctor --only disk --dir {URL} --json"))
    assert fault.code in checked.output and checked.exit_code == 1


def test_a_missing_bucket_an_address_without_a_store_and_missing_credentials_say_what_to_do(
    configure: Configure, store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    other = "s3://no-such-bucket/run"
    for use_it in (lambda: core.probe(other), lambda: core.latest(other), lambda: core.Checkpoint(f"{other}/step-1")):
        with pytest.raises(StorageError, match="NoSuchBucket.*create the bucket"):
            use_it()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"refused.*cannot be reached: check .*AWS_ENDPOINT_URL=http://127.0.0.1:1"):
        core.probe(URL)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    with pytest.raises(StorageError, match="no credentials: set AWS_ACCESS_KEY_ID"):
        core.probe(URL)


def test_a_url_that_cannot_be_used_is_refused_where_it_is_given(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    for wrong in ("s4://bucket/run", "gs://bucket/run", "s3:///run"):
        with pytest.raises(UsageError, match="expected a folder, or s3://BUCKET/PREFIX") as raised:
            Checkpoints(wrong)
        assert "AWS_ENDPOINT_URL" in str(raised.value.hint)
    with pytest.raises(UsageError) as raised:
        Checkpoints("s3://key:secret@bucket/run")
    assert "secret" not in str(raised.value)
    with make() as ctx:
        with pytest.raises(UsageError, match="expected a folder, or s3://BUCKET/PREFIX"):
            ctx.dump_checkpoint("s4://bucket/run/one")
        with pytest.raises(UsageError, match="expected s3://bucket/run/one"):
            ctx.dump_checkpoint(Path("s3://bucket/run/one"))
    with pytest.raises(UsageError, match="has one slash after the scheme; expected s3://bucket/run") as raised:
        Checkpoints(Path("s3://bucket/run"))
    assert "pass the URL as a string" in str(raised.value.hint)
    assert place("folder/s3:/run") == Path("folder/s3:/run")
    with pytest.raises(UsageError, match="in an object store already"):
        Checkpoints(URL, upload_to="s3://bucket/other")
    monkeypatch.delenv("PERSIA_RUN_DIR", raising=False)
    with pytest.raises(UsageError, match="set PERSIA_RUN_DIR"):
        Checkpoints(URL, failing_batches="skip")


def test_the_commands_work_on_urls(configure: Configure, tmp_path: Path, store: Server) -> None:
    whole(configure, URL, steps=21)  # type: ignore[arg-type]
    run = CliRunner().invoke
    listed = run(app, ["ckpt", "list", URL]).output
    assert [line.split()[0] for line in listed.splitlines()] == [f"{URL}/step-20", f"{URL}/step-10"]
    assert f"{URL}/step-20: step 20" in run(app, ["ckpt", "show", f"{URL}/step-20"]).output
    verified = run(app, ["ckpt", "verify", f"{URL}/step-20", "--keys"]).output
    assert "dense.pt  " in verified and f"ok: {URL}/step-20" in verified
    out = tmp_path / "a.parquet"
    assert run(app, ["ckpt", "rows", f"{URL}/step-20", "--table", "a", "-o", str(out)]).exit_code == 0
    assert out.exists()
    tried = run(app, ["ckpt", "prune", URL, "--keep-last", "1", "--dry-run"]).output
    assert f"{URL}/step-10" in tried and len(core.listing(URL)) == 2
    assert run(app, ["ckpt", "prune", URL, "--keep-last", "1"]).exit_code == 0
    assert [each["path"] for each in core.listing(URL)] == [f"{URL}/step-20"]
    checked = run(app, ["doctor", "--only", "disk", "--dir", URL, "--json"])
    assert checked.exit_code == 0 and "an object put and deleted" in checked.output
