"""Data-compose and trainers as real processes: PersiaML's pair of scripts, and failures of either."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT
from stack import MakeStack, Part, Stack
from waiting import wait_until

PAIR = ROOT / "tests" / "persiaml_style"
SLOTS = "job: {dim: 8}\ntown: {dim: 8}\nvisits: {dim: 8, sqrt_scaling: true}"
GROUPS = "places: [town, visits]"


@pytest.fixture
def pair(make_stack: MakeStack) -> Stack:
    """A stack with the pair's slots."""
    return make_stack(slots=SLOTS, groups=GROUPS, middlewares=1)


def train(stack: Stack, ranks: int = 1, **env: object) -> Part:
    return stack.trainer(PAIR / "train.py", ranks=ranks, env={name: str(value) for name, value in env.items()})


def send(stack: Stack, index: int = 0, size: int = 1, **env: object) -> Part:
    values = {name: str(value) for name, value in env.items()}
    return stack.data(PAIR / "data_loader.py", index=index, size=size, env=values)


def summary(stack: Stack) -> dict[str, object]:
    content: dict[str, object] = json.loads((stack.folder / "run" / "summary.json").read_text())
    return content


def test_a_pair_of_scripts_of_persiaml_trains_on_a_stack(pair: Stack) -> None:
    """Two replicas send batches to two ranks. A test in tests/unit runs the same scripts in one process."""
    senders = [send(pair, index, 2, BATCHES=100) for index in range(2)]
    trainer = train(pair, ranks=2)
    assert trainer.wait(180) == 0, trainer.output
    assert summary(pair)["status"] == "finished"
    assert summary(pair)["steps"] == 100
    assert float(trainer.says("test auc").split("auc: ")[1].split()[0]) > 0.8
    assert len(re.findall("rank [01]: 100 steps", trainer.output)) == 2
    for sender in senders:
        sender.says("every batch is sent")
        assert sender.process.running  # data-compose waits for the next run, as a service does
        assert pair.stop(sender.process.name) == 0


def test_a_trainer_that_leaves_its_loop_ends_the_data(pair: Stack) -> None:
    sender = send(pair, BATCHES=100_000)
    trainer = train(pair, ranks=2, STOP_AT=20)
    assert trainer.wait(180) == 0, trainer.output
    assert summary(pair)["steps"] == 20
    sender.says("the trainers stopped accepting batches: training is over")
    assert pair.stop(sender.process.name) == 0


def test_uneven_data_stops_all_ranks_together_and_says_so(pair: Stack) -> None:
    send(pair, BATCHES=41)
    trainer = train(pair, ranks=2)
    assert trainer.wait(180) == 0, trainer.output
    assert summary(pair)["steps"] == 20
    line = trainer.says("all ranks stop after step 20")
    assert "the data of rank 1 has ended" in line
    assert "unused batches: at least 1 of rank 0" in line


@pytest.mark.parametrize("reproducible", [0, 1])
def test_uneven_data_of_reproducible_runs_too(pair: Stack, reproducible: int) -> None:
    """Ranks whose requests have a fixed order agree on the end of the data before a look-up that would wait forever."""
    send(pair, 0, 2, BATCHES=31)
    send(pair, 1, 2, BATCHES=8)
    trainer = train(pair, ranks=2, REPRODUCIBLE=reproducible, EMBEDDING_STALENESS=1)
    assert trainer.wait(180) == 0, trainer.output
    assert summary(pair)["steps"] == 19
    trainer.says("all ranks stop after step 19")


def test_a_data_replica_that_is_killed_comes_back_without_loss(pair: Stack) -> None:
    sender = send(pair, BATCHES=600)
    trainer = train(pair, ranks=2)
    trainer.says("batch 50,")
    pair.kill(sender.process.name)
    trainer.says("data-compose replica 0: connection lost before the end of its data")
    again = send(pair, BATCHES=600)
    assert trainer.wait(180) == 0, trainer.output
    assert summary(pair)["steps"] == 300
    assert "differ from those that rank" not in again.output


def test_a_data_script_that_fails_stops_the_trainers_by_name(pair: Stack, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        f"import sys\nsys.path.insert(0, {str(PAIR)!r})\nfrom people import batches\nfrom persia.ctx import DataCtx\n"
        "with DataCtx() as ctx:\n    for batch in batches(7, 64, seed=1):\n        ctx.send_data(batch)\n"
        "    raise KeyError('column age')\n"
    )
    sender = pair.data(broken)
    trainer = train(pair, ranks=2)
    assert trainer.wait(180) == 2, trainer.output
    trainer.says("data-compose replica 0: its script failed: KeyError: 'column age'")
    assert sender.wait() == 1
    assert not (pair.folder / "run" / "summary.json").exists()


def test_restarted_trainers_get_the_data_from_the_start(pair: Stack) -> None:
    sender = send(pair, BATCHES=100_000)
    trainer = train(pair)
    trainer.says("batch 50,")
    pair.kill("trainer-0")
    sender.says("connection lost")
    again = train(pair, STOP_AT=30)
    assert again.wait(180) == 0, again.output
    sender.says("restarting the script")
    assert summary(pair)["steps"] == 30
    assert int(str(summary(pair)["generation"])) > 1
    sender.says("the trainers stopped accepting batches")


