"""Several ranks and faults: they stop together, each reports the cause, and other faults do not stop them."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from stack import MakeStack, Part, Stack

from persia.runtime import job
from persia_core import checkpoint

SCRIPT = ROOT / "tests" / "integration" / "rank_script.py"
COLLECTION = ROOT / "tests" / "integration" / "collection_script.py"


LEAVES = """
import time

import torch
from conftest import Batches, TinyModel
from torch.utils.dlpack import from_dlpack

from persia import distributed, env
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD


def slow(step):
    time.sleep(3 if env.get_rank() == 1 and step == 5 else 0)
    return 1.0


def train(last):
    for batch in DataLoader(Batches(10)):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
        if batch.step == last:
            return


def rows():
    wanted = Batches(1).batch(0, requires_grad=False)
    return [from_dlpack(tensor).clone() for tensor in ctx.get_embedding_from_data(wanted).embeddings()]


model = TinyModel()
dense = torch.optim.SGD(model.parameters(), 0.1)
with TrainCtx(SGD(0.1).scheduled(slow), dense, mixed_precision=False, model=model) as ctx:
    train(3)
    distributed.agree(True)
    if env.get_rank() == 0:
        ctx.dump_checkpoint(FOLDER)
        saved = rows()
    distributed.agree(True)
    train(5)  # rank 1 pushes step 5 late
    if env.get_rank() == 0:
        ctx.dump_checkpoint(LATE)
    distributed.agree(True)
    if env.get_rank() == 0:
        pushed = rows()
        ctx.load_checkpoint(LATE)
        assert all(map(torch.equal, rows(), pushed)), "a push came after the dump"
        ctx.load_checkpoint(FOLDER)
    distributed.agree(True)
    if env.get_rank() == 0:
        assert all(map(torch.equal, rows(), saved)), "a push came after the load"
    distributed.agree(True)
    train(6)
"""


BREAKS = """
import sys

import torch
from conftest import Batches, TinyModel

from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD

model = TinyModel()
dense = torch.optim.SGD(model.parameters(), 0.1)
saves = Checkpoints("saves", every=2, keep_last=9)
with TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model, checkpoints=saves) as ctx:
    steps = []
    for _ in range(3):
        for number, batch in enumerate(DataLoader(Batches(10), reproducible=True)):
            if number == 3:
                break
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
            steps.append(batch.step)
    print("trained", *steps)
