"""The start of several ranks: their order, and refused ranks."""

import json
import re
from pathlib import Path

import pytest
from rank_trainers import COLLECTION, SCRIPT, nodes
from stack import MakeStack, Stack

from persia.runtime import job


def wait_for_questions(stack: Stack, count: int) -> None:
    """Wait until ranks have queried NATS for the other ranks this many times."""
    with stack.nats_client(timeout=60) as client:
        client.subscribe("$SRV.INFO.persia-trainer", callback=lambda _: None)
        client.wait(count=count)


def test_ranks_with_different_schedules_do_not_train(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = json.dumps({"schedules": [{"warmup_steps": 3}, {"warmup_steps": 4}]})
    trainer = stack.trainer(COLLECTION, plan, ranks=2)
    assert trainer.wait() == 2, trainer.output
    assert re.search(r"schedule is LRSchedule.*warmup_steps=[34].* on rank [01] and LRSchedule", trainer.output)


@pytest.mark.row("S3-33")
def test_a_second_rank_of_the_same_number_is_refused(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    pause = {"step": 3, "reached": str(tmp_path / "reached"), "until": str(tmp_path / "until")}
    first, second = nodes(stack, {"steps": 5, "pause": pause})
    first.says("step 2 done")
    for rank in (0, 1):
        env = {"PERSIA_RUN_DIR": str(tmp_path / "twin")}
        twin = stack.trainer(SCRIPT, json.dumps({"steps": 5}), node=rank, nodes=2, env=env)
        assert twin.wait(60) == 2, twin.output
        line = twin.says(f"rank {rank} of job 'test' is already running: pid ")
        both = re.search(r"pid (\d+) on \S+; pid (\d+) on \S+ has the same RANK", line)
        assert both is not None and both[1] != both[2], line
    (tmp_path / "until").touch()
    assert first.wait() == 0, first.output
    assert second.wait() == 0, second.output


def test_a_rank_that_does_not_come_is_named(make_stack: MakeStack) -> None:
    stack = make_stack()
    first = stack.trainer(SCRIPT, "{}", node=0, nodes=3, env={"PERSIA_START_TIMEOUT": "4"})
    assert first.wait(60) == 3, first.output
    first.says("ranks 1, 2 of 3 did not connect within")


def test_ranks_with_different_slots_do_not_begin(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    other = tmp_path / "embedding_config.yml"
    other.write_text(Path(stack.settings["PERSIA_EMBEDDING_CONFIG"]).read_text() + "# another\n")
    first = stack.trainer(SCRIPT, '{"steps": 5}', node=0, nodes=2)
    second = stack.trainer(SCRIPT, '{"steps": 5}', node=1, nodes=2, env={"PERSIA_EMBEDDING_CONFIG": str(other)})
    assert first.wait(180) == 2, first.output
    first.says("rank 1 and rank 0 have different contents of embedding_config.yml")
    # The rank reports the same error, or the loss of rank 0, whichever it detects first.
    assert second.wait(180) in {2, 75}, second.output


def test_ranks_that_send_numbers_of_other_sizes_do_not_train(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    other = tmp_path / "global_config.yml"
    settings = stack.settings["PERSIA_GLOBAL_CONFIG"]
    other.write_text(Path(settings).read_text() + "\nembedding_worker_config: {wire_dtype: bf16}\n")
    first = stack.trainer(SCRIPT, '{"steps": 5}', node=0, nodes=2)
    second = stack.trainer(SCRIPT, '{"steps": 5}', node=1, nodes=2, env={"PERSIA_GLOBAL_CONFIG": str(other)})
    assert first.wait(180) == 2, first.output
    first.says("wire_dtype is bf16 on rank 1 and f32 on rank 0")
    assert second.wait(180) in {2, 75}, second.output


def test_rank_0_that_does_not_come_is_named(make_stack: MakeStack) -> None:
    stack = make_stack()
    second = stack.trainer(SCRIPT, "{}", node=1, nodes=2, env={"PERSIA_START_TIMEOUT": "4"})
    assert second.wait(60) == 3, second.output
    second.says("rank 0 of job 'test' was not found")


@pytest.mark.row("S0-19")
@pytest.mark.parametrize("variable", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PERSIA_SOCKET_IFNAME"])
def test_an_interface_that_does_not_exist_is_named(make_stack: MakeStack, variable: str) -> None:
    stack = make_stack()
    trainer = stack.trainer(SCRIPT, "{}", ranks=2, env={variable: "eth9"})
    assert trainer.wait() == 2, trainer.output
    trainer.says(f"{variable}=eth9: interface eth9 does not exist; this host has ")
    trainer.says("next:  correct the variable, or dist.interface and nccl.socket_ifname of persia.yml")


@pytest.mark.row("S0-20")
def test_ranks_may_start_in_any_order(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = json.dumps({"steps": 4})
    second = stack.trainer(SCRIPT, plan, node=1, nodes=2)
    wait_for_questions(stack, 3)  # the second rank has not found rank 0
    first = stack.trainer(SCRIPT, plan, node=0, nodes=2)
    assert first.wait() == 0, first.output
    assert second.wait() == 0, second.output


def test_a_second_job_on_the_same_nats_does_not_disturb_the_first(make_stack: MakeStack, tmp_path: Path) -> None:
    one = make_stack(job="one")
    two = make_stack(job="two", start=False, env={"PERSIA_TOKEN_FILE": str(one.job.token_file)})
    two.nats_url = one.nats_url
    two.start_part("server")
    two.start_part("middleware")
    parts = [stack.trainer(SCRIPT, json.dumps({"steps": 30}), ranks=2) for stack in (one, two)]
    for part in parts:
        assert part.wait() == 0, part.output
    for stack in (one, two):
        summary = job.finished_summary(stack.folder / "run")
        assert summary is not None and summary["result"]["step"] == 30
