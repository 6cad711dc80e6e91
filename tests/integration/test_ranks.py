"""Several ranks that train together: data, checkpoints, collections, evaluation."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT
from rank_trainers import COLLECTION, SCRIPT
from stack import MakeStack

from persia.runtime import job
from persia_core import checkpoint

LEAVES = """
from pathlib import Path

import torch
from conftest import Batches, TinyModel
from late_push import push_late, waits
from torch.utils.dlpack import from_dlpack

from persia import distributed, env
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD


def slow(step):
    if env.get_rank() == 1 and step == 5:
        push_late(Path(MARKS), step)
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
        with waits(Path(MARKS), 5):
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
    print("trained " + " ".join(map(str, steps)))  # a print of several values is several writes
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_collection_that_is_never_closed_is_closed_before_the_end(
    make_stack: MakeStack, tmp_path: Path, ranks: int
) -> None:
    """The script starts a process group itself."""
    stack = make_stack()
    plan = json.dumps({"group": f"file://{tmp_path}/group"})
    trainer = stack.trainer(COLLECTION, plan, ranks=ranks)
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and (summary["steps"], summary["generation"]) == (20, 1)


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


@pytest.mark.row("S3-14")
def test_uneven_data_stops_all_ranks_together(make_stack: MakeStack) -> None:
    stack = make_stack()
    trainer = stack.trainer(SCRIPT, json.dumps({"steps": 8, "more": {"1": 3}}), ranks=2)
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and (summary["steps"], summary["world_size"]) == (8, 2)
    trainer.says("all ranks stop after step 8: the data of rank 0 has ended; unused batches: at least 3 of rank 1")


@pytest.mark.parametrize("everybody", [True, False])
def test_checkpoints_need_no_other_rank(make_stack: MakeStack, tmp_path: Path, everybody: bool) -> None:
    """Rank 0 alone or all ranks save and load. The run continues with rows, model and step of the checkpoint."""
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
    script.write_text(f"FOLDER, LATE = 'first', 'late'  # below PERSIA_CKPT_DIR\nMARKS = {str(tmp_path)!r}\n{LEAVES}")
    trainer = stack.trainer(script, ranks=2)
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["steps"] == 6


@pytest.mark.parametrize("longer", ["0", "1"])
def test_uneven_data_that_can_be_continued_starts_again_with_every_pass(make_stack: MakeStack, longer: str) -> None:
    stack = make_stack()
    plan = {"steps": 8, "more": {longer: 3}, "data": "stateful", "passes": 3}
    trainer = stack.trainer(SCRIPT, json.dumps(plan), ranks=2)
    assert trainer.wait() == 0, trainer.output
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["steps"] == 24


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
    early.says("cannot evaluate: no training run of job 'test' has begun on its servers, so they have no rows")
    pause = {"step": 5, "reached": str(tmp_path / "reached"), "until": str(tmp_path / "until")}
    trainer = stack.trainer(SCRIPT, json.dumps({"steps": 10, "pause": pause}), ranks=2)
    trainer.says("step 4 done")
    during = stack.python("during", observer)
    assert during.wait() == 0, during.output
    refused = stack.python("clear", "-m", "persia.launch.rank_main", observer, "clear_embeddings")
    assert refused.wait() == 2, refused.output
    refused.says("cannot call clear_embeddings in a process that only evaluates: job 'test' is being trained by pid ")
    found = re.search(r"sizes \[(\d+), (\d+)\], rows of a: (\d+), missing (\d+)", during.output)
    assert found is not None and all(int(number) > 0 for number in found.groups()), during.output
    assert int(found[4]) + int(found[1]) + int(found[2]) == 400, "of the 200 ids of each slot"
    during.says(f"a collection: missing {found[4]}")
    (tmp_path / "until").touch()
    assert trainer.wait() == 0, trainer.output
    for number, change in enumerate(["load_checkpoint", "load_embedding"]):  # refused even while no rank trains
        env = {"RANK": str(number), "WORLD_SIZE": "2"}
        refused = stack.python(change, "-m", "persia.launch.rank_main", observer, change, env=env)
        assert refused.wait() == 2, refused.output
        refused.says(f"cannot call {change} for evaluation: the rows on the servers are those of the training script")
    cleared = stack.python("cleared", observer, "clear_embeddings")
    assert cleared.wait() == 0, cleared.output
    cleared.says("rows of a: 0, missing 400")
    cleared.says("evaluation: the tables are empty (0 rows)")