"""


def nodes(stack: Stack, plan: dict[str, Any], count: int = 2, **env: str) -> list[Part]:
    """Start one trainer replica for each rank, so that no launcher ends the others."""
    return [stack.trainer(SCRIPT, json.dumps(plan), node=node, nodes=count, env=env) for node in range(count)]


def wait_for_questions(stack: Stack, count: int) -> None:
    """Wait until ranks have queried this often for the others."""
    with stack.nats_client(timeout=60) as client:
        client.subscribe("$SRV.INFO.persia-trainer", callback=lambda _: None)
        client.wait(count=count)


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
        part.says("step 3: rank 1: the loss is nan. Nothing of the step is applied, neither to the model nor to rows")
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
            r"^lagging: rank 2 .*: in the code of its script, behind look-up of step 5, for", part.output, re.M
        )
        assert len(re.findall(r"^waiting: rank [01] .*: in all-reduce of step 5 for", part.output, re.M)) == 2
        (main,) = (stack for stack in part.output.split("\n\n") if "in train_once" in stack)  # the main thread
        assert ("in hang" in main, "in backward" in main) == (rank == 2, rank != 2), part.output
    assert job.finished_summary(stack.folder / "run") is None


def calls_of(stack: Stack, rank: int) -> dict[str, Any]:
    """Return what a rank has written of its last calls."""
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
    assert re.search(r"stopped, frozen, or its network is gone; \d+ s ago it was in ", first.output), first.output
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
        "environment variable NCCL_TIMEOUT has no effect: NCCL has no such variable; taken as seconds. Set "
        "PERSIA_DIST_TIMEOUT=5, as now"
    )
    first.says("a collective of torch exceeded its time limit of 5 s")
    first.says("lagging: rank 1 (pid")
    assert re.search(r"in the code of its script, behind look-up of step 5, for \d+ s", first.output), first.output


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
    limits = {"PERSIA_DIST_TIMEOUT": "2", "PERSIA_HANG_TIMEOUT": "2", "PERSIA_RPC_TIMEOUT": "60"}
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
    assert first.wait(40) == 75, first.output
    first.says("rank 1 is gone: ValueError: as the plan wants")
    second.wait()


def test_ranks_with_different_schedules_do_not_train(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = json.dumps({"schedules": [{"warmup_steps": 3}, {"warmup_steps": 4}]})
    trainer = stack.trainer(COLLECTION, plan, ranks=2)
    assert trainer.wait() == 2, trainer.output
    assert re.search(r"schedule is LRSchedule.*warmup_steps=[34].* on rank [01] and LRSchedule", trainer.output)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_collection_that_is_never_closed_is_closed_before_the_end(
    make_stack: MakeStack, tmp_path: Path, ranks: int
) -> None:
    """The script has its own process group here."""
    stack = make_stack()
    plan = json.dumps({"group": f"file://{tmp_path}/group"})
    trainer = stack.trainer(COLLECTION, plan, ranks=ranks)
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and (summary["steps"], summary["generation"]) == (20, 1)


def test_a_collection_whose_last_push_cannot_be_applied_does_not_finish(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    plan = json.dumps({"until": str(tmp_path / "until")})
    trainer = stack.trainer(COLLECTION, plan, env={"PERSIA_RPC_TIMEOUT": "3"})
    trainer.says("before the last backward")
    stack.kill("server-0")
    (tmp_path / "until").touch()
    assert trainer.wait() != 0, trainer.output
    assert job.finished_summary(stack.folder / "run") is None


def test_a_context_is_refused_beside_a_collection_and_welcome_after_it(make_stack: MakeStack) -> None:
    stack = make_stack()
    trainer = stack.trainer(COLLECTION, '{"context": true}', ranks=2)
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["steps"] == 3


def test_data_compose_hears_that_a_collection_takes_no_batches(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    script = tmp_path / "data.py"
    script.write_text("from persia.ctx import DataCtx\nwith DataCtx():\n    pass\n")
    trainer = stack.trainer(COLLECTION, json.dumps({"until": str(tmp_path / "until")}))
    trainer.says("before the last backward")
    stack.data(script).says("takes no batches: it trains with an EmbeddingCollection")
    (tmp_path / "until").touch()
    assert trainer.wait() == 0, trainer.output


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


@pytest.mark.row("S3-14")
def test_uneven_data_stops_all_ranks_together(make_stack: MakeStack) -> None:
    stack = make_stack()
    trainer = stack.trainer(SCRIPT, json.dumps({"steps": 8, "more": {"1": 3}}), ranks=2)
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and (summary["steps"], summary["world_size"]) == (8, 2)
    trainer.says("all ranks stop after step 8: the data of rank 0 has ended; not used: 3 batches of rank 1")


@pytest.mark.parametrize("everybody", [True, False])
def test_checkpoints_need_no_other_rank(make_stack: MakeStack, tmp_path: Path, everybody: bool) -> None:
    """Saved and loaded by rank 0 only or by all; the run continues with rows, model and step of the checkpoint."""
    stack = make_stack(servers=2)
    folder = Path(stack.settings["PERSIA_CKPT_DIR"]) / "first"
    dump = {"dir": folder.name, "all": everybody}  # below PERSIA_CKPT_DIR
    first = stack.trainer(SCRIPT, json.dumps({"steps": 10, "dump": dump}), ranks=2)
    assert first.wait() == 0, first.output
    assert (folder / "MANIFEST.json").is_file()
    run = stack.folder / "run"
    (run / job.SUMMARY).unlink()
    second = stack.trainer(SCRIPT, json.dumps({"steps": 5, "load": dump}), ranks=2)
    assert second.wait() == 0, second.output
    summary = job.finished_summary(run)
    assert summary is not None and summary["steps"] == 15
    assert summary["result"]["equal_weights"], "the ranks went on from different models"
    assert sum(summary["result"]["sizes"]) >= checkpoint.listing(folder)[0]["rows"] > 0


def test_ranks_count_alike_behind_loops_that_were_left_with_a_batch(make_stack: MakeStack, tmp_path: Path) -> None:
    """The fourth batch of each loop is taken and not trained on, as by ``if number == limit: break``."""
    stack = make_stack()
    script = tmp_path / "breaks.py"
    script.write_text(BREAKS)
    parts = [stack.trainer(script, node=node, nodes=2) for node in range(2)]
    for part in parts:
        assert part.wait() == 0, part.output
        assert "trained 1 2 3 5 6 7 9 10 11" in part.output, part.output


def test_a_dump_and_a_load_wait_for_pushes_of_loops_that_were_left(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    script = tmp_path / "train.py"
    script.write_text(f"FOLDER, LATE = 'first', 'late'  # below PERSIA_CKPT_DIR\n{LEAVES}")
    trainer = stack.trainer(script, ranks=2)
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["steps"] == 6


@pytest.mark.row("S3-33")
def test_a_second_rank_of_the_same_number_is_refused(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    pause = {"step": 3, "reached": str(tmp_path / "reached"), "until": str(tmp_path / "until")}
    first, second = nodes(stack, {"steps": 5, "pause": pause})
    first.says("step 2 done")
    for rank in (0, 1):
        env = {"PERSIA_RUN_DIR": str(tmp_path / "twin")}
        twin = stack.trainer(SCRIPT, json.dumps({"steps": 5}), node=rank, nodes=2, env=env)
        assert twin.wait(30) == 2, twin.output
        line = twin.says(f"rank {rank} of job 'test' is running already: pid ")
        both = re.search(r"pid (\d+) on \S+; pid (\d+) on \S+ has the same RANK", line)
        assert both is not None and both[1] != both[2], line
    (tmp_path / "until").touch()
    assert first.wait() == 0, first.output
    assert second.wait() == 0, second.output


def test_a_rank_that_does_not_come_is_named(make_stack: MakeStack) -> None:
    stack = make_stack()
    first = stack.trainer(SCRIPT, "{}", node=0, nodes=3, env={"PERSIA_START_TIMEOUT": "4"})
    assert first.wait(40) == 3, first.output
    first.says("ranks 1, 2 of 3 did not connect within")


def test_ranks_with_different_slots_do_not_begin(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    other = tmp_path / "embedding_config.yml"
    other.write_text(Path(stack.settings["PERSIA_EMBEDDING_CONFIG"]).read_text() + "# another\n")
    first = stack.trainer(SCRIPT, '{"steps": 5}', node=0, nodes=2)
    second = stack.trainer(SCRIPT, '{"steps": 5}', node=1, nodes=2, env={"PERSIA_EMBEDDING_CONFIG": str(other)})
    assert first.wait(180) == 2, first.output
    first.says("the ranks have different slots: those of rank 1 differ from rank 0's")
    # It reports the same, or that rank 0 is lost, whichever it detects first.
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


def test_a_start_that_failed_ends_no_data(make_stack: MakeStack, tmp_path: Path) -> None:
    """The senders that waited at a rank 0 that failed send everything to its successor."""
    stack = make_stack()
    script = tmp_path / "data.py"
    script.write_text(
        "from conftest import Batches\nfrom persia.ctx import DataCtx\n"
        "with DataCtx() as ctx:\n    for batch in Batches(20):\n        ctx.send_data(batch)\n"
    )
    stack.data(script)
    plan = json.dumps({"data": "stream"})
    first = stack.trainer(SCRIPT, plan, nodes=2, env={"PERSIA_START_TIMEOUT": "5"})
    assert first.wait(40) == 3, first.output
    for part in [stack.trainer(SCRIPT, plan, node=node, nodes=2) for node in range(2)]:
        assert part.wait(180) == 0, part.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["steps"] == 10


@pytest.mark.parametrize("longer", ["0", "1"])
def test_uneven_data_that_can_be_continued_starts_again_with_every_pass(make_stack: MakeStack, longer: str) -> None:
    stack = make_stack()
    plan = {"steps": 8, "more": {longer: 3}, "data": "stateful", "passes": 3}
    trainer = stack.trainer(SCRIPT, json.dumps(plan), ranks=2)
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["steps"] == 24


def test_rank_0_that_does_not_come_is_named(make_stack: MakeStack) -> None:
    stack = make_stack()
    second = stack.trainer(SCRIPT, "{}", node=1, nodes=2, env={"PERSIA_START_TIMEOUT": "4"})
    assert second.wait(40) == 3, second.output
    second.says("rank 0 of job 'test' is not there")


@pytest.mark.row("S0-19")
@pytest.mark.parametrize("variable", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PERSIA_SOCKET_IFNAME"])
def test_an_interface_that_does_not_exist_is_named(make_stack: MakeStack, variable: str) -> None:
    stack = make_stack()
    trainer = stack.trainer(SCRIPT, "{}", ranks=2, env={variable: "eth9"})
    assert trainer.wait(40) == 2, trainer.output
    trainer.says(f"{variable}=eth9: interface eth9 does not exist; have ")
    trainer.says("next:  correct the variable, or dist.interface and nccl.socket_ifname of persia.yml")


@pytest.mark.row("S0-20")
def test_ranks_may_start_in_any_order(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = json.dumps({"steps": 4})
    second = stack.trainer(SCRIPT, plan, node=1, nodes=2)
    wait_for_questions(stack, 3)  # the second did not find rank 0
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


def test_a_server_that_dies_ends_the_run(make_stack: MakeStack) -> None:
    stack = make_stack(servers=2)
    trainer = stack.trainer(SCRIPT, json.dumps({"steps": 100_000}), ranks=2, env={"PERSIA_RPC_TIMEOUT": "5"})
    trainer.says("step 5 done")
    stack.kill("server-1")
    assert trainer.wait(180) == 75, trainer.output
    trainer.says("server 1")
    assert job.finished_summary(stack.folder / "run") is None


def test_one_rank_may_evaluate_while_the_others_wait(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = {"steps": 8, "evaluate": {"rank": 1, "step": 4}}
    trainer = stack.trainer(SCRIPT, json.dumps(plan), ranks=2)
    assert trainer.wait() == 0, trainer.output


def test_another_process_evaluates_the_run_that_is_current(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack(servers=2)
    observer = ROOT / "tests" / "integration" / "observer_script.py"
    early = stack.python("early", "-m", "persia.launch.rank_main", observer)
    assert early.wait() == 2, early.output
    early.says("no training run of job 'test' has begun on its servers")
    pause = {"step": 5, "reached": str(tmp_path / "reached"), "until": str(tmp_path / "until")}
    trainer = stack.trainer(SCRIPT, json.dumps({"steps": 10, "pause": pause}), ranks=2)
    trainer.says("step 4 done")
    during = stack.python("during", observer)
    assert during.wait() == 0, during.output
    refused = stack.python("clear", "-m", "persia.launch.rank_main", observer, "clear_embeddings")
    assert refused.wait() == 2, refused.output
    refused.says("clear_embeddings in a process that only evaluates, while job 'test' is trained by pid ")
    found = re.search(r"sizes \[(\d+), (\d+)\], rows of a: (\d+), missing (\d+)", during.output)
    assert found is not None and all(int(number) > 0 for number in found.groups()), during.output
    assert int(found[4]) + int(found[1]) + int(found[2]) == 400, "of the 200 ids of each slot"
    during.says(f"a collection: missing {found[4]}")
    (tmp_path / "until").touch()
    assert trainer.wait() == 0, trainer.output
    for number, change in enumerate(["load_checkpoint", "load_embedding"]):  # even if no rank trains
        env = {"RANK": str(number), "WORLD_SIZE": "2"}
        refused = stack.python(change, "-m", "persia.launch.rank_main", observer, change, env=env)
        assert refused.wait() == 2, refused.output
        refused.says(f"{change} in a process that only evaluates: with servers, the training script loads rows")
    cleared = stack.python("cleared", observer, "clear_embeddings")
    assert cleared.wait() == 0, cleared.output
    cleared.says("rows of a: 0, missing 400")
    cleared.says("evaluation: the tables are empty (0 rows)")
