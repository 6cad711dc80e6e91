"""Faults of one of several ranks: all ranks stop, and each reports the cause."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rank_trainers import COLLECTION, SCRIPT, nodes
from stack import MakeStack, Stack

from persia.runtime import job


def test_a_step_with_nan_on_one_rank_is_skipped_on_all(make_stack: MakeStack) -> None:
    stack = make_stack(servers=2)
    first, second = nodes(stack, {"steps": 6, "nan": {"rank": 1, "step": 3}})
    assert first.wait() == 0, first.output
    assert second.wait() == 0, second.output
    for part in (first, second):
        part.says("step 3 skipped, model and rows unchanged: rank 1: the loss is nan")


@pytest.mark.row("S3-24")
def test_nan_on_one_rank_ends_all_of_them_at_the_same_step(make_stack: MakeStack) -> None:
    stack = make_stack()
    parts = nodes(stack, {"steps": 6, "nan": {"rank": 1, "step": 3}, "nonfinite": "raise"})
    for part in parts:
        assert part.wait() == 1, part.output
        part.says("step 3: rank 1: the loss is nan; model and rows are unchanged")
    parts[0].says("step 2 done")
    assert "step 3 done" not in parts[0].output


@pytest.mark.row("S3-32")
def test_an_overflow_of_fp16_on_one_rank_skips_the_step_on_all(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = {"steps": 6, "overflow": {"rank": 1, "step": 3}, "nonfinite": "raise", "precision": "fp16"}
    parts = nodes(stack, plan)
    for part in parts:
        assert part.wait() == 0, part.output
        part.says("step 3 skipped, model and rows unchanged: rank 1: the gradient of slot 'a'")
        part.says("the loss is scaled by 32768 from now on")
        assert part.output.count("skipped, model and rows") == 1
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["result"]["equal_weights"]


@pytest.mark.row("S3-15")
@pytest.mark.parametrize(("rank", "code"), [(1, 0), (0, 3)])
def test_a_rank_whose_script_exits_in_mid_training_is_named_by_the_other(
    make_stack: MakeStack, rank: int, code: int
) -> None:
    stack = make_stack()
    parts = nodes(stack, {"steps": 1000, "exit": {"rank": rank, "step": 7, "code": code}})
    other = parts[1 - rank]
    other.says(f"rank {rank} left at step 7 (exit {code})")
    left = time.monotonic()
    assert other.wait(60) == 75, other.output
    assert time.monotonic() - left < 20
    parts[rank].wait(60)
    assert job.finished_summary(stack.folder / "run") is None


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("reproducible", [True, False])
def test_a_rank_that_is_killed_is_named_by_the_other(make_stack: MakeStack, victim: int, reproducible: bool) -> None:
    stack = make_stack()
    plan = {"steps": 1000, "kill": {"rank": victim, "step": 5}, "reproducible": reproducible}
    parts = nodes(stack, plan)
    parts[victim].wait()
    killed = time.monotonic()
    assert parts[1 - victim].wait(30) == 75, parts[1 - victim].output
    assert time.monotonic() - killed < 20
    parts[1 - victim].says(f"rank {victim} is gone")
    assert job.finished_summary(stack.folder / "run") is None


def test_where_one_rank_hangs_all_show_where_they_are_and_end(make_stack: MakeStack) -> None:
    stack = make_stack()
    parts = nodes(stack, {"steps": 1000, "hang": {"rank": 2, "step": 5}}, count=3, PERSIA_HANG_TIMEOUT="15")
    for rank, part in enumerate(parts):
        assert part.wait(180) == 70, part.output
        part.says("rank 2 (pid")
        part.says("has made no progress after step 4")
        part.says(f"threads of rank {rank}:")
        assert re.search(
            r"^lagging: rank 2 .*: in the code of its script, after look-up of step 5, for", part.output, re.M
        )
        assert len(re.findall(r"^waiting: rank [01] .*: in all-reduce of step 5 for", part.output, re.M)) == 2
        (main,) = (stack for stack in part.output.split("\n\n") if "in train_once" in stack)  # the main thread
        assert ("in hang" in main, "in backward" in main) == (rank == 2, rank != 2), part.output
    assert job.finished_summary(stack.folder / "run") is None


def calls_of(stack: Stack, rank: int) -> dict[str, Any]:
    """Return the last calls that a rank has written."""
    content: dict[str, Any] = json.loads((stack.folder / "run" / "flight" / f"rank-{rank}.json").read_text())
    return content


@pytest.mark.row("S3-12")
def test_a_rank_whose_data_set_blocks_is_named_with_its_wait(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = {"steps": 1000, "stall": {"rank": 1, "step": 6}}
    parts = nodes(stack, plan, PERSIA_DATA_TIMEOUT="5")
    for rank, part in enumerate(parts):
        assert part.wait(180) == 70, part.output
        part.says("rank 1 (pid")
        assert re.search(r"^lagging: rank 1 \(pid \d+ on .*\): in data wait of step 6 for \d+ s$", part.output, re.M)
        assert re.search(
            r"^waiting: rank 0 \(pid \d+ on .*\): in agreement 'next step' after step 5", part.output, re.M
        )
        part.says(f"last calls of rank {rank}: {stack.folder / 'run' / 'flight' / f'rank-{rank}.json'}")
    waits = [call for call in calls_of(stack, 1)["calls"] if call["state"] == "open"]
    assert {(call["verb"], call["step"], call["thread"]) for call in waits} == {
        ("data wait", 6, "loop"),
        ("read", 6, "persia-feed"),
    }
    done = [call["verb"] for call in calls_of(stack, 0)["calls"] if call["step"] == 5 and call["thread"] == "loop"]
    assert done == ["data wait", "look-up", "forward", "backward", "all-reduce", "push", "optimizer"]


@pytest.mark.row("S3-12")
def test_a_rank_that_is_stopped_is_named_with_its_last_call(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = {"steps": 1000, "freeze": {"rank": 1, "step": 5}}
    first, _ = nodes(stack, plan, PERSIA_HANG_TIMEOUT="10")
    assert first.wait(180) == 75, first.output
    first.says("rank 1 is gone: silent for ")
    assert re.search(r"stopped, frozen, or without a network; \d+ s ago it was in ", first.output), first.output
    first.says(f"last calls of rank 0: {stack.folder / 'run' / 'flight' / 'rank-0.json'}")
    position = calls_of(stack, 0)["position"]
    assert position["step"] == 5 and position["call"] == ["agreement", None, "next step"] and position["open"]


@pytest.mark.row("S3-16", "S4-20")
def test_the_time_limit_of_a_collective_reaches_torch_and_names_the_rank(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = {"steps": 1000, "hang": {"rank": 1, "step": 5}}
    first, _ = nodes(stack, plan, NCCL_TIMEOUT="5")
    assert first.wait(180) == 70, first.output
    first.says(
        "environment variable NCCL_TIMEOUT has no effect: NCCL has no such variable. Persia sets "
        "PERSIA_DIST_TIMEOUT=5 instead; set PERSIA_DIST_TIMEOUT yourself"
    )
    first.says("a collective of torch exceeded its time limit of 5 s")
    first.says("lagging: rank 1 (pid")
    assert re.search(r"in the code of its script, after look-up of step 5, for \d+ s", first.output), first.output


@pytest.mark.row("S3-16")
def test_the_time_limit_holds_for_the_start_of_the_process_group(make_stack: MakeStack) -> None:
    stack = make_stack()
    parts = nodes(stack, {"late": {"rank": 1, "step": 0}}, PERSIA_DIST_TIMEOUT="5")
    for part in parts:
        assert part.wait(180) == 70, part.output
        part.says("a collective of torch exceeded its time limit of 5 s (dist.timeout_s, PERSIA_DIST_TIMEOUT)")
        assert len(re.findall(r"rank [01] .*: in collective 'start of the process group' after step 0", part.output))


@pytest.mark.row("S2-14")
def test_a_debugger_stops_the_limits_of_ranks_without_a_breakpoint(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    plan = {"steps": 8, "prompt": {"rank": 1, "step": 5, "seconds": 8}}
    limits = {"PERSIA_DIST_TIMEOUT": "3", "PERSIA_HANG_TIMEOUT": "3", "PERSIA_RPC_TIMEOUT": "60"}
    for part in nodes(stack, plan, count=3, **limits, BREAKPOINT_TMP_FILE_PATH=str(tmp_path)):
        assert part.wait(90) == 0, part.output


def test_a_rank_that_fails_says_why(make_stack: MakeStack) -> None:
    stack = make_stack()
    first, second = nodes(stack, {"steps": 1000, "raise": {"rank": 1, "step": 4}})
    assert second.wait() == 1, second.output
    assert first.wait(30) == 75, first.output
    first.says("rank 1 is gone: ValueError: as the plan wants")


def test_a_forward_of_a_collection_that_fails_on_one_rank_ends_the_others(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = json.dumps({"broken": {"rank": 1, "step": 4}})
    first, second = (stack.trainer(COLLECTION, plan, node=node, nodes=2) for node in range(2))
    assert first.wait(60) == 75, first.output
    first.says("rank 1 is gone: ValueError: as the plan wants")
    second.wait()


def test_a_collection_whose_last_push_cannot_be_applied_does_not_finish(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    plan = json.dumps({"until": str(tmp_path / "until")})
    trainer = stack.trainer(COLLECTION, plan, env={"PERSIA_RPC_TIMEOUT": "3"})
    trainer.says("before the last backward")
    stack.kill("server-0")
    (tmp_path / "until").touch()
    assert trainer.wait() != 0, trainer.output
    assert job.finished_summary(stack.folder / "run") is None


def test_nats_may_restart_in_mid_training(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack(servers=2)
    pause = {"step": 5, "reached": str(tmp_path / "reached"), "until": str(tmp_path / "until")}
    trainer = stack.trainer(SCRIPT, json.dumps({"steps": 60, "pause": pause}), ranks=2)
    trainer.says("step 4 done")
    stack.kill("nats")
    (tmp_path / "until").touch()
    trainer.says("step 40 done")
    stack.start_nats()
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["result"]["step"] == 60


def test_a_start_that_failed_ends_no_data(make_stack: MakeStack, tmp_path: Path) -> None:
    """Data-composes that waited for a failed rank 0 send all batches to its successor."""
    stack = make_stack()
    script = tmp_path / "data.py"
    script.write_text(
        "from conftest import Batches\nfrom persia.ctx import DataCtx\n"
        "with DataCtx() as ctx:\n    for batch in Batches(20):\n        ctx.send_data(batch)\n"
    )
    stack.data(script)
    plan = json.dumps({"data": "stream"})
    first = stack.trainer(SCRIPT, plan, nodes=2, env={"PERSIA_START_TIMEOUT": "5"})
    assert first.wait(60) == 3, first.output
    for part in [stack.trainer(SCRIPT, plan, node=node, nodes=2) for node in range(2)]:
        assert part.wait(180) == 0, part.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["steps"] == 10


def test_a_server_that_dies_ends_the_run(make_stack: MakeStack) -> None:
    stack = make_stack(servers=2)
    trainer = stack.trainer(SCRIPT, json.dumps({"steps": 100_000}), ranks=2, env={"PERSIA_RPC_TIMEOUT": "5"})
    trainer.says("step 5 done")
    stack.kill("server-1")
    assert trainer.wait(180) == 75, trainer.output
    trainer.says("server 1")
    assert job.finished_summary(stack.folder / "run") is None
