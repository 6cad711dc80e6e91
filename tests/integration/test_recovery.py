"""Runs of several ranks that are interrupted and resume from the newest checkpoint, checked by tests/chaos's ledger."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Batches, TinyModel
from stack import TESTS, MakeStack, Part, Stack
from waiting import wait_until

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD
from persia.errors import RunLostError
from persia.launch.supervision import SAVING_GRACE
from persia.nn import EmbeddingCollection, TableConfig

CHAOS = ROOT / "tests" / "chaos"
STEPS = 124
"""Enough steps that a signal after step 10 or 30 arrives long before the end."""


@pytest.fixture
def ledger(make_stack: MakeStack) -> Stack:
    """Return a stack with the ledger's slots, and its data."""
    stack = make_stack(servers=2, slots="one: {dim: 4}\nmany: {dim: 4}")
    stack.data(CHAOS / "ledger_data.py", json.dumps({"count": 2 * STEPS}), env=paths())
    return stack


def paths() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(CHAOS), TESTS, os.environ.get("PYTHONPATH", "")])}


def nodes(stack: Stack, **plan: Any) -> list[Part]:
    """Start two trainer replicas with a rank each."""
    text = json.dumps({"steps": STEPS, "every": 1000, **plan})
    return [
        stack.trainer(CHAOS / "ledger_train.py", str(stack.folder), text, node=node, nodes=2, env=paths())
        for node in range(2)
    ]


def exact(stack: Stack) -> None:
    """Check that each occurrence of an id was applied once, and each step once to the dense weights."""
    found = json.loads((stack.folder / "ledger.json").read_text())
    assert found["rows_wrong"] == 0, found
    assert (found["rows_checked"], found["steps"], found["dense"]) == (500, STEPS, -STEPS)


def saves(stack: Stack) -> list[str]:
    return sorted(path.name for path in (stack.folder / "checkpoints").glob("*/step-*"))


def written(stack: Stack, save: str) -> bool:
    return any((stack.folder / "checkpoints").glob(f"*/{save}/MANIFEST.json"))


@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_to_one_rank_lets_all_save_behind_one_step(ledger: Stack, victim: int) -> None:
    parts = nodes(ledger)
    parts[0].says("step 10 done")
    parts[victim].process.signal(signal.SIGTERM)
    assert [part.wait() for part in parts] == [75, 75], parts[0].output
    (saved,) = saves(ledger)
    assert 10 <= int(saved.removeprefix("step-")) < STEPS
    parts = nodes(ledger)
    assert [part.wait() for part in parts] == [0, 0], parts[0].output
    parts[0].says(f"training resumes after step {saved.removeprefix('step-')}")
    exact(ledger)


@pytest.mark.parametrize(
    ("where", "evaluating", "victims"),
    [
        pytest.param("in", [1], [1], marks=pytest.mark.nightly),
        ("in", [0], [1]),  # the victim waits for the other rank at its next step
        ("in", [0, 1], [0, 1]),
        pytest.param("behind", [0], [0], marks=pytest.mark.nightly),
        ("behind", [0], [1]),  # the victim waits for the other rank at the start of its next loop
        pytest.param("behind", [0, 1], [0, 1], marks=pytest.mark.nightly),
        ("before", [0, 1], [1]),
    ],
)
def test_sigterm_in_an_evaluation_lets_all_save_what_was_trained(
    ledger: Stack, where: str, evaluating: list[int], victims: list[int]
) -> None:
    """The evaluation never ends. The ranks end in half of the time after which they would be killed."""
    parts = nodes(ledger, evaluate={"where": where, "step": 12, "ranks": evaluating})
    for rank in evaluating:
        parts[rank].says(f"evaluating on rank {rank}")
    for rank in victims:
        parts[rank].process.signal(signal.SIGTERM)
    asked = time.monotonic()
    assert [part.wait() for part in parts] == [75, 75], f"{parts[0].output}\n{parts[1].output}"
    assert time.monotonic() - asked < SAVING_GRACE / 2
    saved = 11 if where == "before" else 12
    assert saves(ledger) == [f"step-{saved}"], f"{parts[0].output}\n{parts[1].output}"
    parts = nodes(ledger)
    assert [part.wait() for part in parts] == [0, 0], parts[0].output
    parts[0].says(f"training resumes after step {saved}")
    exact(ledger)


def test_sigterm_before_the_first_step_ends_all(ledger: Stack) -> None:
    parts = nodes(ledger, evaluate={"where": "before", "step": 1, "ranks": [0]})
    parts[0].says("evaluating on rank 0")
    for part in parts:
        part.process.signal(signal.SIGTERM)
    asked = time.monotonic()
    assert [part.wait() for part in parts] == [75, 75], f"{parts[0].output}\n{parts[1].output}"
    assert time.monotonic() - asked < SAVING_GRACE / 2
    assert saves(ledger) == []


def test_ranks_agree_on_the_next_save_after_a_load_by_hand(ledger: Stack) -> None:
    """Rank 0 loads a checkpoint that is older than the newest."""
    assert {part.wait() for part in nodes(ledger, every=8, leave_behind_loop=True)} == {75}
    parts = nodes(ledger, every=8, load=f"step-{STEPS - 4}")
    assert [part.wait() for part in parts] == [0, 0], parts[0].output
    exact(ledger)


def test_ranks_that_end_behind_their_loop_go_on_there(ledger: Stack) -> None:
    assert {part.wait() for part in nodes(ledger, leave_behind_loop=True)} == {75}
    parts = nodes(ledger)
    assert [part.wait() for part in parts] == [0, 0], parts[1].output
    assert saves(ledger) == [f"step-{STEPS}"]
    exact(ledger)


