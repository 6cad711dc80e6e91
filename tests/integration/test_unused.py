"""Models on several ranks whose loss does not depend on all of their weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from stack import MakeStack, Part, Stack, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SCRIPT = """
import json
import sys

import torch
from conftest import Batches, TinyModel

from persia import distributed, env
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD

PLAN = json.loads(sys.argv[1])


class Branches(TinyModel):
    '''Uses a layer in some steps of some ranks only. Every rank adds what the layer gives to its output.'''

    def __init__(self):
        super().__init__()
        self.branch = torch.nn.Linear(3, 1)
        self.calls = 0

    def forward(self, dense, embeddings):
        self.calls += 1
        output = super().forward(dense, embeddings)
        more = self.branch(dense[0])
        used = self.calls in PLAN["used"].get(str(env.get_rank()), [])
        if PLAN.get("outputs"):
            return output, more
        return output + more if used else output


torch.manual_seed(1)
model = Branches()
before = model.branch.weight.detach().clone()
dense = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
option = distributed.DDPOption("tcp", "gloo", **PLAN["options"])
with TrainCtx(SGD(0.1), dense, mixed_precision=False, distributed_option=option, model=model) as ctx:
    for batch in DataLoader(Batches(6), reproducible=True):
        output, labels = ctx.forward(batch)
        logits = output[0] if PLAN.get("outputs") else output
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[0]))
    weights = [each.detach().flatten().tolist() for each in model.parameters()]
    every = distributed.peers().all_gather("weights", weights)
    distributed.report({"weights": every, "changed": not torch.equal(before, model.branch.weight)})
"""
STEPS = 6
EVERY = [*range(1, STEPS + 1)]


def trained(stack: Stack, folder: Path, code: int = 0, **plan: Any) -> Part:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    trainer = stack.trainer(script, json.dumps({"options": {}, "used": {}, **plan}), ranks=2)
    assert trainer.wait(120) == code, trainer.output
    assert "find_unused_parameters=True was specified" not in trainer.output
    return trainer


def result(stack: Stack, folder: Path, **plan: Any) -> dict[str, Any]:
    trained(stack, folder, **plan)
    summary = stack.folder / "run" / "summary.json"
    found: dict[str, Any] = json.loads(summary.read_text())["result"]
    summary.unlink()
    first, second = found["weights"]
    assert first == second, "the ranks have different weights"
    return found


def test_a_model_that_uses_all_weights_trains_alike_with_and_without_the_search(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    stack, used = make_stack(), {"0": EVERY, "1": EVERY}
    searched = result(stack, tmp_path, used=used)
    assert searched["changed"]
    for options in ({"find_unused_parameters": False}, {"static_graph": True}):
        assert result(stack, tmp_path, used=used, options=options) == searched, options


def test_ranks_remain_equal_if_a_layer_is_used_late_by_one_rank_or_never(make_stack: MakeStack, tmp_path: Path) -> None:
    """The layers that the first step uses make no difference."""
    stack = make_stack()
    late = result(stack, tmp_path, used={"1": [4]})
    early = result(stack, tmp_path, used={"0": EVERY, "1": [1, 2]})
    never = result(stack, tmp_path)
    assert late["changed"] and early["changed"] and not never["changed"]
    assert late["weights"] != early["weights"] != never["weights"]
    assert result(stack, tmp_path, options={"static_graph": True}) == never


def test_an_output_that_the_loss_does_not_use_changes_no_weights(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    assert result(stack, tmp_path, outputs=True) == result(stack, tmp_path)


@pytest.mark.parametrize(
    ("used", "option", "step"),
    [
        ({}, "find_unused_parameters=False", 1),
        ({"0": EVERY, "1": [1, 2, 3]}, "find_unused_parameters=False", 4),
        ({"0": EVERY, "1": [1, 2, 3]}, "static_graph=True", 4),
    ],
)
def test_an_unused_layer_without_the_search_is_named_before_a_step_is_applied(
    make_stack: MakeStack, tmp_path: Path, used: dict[str, list[int]], option: str, step: int
) -> None:
    name, value = option.split("=")
    trainer = trained(make_stack(), tmp_path, 2, used=used, options={name: value == "True"})
    trainer.says(
        f"step {step}, rank 1: the loss does not depend on branch.weight, branch.bias, and DDPOption({option}) requires"
    )
    trainer.says(f"leave out {option}; or call requires_grad_(False)")
