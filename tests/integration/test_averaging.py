"""Dense gradients of several ranks that are averaged in regions, or compressed."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from metadata_server import metadata
from stack import MakeStack, Part, Stack

from persia.runtime import job

SCRIPT = ROOT / "tests" / "integration" / "rank_script.py"
GRADIENTS = 4 * ((3 + 8) * 16 + 16 + 16 + 1)
"""Bytes of the gradients of the model of a rank, in float32."""
STEPS = 8


class Result:
    """The rows, the weights and the report of a finished run."""

    def __init__(self, stack: Stack, out: Path) -> None:
        self.arrays = dict(np.load(out))
        summary = stack.folder / "run" / job.SUMMARY
        self.report: dict[str, Any] = json.loads(summary.read_text())["result"]
        summary.unlink()

    def sent(self, name: str) -> list[int]:
        """Return the bytes that each rank has sent, for one kind of transfer."""
        return [each[name] for each in self.report["dense_bytes"]]

    def differs(self, other: "Result") -> float:
        """Return the largest absolute difference between the two results."""
        return max(float(np.abs(value - other.arrays[name]).max()) for name, value in self.arrays.items())

    def equals(self, other: "Result") -> bool:
        """Whether the arrays of the two results are bit-identical."""
        return all(value.tobytes() == other.arrays[name].tobytes() for name, value in self.arrays.items())


def trained(stack: Stack, ranks: int, code: int = 0, **plan: Any) -> tuple[Part, Result | None]:
    """Train, and return the trainer, and its result if it exited with 0."""
    out = stack.folder / "out.npz"
    out.unlink(missing_ok=True)
    trainer = stack.trainer(SCRIPT, json.dumps({"steps": STEPS, "out": str(out), **plan}), ranks=ranks)
    assert trainer.wait(120) == code, trainer.output
    return trainer, Result(stack, out) if code == 0 else None


def result(stack: Stack, ranks: int, **plan: Any) -> Result:
    found = trained(stack, ranks, **plan)[1]
    assert found is not None and found.report["equal_weights"]
    return found


@pytest.mark.row("S4-23", "S4-61")
def test_regions_give_the_result_of_one_all_reduce_with_half_the_bytes_between_them(make_stack: MakeStack) -> None:
    stack = make_stack()
    regions = {"east": [0, 2], "west": [3, 1]}
    flat = result(stack, 4)
    one, other = (result(stack, 4, regions=regions) for _ in range(2))
    assert flat.report["dense_bytes"] == [None] * 4
    assert 0 < flat.differs(one) < 1e-5  # sums are computed in another order
    assert one.equals(other)  # the order is the same in every run
    whole = STEPS * GRADIENTS
    assert one.sent("gradients") == [whole] * 4  # each of the four ranks passes all gradients to one all-reduce
    assert one.sent("across_regions") == [whole, 0, 0, whole]
    assert one.sent("in_region") == [2 * whole] * 4
    half = result(stack, 4, regions=regions, compression={"name": "fp16"})
    assert half.sent("across_regions") == [whole // 2, 0, 0, whole // 2]
    assert 0 < half.differs(flat) < 0.01


@pytest.mark.row("S4-23")
def test_regions_without_a_rank_are_refused(make_stack: MakeStack) -> None:
    trainer, _ = trained(make_stack(), 2, code=2, regions={"east": [0], "west": [2]})
    trainer.says("regions: expected each rank from 0 to 1 in exactly one region; in no region: 1; no such rank: 2")


@pytest.mark.row("S4-24")
def test_half_the_bytes_are_sent_in_half_precision(make_stack: MakeStack) -> None:
    """The test of regions has the same check for fp16."""
    stack = make_stack()
    flat, half = result(stack, 2), result(stack, 2, compression={"name": "bf16"})
    assert half.sent("across_regions") == [STEPS * GRADIENTS // 2] * 2
    assert 0 < flat.differs(half) < 0.02


POWERSGD = {"name": "powersgd", "rank": 1, "start_iter": 3}


@pytest.mark.row("S4-24")
def test_powersgd_sends_less_and_a_resumed_run_has_the_bits_of_an_undisturbed_one(make_stack: MakeStack) -> None:
    """Checkpoints have the state of PowerSGD of each rank: errors, thin matrices, random state and number of steps."""
    stack = make_stack()
    plan: dict[str, Any] = {"steps": 14, "data": "stateful", "compression": POWERSGD}
    flat = result(stack, 2, steps=14, data="stateful")
    undisturbed = result(stack, 2, **plan)
    sent = undisturbed.sent("across_regions")[0]
    thin = 4 * (16 + 11 + 16 + 16 + 1)  # P and Q of the first layer; the second one and the biases are sent whole
    assert sent == 3 * GRADIENTS + 11 * thin
    assert 1e-7 < flat.differs(undisturbed) < 0.1
    saves = {"folder": "powersgd", "every": 4}
    trainer, _ = trained(stack, 2, code=1, **plan, checkpoints=saves, **{"raise": {"rank": 1, "step": 10}})
    trainer.says("as the plan wants")
    resumed = result(stack, 2, **plan, checkpoints=saves)
    assert resumed.equals(undisturbed)
    assert resumed.sent("gradients")[0] < undisturbed.sent("gradients")[0]  # the run has resumed, not restarted


@pytest.mark.row("S4-24")
def test_a_skipped_step_leaves_no_nan_in_the_errors_of_powersgd(make_stack: MakeStack) -> None:
    stack = make_stack()
    found = result(stack, 2, steps=12, compression=POWERSGD, nan={"rank": 1, "step": 7})
    assert found.report["skipped"] == 1 and found.report["step"] == 12
    assert all(np.isfinite(each).all() for each in found.arrays.values())


@pytest.mark.nightly
@pytest.mark.row("S4-24")
def test_powersgd_begins_again_after_a_checkpoint_of_other_ranks_and_of_one_by_hand(make_stack: MakeStack) -> None:
    """If only some ranks began again, the ranks would send different tensors."""
    stack = make_stack()
    plan: dict[str, Any] = {"steps": 9, "compression": POWERSGD}
    result(stack, 2, **plan, dump={"dir": "hand", "all": False})
    trainer, _ = trained(stack, 2, **plan, load={"dir": "hand", "all": False})
    trainer.says("PowerSGD starts without a state: the checkpoint has the states of 1 of 2 ranks")
    saves = {"folder": "two", "every": 3}
    # At step 8 the checkpoint of step 3 is complete, because the cut after step 6 waits for it.
    trained(stack, 2, code=1, **plan, checkpoints=saves, **{"raise": {"rank": 1, "step": 8}})
    trainer, found = trained(stack, 3, **plan, checkpoints=saves)
    assert found is not None and found.report["equal_weights"]
    trainer.says("PowerSGD starts without a state: the checkpoint has the states of 2 of 3 ranks")


@pytest.mark.row("S4-36")
def test_a_notice_of_one_host_saves_all_ranks_at_the_same_step(make_stack: MakeStack) -> None:
    stack = make_stack()
    with metadata() as service:
        plan = {"steps": 100_000, "checkpoints": {"folder": "spot", "every": 100_000}, "spot": service.url}
        trainer = stack.trainer(SCRIPT, json.dumps(plan), ranks=2)
        trainer.says("step 5 done")
        ends = service.announce(60)
        assert trainer.wait(60) == 75, trainer.output
        assert ends.timestamp() > time.time()
    left = {line.rpartition("exiting after step ")[2] for line in trainer.lines if "exiting after step" in line}
    told = [line for line in trainer.lines if "exiting after step" in line]
    assert len(told) == 2 and len(left) == 1, trainer.output
    assert any("spot notice (terminate)" in line for line in told)
    saved = [path.name for path in stack.folder.rglob("step-*") if path.is_dir()]
    assert saved == [f"step-{left.pop()}"]
