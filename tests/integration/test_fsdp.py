"""The checkpoints of a model that is sharded over two ranks equal those of DDP. See also ``test_up_table.py``."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from stack import MakeStack

from persia.debug.digest_files import diff
from persia.runtime import job

SCRIPT = ROOT / "tests" / "integration" / "rank_script.py"


@pytest.mark.row("S3-05", "S3-27")
def test_a_checkpoint_of_shards_continues_on_one_rank_and_one_of_ddp_on_shards(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    """The optimizer has states from the start. They are sharded like the weights."""
    stack = make_stack(job="fsdp")
    dump = {"dir": "first", "all": False}
    results = []
    for number, (before, after, ranks) in enumerate([("fsdp", "ddp", 1), ("ddp", "fsdp", 2)]):
        first = {"steps": 6, "dense": "Adagrad", "parallel": before, "dump": {**dump, "dir": f"at-{number}"}}
        trainer = stack.trainer(SCRIPT, json.dumps(first), ranks=2)
        assert trainer.wait() == 0, trainer.output
        (stack.folder / "run" / job.SUMMARY).unlink()
        out = tmp_path / f"{number}.npz"
        load = {"dir": f"at-{number}", "all": False}
        second = {"steps": 6, "dense": "Adagrad", "parallel": after, "load": load, "gather": True, "out": str(out)}
        trainer = stack.trainer(SCRIPT, json.dumps(second), ranks=ranks)
        assert trainer.wait() == 0, trainer.output
        (stack.folder / "run" / job.SUMMARY).unlink()
        results.append(dict(np.load(out)))
    for other in results[1:]:
        for name in other:
            np.testing.assert_allclose(results[0][name], other[name], atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.row("S3-05")
def test_rank_0_alone_cannot_use_weights_that_are_not_gathered(make_stack: MakeStack) -> None:
    stack = make_stack()
    plan = {"steps": 8, "parallel": "fsdp", "evaluate": {"rank": 0, "step": 4}}
    trainer = stack.trainer(SCRIPT, json.dumps(plan), ranks=2)
    assert trainer.wait() == 2, trainer.output
    trainer.says("call ctx.gather_model() on every rank")


@pytest.mark.row("S3-05", "S2-18")
def test_ranks_that_divide_a_step_differently_have_the_digests_of_ddp(make_stack: MakeStack, tmp_path: Path) -> None:
    """Digests are of whole weights and gradients. An interrupted step leaves no gradient."""
    stack = make_stack()
    plan = {"steps": 6, "parts": {"0": 5, "1": 16}, "leave": [3], "clip": 0.1}
    for parallel in ("ddp", "fsdp"):
        env = {"PERSIA_DIGEST": "1", "PERSIA_DIGEST_DIR": str(tmp_path / parallel)}
        trainer = stack.trainer(SCRIPT, json.dumps({**plan, "parallel": parallel}), ranks=2, env=env)
        assert trainer.wait() == 0, trainer.output
        (stack.folder / "run" / job.SUMMARY).unlink()
    found = diff(tmp_path / "ddp", tmp_path / "fsdp")
    assert found.first is None, found.first
    assert found.tensors == 2 * 5 * 15
    assert diff(tmp_path / "fsdp" / "rank-0.csv", tmp_path / "fsdp" / "rank-1.csv").first is None
