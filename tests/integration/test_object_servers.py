"""Servers that write their shards of a checkpoint directly to an object store, without a shared disk."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Batches, TinyModel
from object_server import CUT, LOSE, Proxy, Request, Server
from stack import TESTS, MakeStack, Part, Stack

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import PersiaError
from persia_core import checkpoint as core

CHAOS = ROOT / "tests" / "chaos"
STEPS = 40
ROOT_URL = "s3://bucket/jobs"


def paths() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(CHAOS), TESTS, os.environ.get("PYTHONPATH", "")])}


def ledger(make_stack: MakeStack, other: str | None = None, **options: Any) -> Stack:
    """Return a stack with the ledger's slots and data. Its processes share no folder.

    ``other`` is the address of a different store for server 1.
    """
    slots, env = "one: {dim: 4}\nmany: {dim: 4}", {"PERSIA_CKPT_DIR": ROOT_URL}
    stack = make_stack(servers=2, slots=slots, env=env, start=other is None, **options)
    if other is not None:
        stack.start_nats()
        stack.start_part("server", 0)
        stack.start_part("server", 1, env={"AWS_ENDPOINT_URL": other})
        stack.start_part("middleware", 0)
        stack.wait_ready()
    stack.data(CHAOS / "ledger_data.py", json.dumps({"count": 2 * STEPS}), env=paths())
    return stack


def nodes(stack: Stack, **plan: Any) -> list[Part]:
    """Start two trainer replicas with a rank each."""
    text = json.dumps({"steps": STEPS, **plan})
    return [
        stack.trainer(CHAOS / "ledger_train.py", str(stack.folder), text, node=node, nodes=2, env=paths())
        for node in range(2)
    ]


def exact(stack: Stack) -> None:
    """Check that each occurrence of an id was applied once, and each step once to the dense weights."""
    found = json.loads((stack.folder / "ledger.json").read_text())
    assert found["rows_wrong"] == 0, found
    assert (found["rows_checked"], found["steps"], found["dense"]) == (500, STEPS, -STEPS)


def run_url(store: Server) -> str:
    (name,) = {key.split("/")[0] for key in store.keys("jobs/") if "/" in key}
    return f"{ROOT_URL}/{name}"


def test_ranks_and_servers_save_and_resume_without_a_shared_disk(make_stack: MakeStack, store: Server) -> None:
    """Each server uploads its own shards. The store also has the mark of the finished run."""
    stack = ledger(make_stack)
    parts = nodes(stack, every=16)
    parts[0].says("step 10 done")
    parts[1].process.signal(signal.SIGTERM)
    assert [part.wait() for part in parts] == [75, 75], parts[0].output
    url = run_url(store)
    newest = core.latest(url)
    assert newest is not None
    step = core.Checkpoint(newest).step
    assert 10 <= step < STEPS
    core.Checkpoint(newest).verify()
    for index in range(2):
        stack.parts[f"server-{index}"].says("snapshot written")
    (stack.folder / "run" / "RUN").unlink()  # simulates the loss of the disk: the run is found in the store
    parts = nodes(stack, every=16)
    assert [part.wait() for part in parts] == [0, 0], parts[0].output
    parts[0].says(f"training resumes after step {step}, from {newest}")
    exact(stack)
    assert run_url(store) == url and store.request("GET", f"/bucket/{url.removeprefix('s3://bucket/')}/FINISHED") == b""
    # These are the working directories of the processes, and the folders passed to them.
    folders = [Path.cwd(), stack.folder, stack.folder / "run"]
    assert [each for each in folders if (each / "s3:").exists()] == [], "no URL is taken for a folder"


def is_shard(request: Request) -> bool:
    return request.method == "PUT" and "/shard-" in request.key


@pytest.mark.parametrize(
    ("shard", "when"),
    [(0, CUT), pytest.param(20, CUT, marks=pytest.mark.nightly), pytest.param(-1, LOSE, marks=pytest.mark.nightly)],
)
def test_a_server_that_is_killed_while_it_saves_leaves_the_old_checkpoint(
    make_stack: MakeStack, store: Server, shard: int, when: str
) -> None:
    """The server is killed at the first shard of its second save, at a later one, or after the last one."""
    with Proxy(store.address) as proxy:
        stack = ledger(make_stack, proxy.address)
        put: list[Request] = []
        count: list[int] = []  # shards of each save of this server

        def rule(request: Request) -> str | None:
            if not is_shard(request):
                return None
            put.append(request)
            mine = [each for each in put if each.key.split("/")[-3] == request.key.split("/")[-3]]
            second = len({each.key.split("/")[-3] for each in put}) == 2
            if second and not count:
                count.append(len(put) - 1)
            if second and len(mine) - 1 == (shard if shard >= 0 else count[0] - 1):
                stack.parts["server-1"].process.signal(signal.SIGKILL)
                return when
            return None

        proxy.set_rule(rule)
        parts = nodes(stack, every=8)
        stack.parts["server-1"].wait(90)
        proxy.set_rule(lambda _: None)
        stack.start_part("server", 1, env={"AWS_ENDPOINT_URL": proxy.address})
        assert [part.wait(120) for part in parts] == [75, 75], parts[0].output
        url = run_url(store)
        found = core.latest(url)
        assert found is not None and core.Checkpoint(found).step == 8, "the one before"
        core.Checkpoint(found).verify()
        stack.wait_ready()
        parts = nodes(stack, every=8)
        assert [part.wait(120) for part in parts] == [0, 0], parts[0].output
        parts[0].says("training resumes after step 8")
        exact(stack)


def training() -> TrainCtx:
    torch.manual_seed(1)
    model = TinyModel()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    config = EmbeddingConfig((-0.1, 0.1))
    return TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model, embedding_config=config)


def test_a_folder_of_the_servers_does_not_limit_urls_and_a_url_does(
    make_stack: MakeStack, store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers have a different ``PERSIA_CKPT_DIR``."""
    stack = make_stack(servers=2, env={"AWS_ENDPOINT_URL": store.address})
    stack.use(monkeypatch)
    url = "s3://bucket/by-hand/one"
    with training() as ctx:
        for batch in DataLoader(Batches(3)):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
        ctx.dump_checkpoint(url)
        core.Checkpoint(url).verify()
        assert len([name for name in store.keys("by-hand/one/") if "shard-" in name]) > 50
        ctx.load_checkpoint(url)
        assert ctx.step == 3
        for index in range(2):
            stack.kill(f"server-{index}")
            stack.start_part("server", index, env={"PERSIA_CKPT_DIR": "s3://bucket/jobs"})
    stack.wait_ready()
    with training() as ctx, pytest.raises(PersiaError, match="PERSIA_CKPT_DIR of this server is s3://bucket/jobs"):
        ctx.dump_checkpoint(url)


def test_a_server_without_access_is_named_before_training(make_stack: MakeStack, store: Server) -> None:
    """A server that cannot reach the store would fail the first save, hours later."""
    stack = ledger(make_stack, "http://127.0.0.1:1")
    parts = nodes(stack)
    assert all(part.wait(120) != 0 for part in parts)
    said = parts[0].says("Checkpoint storage validation failed")
    assert "server 1: " in said and "AWS_ENDPOINT_URL=http://127.0.0.1:1" in said
    assert "step 1 done" not in parts[0].output


def test_a_server_with_a_log_recovers_its_rows_from_the_store(make_stack: MakeStack, store: Server) -> None:
    stack = ledger(make_stack, log="always")
    parts = nodes(stack, every=8)
    parts[0].says("step 20 done")
    assert core.latest(run_url(store)) is not None
    stack.kill("server-1")
    stack.start_part("server", 1)
    assert [part.wait(120) for part in parts] == [0, 0], parts[0].output
    stack.parts["server-1"].says("run resumed from the log")
    exact(stack)
