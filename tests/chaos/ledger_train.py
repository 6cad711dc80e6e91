"""One rank of a ledger run: every occurrence of an id in the data takes exactly 1 from its row.

The run uses SGD with rate 1, rows that begin at zero, and a loss that is the sum of all rows. Gradients of ranks are
added up. Regardless of the faults, ``row == -occurrences`` of the id at the end. A lost update makes the row too high,
a repeated update too low. Rank 0 compares all rows and writes ``ledger.json`` into the given folder. JSON in the second
argument changes the run.

With ``bits``, every bit of the result depends on the order of events: the run uses random rows, Adam and a nonlinear
loss. This script does not compare the rows of such a run.

With ``evaluate``, the given ranks evaluate forever at a step: ``in`` the body of the loop, ``before`` the loop, or
``behind`` the loop, which all ranks then leave at this step.

With ``pause``, the ranks wait after that loop until the file ``until`` exists. Rank 0 creates the file ``reached``.

With ``poison``, the number of a batch, training always fails at that batch. In the end, all ranks skip its step.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ledger_data import DIM, POISON, Sum, expected
from torch.utils.dlpack import from_dlpack
from waiting import wait_until

from persia import distributed, env
from persia.ctx import Checkpoints, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.distributed import control_plane
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.embedding.optim import SGD, Adam
from persia.runtime import job

FOLDER = Path(sys.argv[1])
PLAN: dict[str, Any] = {
    "steps": 100,
    "every": 20,
    "reproducible": False,
    "bits": False,
    "silence_s": control_plane.SILENCE_S,
    "evaluate": {"where": "", "step": 0, "ranks": []},
    "poison": None,
    **json.loads(sys.argv[2]),
}


class Endless(IterableDataset):
    """The same batch again and again."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        ids = np.arange(8, dtype=np.uint64)
        features = [IDTypeFeatureWithSingleID(slot, ids) for slot in expected(1)]
        return itertools.repeat(PersiaBatch(features, requires_grad=False))


def evaluate(where: str, step: int) -> bool:
    """Evaluate on this rank, if the plan says so. Return whether the plan has an evaluation on any rank."""
    plan = PLAN["evaluate"]
    if (where, step) != (plan["where"], plan["step"]):
        return False
    if env.get_rank() in plan["ranks"]:
        sys.stderr.write(f"evaluating on rank {env.get_rank()}\n")
        with eval_ctx():
            for _ in DataLoader(Endless()):
                pass
    return True


def train(ctx: TrainCtx, loader: DataLoader) -> None:
    """Train until the data end."""
    for batch in loader:
        evaluate("before", batch.step)
        if batch.meta == POISON:
            raise ValueError("this batch is poison")
        output, _ = ctx.forward(batch)
        ctx.backward((output - 1).square().sum() if PLAN["bits"] else output.sum())
        if env.get_rank() == 0:
            sys.stderr.write(f"step {ctx.step} done\n")
        evaluate("in", ctx.step)
        if (PLAN["evaluate"]["where"], PLAN["evaluate"]["step"]) == ("behind", ctx.step):
            break
    if evaluate("behind", ctx.step):
        if pause := PLAN.get("pause"):
            if env.get_rank() == 0:
                Path(pause["reached"]).touch()
            wait_until(f"the test to make {pause['until']}", Path(pause["until"]).exists, 180)
        train(ctx, loader)


def compare(ctx: TrainCtx) -> tuple[int, list[str]]:
    """Compare every row with the data. Return the number of rows, and the problem."""
    wrong, checked = [], 0
    ranks, poison = env.get_world_size(), PLAN["poison"]
    left_out = [] if poison is None else [poison // ranks * ranks + rank for rank in range(ranks)]
    counts = expected(PLAN["steps"] * ranks, left_out)
    ids = np.arange(max(map(len, counts.values())), dtype=np.uint64)
    batch = PersiaBatch([IDTypeFeatureWithSingleID(slot, ids) for slot in counts], requires_grad=False)
    for (slot, counted), rows in zip(counts.items(), ctx.get_embedding_from_data(batch).embeddings(), strict=True):
        found = from_dlpack(rows).numpy()[: len(counted)]
        checked += len(counted)
        wrong += [
            f"{slot} id {place}: {found[place].tolist()}, want {-count}"
            for place, count in enumerate(counted.tolist())
            if not np.array_equal(found[place], np.full(DIM, -count, np.float32))
        ]
    return checked, wrong


def write(ctx: TrainCtx, skipped: int, checked: int, wrong: list[str]) -> None:
    """Write ``ledger.json``."""
    assert isinstance(ctx.model, torch.nn.Module)
    dense = sum(float(parameter.detach()) for parameter in ctx.model.parameters())
    ledger = {"rows_checked": checked, "rows_wrong": len(wrong), "wrong": wrong[:10], "steps": ctx.step, "dense": dense}
    (FOLDER / "ledger.json").write_text(json.dumps({**ledger, "skipped": skipped}))


def main() -> None:
    """Train, and compare."""
    torch.manual_seed(0)
    bits, control_plane.SILENCE_S = PLAN["bits"], PLAN["silence_s"]
    model = Sum()
    policy = "stop" if PLAN["poison"] is None else "skip"
    checkpoints = Checkpoints(every=PLAN["every"], failing_batches=policy)
    with TrainCtx(
        Adam(0.01) if bits else SGD(1.0),
        torch.optim.Adam(model.parameters(), lr=0.01) if bits else torch.optim.SGD(model.parameters(), lr=1.0),
        mixed_precision=False,
        model=model,
        embedding_config=EmbeddingConfig() if bits else EmbeddingConfig((0.0, 0.0), weight_bound=0.0),
        embedding_gradient_scale="none",
        checkpoints=checkpoints,
    ) as ctx:
        if (load := PLAN.get("load")) and env.get_rank() == 0:
            ctx.load_checkpoint(Path(job.run_name()) / load)
        train(ctx, DataLoader(StreamingDataset(), reproducible=PLAN["reproducible"]))
        distributed.agree(True)  # the pushes of all ranks are applied
        if PLAN.get("leave_behind_loop"):
            raise SystemExit(75)
        if env.get_rank() == 0:
            write(ctx, checkpoints.skipped, *((0, []) if bits else compare(ctx)))
        distributed.agree(True)  # keeps every rank running until rank 0 has written the result


if __name__ == "__main__":
    main()