def test_a_run_that_was_killed_whole_goes_on_and_one_that_ended_does_not(ledger: Stack) -> None:
    parts = nodes(ledger, every=8)
    parts[0].says("step 30 done")
    for name in ("trainer-0", "server-0", "trainer-1", "server-1", "middleware-0", "nats"):
        ledger.kill(name)
    ledger.start()
    assert [part.wait(180) for part in nodes(ledger, every=8)] == [0, 0]
    exact(ledger)
    (ledger.folder / "run" / "summary.json").unlink()  # the launcher suggests this deletion to train again
    (ledger.folder / "ledger.json").unlink()
    first, second = nodes(ledger, every=8)
    assert [first.wait(180), second.wait(180)] == [0, 0]
    first.says("training starts from the beginning")
    exact(ledger)


def test_a_server_that_lost_its_rows_between_two_loops_ends_the_run_which_resumes(ledger: Stack) -> None:
    reached, until = ledger.folder / "reached", ledger.folder / "until"
    behind = {"where": "behind", "step": 12, "ranks": []}
    plan = {"every": 5, "evaluate": behind, "pause": {"reached": str(reached), "until": str(until)}}
    parts = nodes(ledger, **plan)
    wait_until("the end of the first loop", reached.exists, 120, evidence=lambda: parts[0].output)
    wait_until("the checkpoint of step 10", lambda: written(ledger, "step-10"), 60)
    ledger.kill("server-1")
    ledger.start_part("server", 1)
    ledger.wait_ready()
    until.touch()
    assert [part.wait() for part in parts] == [75, 75], parts[0].output
    assert "server 1 of 2" in parts[0].output and "lost the rows of generation" in parts[0].output, parts[0].output
    parts = nodes(ledger, **plan)
    assert [part.wait() for part in parts] == [0, 0], parts[0].output
    parts[0].says("training resumes after step 10")
    exact(ledger)


@pytest.mark.parametrize("where", ["between loops", "after a load", "before a load", "in an evaluation"])
def test_rows_that_a_server_lost_are_missed_wherever_they_are_needed(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    stack = make_stack(servers=2)
    stack.use(monkeypatch)
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "15")  # after this time, the loss of rows is reported
    model = TinyModel()
    with (
        pytest.raises(RunLostError, match=r"server 1 of 2 .* lost"),
        TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model) as ctx,
    ):
        train(ctx)
        ctx.dump_checkpoint("here")
        if where == "after a load":
            ctx.load_checkpoint("here")
        stack.kill("server-1")
        stack.start_part("server", 1)
        stack.wait_ready()
        if where == "before a load":
            ctx.load_checkpoint("here")
        if where == "in an evaluation":
            ctx.get_embedding_from_data(Batches(1).batch(0, requires_grad=False))
        else:
            train(ctx)


@pytest.mark.parametrize("where", ["before a load", "after a load", "after a save"])
def test_a_collection_misses_the_rows_that_a_server_lost(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    stack = make_stack(servers=2)
    stack.use(monkeypatch)
    tables = EmbeddingCollection([TableConfig("a", 4, ["a"]), TableConfig("b", 4, ["b"])], SGD(0.1))

    def step() -> None:
        ids = torch.arange(200)
        sum(vectors.sum() for vectors in tables({"a": ids, "b": ids}).values()).backward()

    try:
        step()
        tables.save("here")
        if where == "after a load":
            tables.load("here")
        stack.kill("server-1")
        stack.start_part("server", 1)
        stack.wait_ready()
        with pytest.raises(RunLostError, match=r"server 1 of 2 .* lost"):
            tables.load("here") if where == "before a load" else step()
    finally:
        with contextlib.suppress(RunLostError):
            tables.close()


def test_a_server_with_a_log_continues_with_the_next_loop(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(servers=2, log="always")
    stack.use(monkeypatch)
    model = TinyModel()
    with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model) as ctx:
        train(ctx)
        rows = ctx.get_embedding_size()
        stack.kill("server-1")
        stack.start_part("server", 1)
        stack.wait_ready()
        train(ctx)
        assert ctx.get_embedding_size() == rows


def train(ctx: TrainCtx) -> None:
    """Train a pass over a few batches, which are always the same."""
    for batch in DataLoader(Batches(5)):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))


ANY_NUMBER = """
import sys

import torch
from conftest import Batches, TinyModel

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import Adam

load, save = sys.argv[1:]
torch.manual_seed(1)
model = TinyModel()
with TrainCtx(Adam(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model) as ctx:
    if load:
        ctx.load_checkpoint(load)
    else:
        for batch in DataLoader(Batches(10, ids=5000)):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
    ctx.dump_checkpoint(save)
"""


@pytest.mark.row("S4-30")
def test_a_checkpoint_of_two_servers_loads_on_any_number(make_stack: MakeStack, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ANY_NUMBER)

    def run(servers: int, load: str, save: str, given: Path | None = None) -> Path:
        stack = make_stack(servers=servers)
        folder = stack.folder / "checkpoints"
        if given is not None:
            shutil.copytree(given, folder / load)
        trainer = stack.trainer(script, load, save)
        assert trainer.wait() == 0, trainer.output
        stack.close()
        return folder / save

    first = run(2, "", "first")
    expected = shards(first)
    assert len(expected) > 200
    for servers in (1, 3, 5):
        assert shards(run(servers, "first", "again", first)) == expected, f"{servers} servers"


def shards(folder: Path) -> dict[str, str]:
    """Return the hash of every shard file by name."""
    files = json.loads((folder / "MANIFEST.json").read_text())["files"]
    return {file["name"].split("/")[-1]: file["blake3"] for file in files if file["name"].endswith(".arrow")}