SENDS = (
    f"import os, sys\nsys.path.insert(0, {str(PAIR)!r})\nfrom people import batches\nfrom persia.ctx import DataCtx\n"
    "with DataCtx() as ctx:\n    print('serving generation', ctx.generation, flush=True)\n"
    "    for batch in batches(40, 64, seed=1):\n        ctx.send_data(batch)\n"
)


def test_a_script_that_exits_in_its_context_ends_the_data(pair: Stack, tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(SENDS + "    sys.exit(0)\n")
    sender, trainer = pair.data(tmp_path / "data.py"), train(pair)
    assert trainer.wait(180) == 0, trainer.output
    assert summary(pair)["steps"] == 40
    sender.says("every batch is sent")


def test_a_data_script_without_a_context_is_an_error(pair: Stack, tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("print('forgot')\n")
    sender = pair.data(tmp_path / "data.py")
    assert sender.wait() == 2, sender.output
    sender.says("ended without a `with DataCtx()`")


def test_trainers_that_are_back_before_the_script_ends_get_the_data_too(pair: Stack, tmp_path: Path) -> None:
    """The data script runs after the end of its context until the trainers of the next run wait for data."""
    go = tmp_path / "go"
    linger = (
        "if ctx_generation == 1:\n    from waiting import wait_until\n"
        f"    wait_until('the test', lambda: os.path.exists({str(go)!r}), 180)\n"
    )
    text = SENDS.replace("    for batch", "    ctx_generation = ctx.generation\n    for batch") + linger
    text = text.replace("batches(40,", "batches(100_000,")  # more than buffers take before the trainer ends
    (tmp_path / "data.py").write_text(text)
    sender, trainer = pair.data(tmp_path / "data.py"), train(pair, STOP_AT=10)
    assert trainer.wait(180) == 0, trainer.output
    again = train(pair, STOP_AT=20, PERSIA_RUN_DIR=pair.folder / "run-again")
    again.says("of job test, rank 0 of 1")
    go.touch()
    assert again.wait(180) == 0, again.output
    sender.says("the trainers stopped accepting batches")


def test_every_context_of_a_trainer_gets_the_data_from_the_start(pair: Stack, tmp_path: Path) -> None:
    text = (PAIR / "train.py").read_text()
    start = text.index("    with TrainCtx(")
    again = tmp_path / "train.py"
    again.write_text(
        f"import sys\nsys.path.insert(0, {str(PAIR)!r})\n"
        + text[:start]
        + "    for stop in ('7', '20'):\n        os.environ['STOP_AT'] = stop\n"
        + "".join(f"    {line}" if line.strip() else line for line in text[start:].splitlines(keepends=True))
    )
    sender, trainer = send(pair, BATCHES=100_000), pair.trainer(again)
    assert trainer.wait(180) == 0, trainer.output
    told = "the trainers stopped accepting batches"
    wait_until("the data to end twice", lambda: sender.output.count(told) == 2, 30, evidence=lambda: sender.output)


def test_data_compose_outlives_nats(pair: Stack) -> None:
    sender, trainer = send(pair, BATCHES=30), train(pair)
    assert trainer.wait(180) == 0, trainer.output
    sender.says("every batch is sent")
    pair.kill("nats")
    sender.says("lost the connection to NATS")
    pair.start_nats()
    again = train(pair, STOP_AT=20, PERSIA_RUN_DIR=pair.folder / "run-again")
    assert again.wait(180) == 0, again.output


def test_a_resumed_job_equals_one_that_was_not_interrupted(pair: Stack) -> None:
    """Two replicas of unequal length send to two ranks. All ranks resume at the position of rank 0."""
    common: dict[str, object] = {"REPRODUCIBLE": 1, "EMBEDDING_STALENESS": 1}
    checkpoint = pair.folder / "checkpoints" / "middle"
    results = []
    runs: list[dict[str, object]] = [{}, {"STOP_AT": 23, "CHECKPOINT": checkpoint}, {"CHECKPOINT": checkpoint}]
    for run, env in enumerate(runs):
        senders = [send(pair, 0, 2, BATCHES=60), send(pair, 1, 2, BATCHES=20)]
        trainer = train(pair, ranks=2, PERSIA_RUN_DIR=pair.folder / f"run-{run}", **common, **env)
        assert trainer.wait(180) == 0, trainer.output
        results.append((trainer.says("rank 1:").split("rank 1: ")[-1], trainer.says("test auc").split("test auc")[1]))
        for sender in senders:
            assert pair.stop(sender.process.name) == 0
            assert "differ from those that rank" not in sender.output
    assert results[0][0] == results[2][0] == "40 steps"
    assert results[1][0] == "23 steps"
    assert results[0] == results[2]
    assert results[0] != results[1]


def test_data_for_another_job_or_with_another_token_is_kept_out(pair: Stack, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 40)
    trainer = train(pair, STOP_AT=5)
    trainer.says("generation 1 of job")
    wrong = send(pair, PERSIA_TOKEN_FILE=secret, BATCHES=100)
    assert wrong.wait() == 5, wrong.output
    other = send(pair, PERSIA_JOB="another", BATCHES=100)
    other.says("waiting for the trainers of job another")
    assert trainer.process.running
    pair.stop(other.process.name)
    send(pair, BATCHES=100)
    assert trainer.wait(180) == 0, trainer.output
