"""One rank of a run that reports its phases, and waits in one of the phases until a fault is injected.

``phases.jsonl`` in the given folder gets a line for each phase that a rank reaches. At the ``gate`` of the plan, the
rank creates the file ``reached`` and, with ``hold``, waits until the file ``go`` exists. ``reads.jsonl`` gets the
values that each evaluation reads. Every occurrence of an id in the data takes exactly 1 from its row, as in
:mod:`ledger_train`.

The phases, in the order of a run: ``before`` the first loop; ``loop``; ``save``; ``between`` two loops; ``evaluation``;
``restored``: after a restore and before a loop; ``end``.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ledger_data import Sum
from phase_data import TABLES, Data, array
from torch.utils.dlpack import from_dlpack
from waiting import wait_until

from persia import distributed, env
from persia.checkpoint import snapshot
from persia.ctx import Checkpoints, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.distributed import control_plane
from persia.distributed import run as common_run
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.embedding.optim import SGD
from persia.runtime import job

FOLDER = Path(sys.argv[1])
PLAN: dict[str, Any] = json.loads(sys.argv[2])
DATA = Data.of(PLAN)
HELD_S = 150.0
"""Seconds that a rank waits at the gate."""
MOST_LOOPS = 6
"""Loops of one process: the two of the plan, one more after a load, and empty ones after a restart."""
READS = 3
"""How often an evaluation reads all rows."""


def append(name: str, **entry: Any) -> None:
    """Append a line to a file. Lines of several ranks do not mix."""
    line = json.dumps({"rank": env.get_rank(), "pid": os.getpid(), **entry})
    descriptor = os.open(FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def reach(phase: str, moment: str, step: int, generation: int = 0) -> None:
    """Report the phase of this rank, and wait if the rank is at the gate."""
    append("phases.jsonl", phase=phase, moment=moment, step=step, generation=generation)
    gate = PLAN["gate"]
    here = {"phase": phase, "moment": moment, "rank": env.get_rank(), "step": step}
    if any(value is not None and here[key] != value for key, value in gate.items() if key != "hold"):
        return
    try:
        os.close(os.open(FOLDER / "reached", os.O_CREAT | os.O_EXCL))
    except FileExistsError:  # an earlier process of this rank created the file
        return
    if gate["hold"]:
        wait_until("the fault", (FOLDER / "go").exists, HELD_S)


class Own(IterableDataset):
    """The batches of this rank, without a data-compose. A pass ends where the next loop begins."""

    def __init__(self) -> None:
        super().__init__(4)
        self.next = 0

    def __iter__(self) -> Iterator[PersiaBatch]:
        end = next(end for end in (PLAN["stop"], DATA.steps) if self.next < end or end == DATA.steps)
        while self.next < end:
            self.next += 1
            yield DATA.batch((self.next - 1) * DATA.ranks + env.get_rank())

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches yielded."""
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the batches that were yielded."""
        self.next = state_dict["next"]


class Watched:
    """A saver that reports the moments of a save."""

    def __init__(self, saver: Any, step: int) -> None:
        self._saver, self._step = saver, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saver, name)

    def write_rows(self) -> Any:
        """Report the cut, and call the method of the saver."""
        reach("save", "cut", self._step)
        return self._saver.write_rows()

    def commit(self, *arguments: Any) -> Any:
        """Call the method of the saver between two reports."""
        reach("save", "written", self._step)
        result = self._saver.commit(*arguments)
        reach("save", "committed", self._step)
        return result


def watch() -> None:
    """Replace functions, so saves and the summary report their moments."""
    begin, summary = snapshot.Save.__init__, common_run._write_summary

    def begin_save(self: Any, engine: Any, directory: Any, step: int, cursor: Any = None) -> None:
        reach("save", "due", step, engine.generation)
        begin(self, engine, directory, step, cursor)
        self._saver = Watched(self._saver, step)

    def write_summary(folder: Path) -> None:
        reach("end", "finishing", DATA.steps)
        summary(folder)
        reach("end", "finished", DATA.steps)

    snapshot.Save.__init__ = begin_save  # type: ignore[method-assign]
    common_run._write_summary = write_summary


def read(ctx: Any, step: int) -> None:
    """Read the rows of all ids, and record their values."""
    ids = array(DATA.known())
    batch = PersiaBatch([IDTypeFeatureWithSingleID(table, ids) for table in TABLES], requires_grad=False)
    found = ctx.get_embedding_from_data(batch).embeddings()
    rows = {table: from_dlpack(rows).tolist() for table, rows in zip(TABLES, found, strict=True)}
    append("reads.jsonl", step=step, rows=rows)


def evaluate(step: int) -> None:
    """Evaluate on this rank."""
    with eval_ctx() as ctx:
        for number in range(READS):
            reach("evaluation", str(number), step, ctx.engine.generation)
            read(ctx, step)


def one_loop(ctx: TrainCtx, loader: DataLoader) -> None:
    """Train until the end of the data, or until the step at which the next loop of the plan begins."""
    for batch in loader:
        output, _ = ctx.forward(batch)
        reach("loop", "forward", batch.step, ctx.engine.generation)
        ctx.backward(output.sum())
        if env.get_rank() == 0:
            sys.stderr.write(f"step {ctx.step} done\n")
        reach("loop", "backward", ctx.step, ctx.engine.generation)
        if PLAN["source"] == "stream" and ctx.step == PLAN["stop"]:
            break


def between(ctx: TrainCtx) -> None:
    """Execute the actions of the plan between the two loops."""
    step = ctx.step
    distributed.agree(True)  # a loop that is left early does not wait for the pushes of other ranks
    reach("between", "left", step, ctx.engine.generation)
    evaluate(step)
    reach("between", "evaluated", step, ctx.engine.generation)
    mark = FOLDER / f"restored-{env.get_rank()}"
    if mark.exists():
        return
    mark.touch()
    if PLAN["restore"] == "restart":
        raise SystemExit(75)
    if PLAN["restore"] == "load" and env.get_rank() == 0:
        ctx.load_checkpoint(Path(job.run_name()) / f"step-{PLAN['every']}")
        reach("restored", "loaded", ctx.step, ctx.engine.generation)


def main() -> None:
    """Train in two loops."""
    watch()
    control_plane.SILENCE_S = PLAN["silence_s"]
    torch.manual_seed(0)
    model = Sum()
    reach("before", "start", 0)
    with TrainCtx(
        SGD(1.0),
        torch.optim.SGD(model.parameters(), lr=1.0),
        mixed_precision=False,
        model=model,
        embedding_config=EmbeddingConfig((0.0, 0.0), weight_bound=0.0),
        embedding_gradient_scale="none",
        checkpoints=Checkpoints(every=PLAN["every"], keep_last=100),
    ) as ctx:
        resumed = distributed.agree(env.get_rank() != 0 or ctx.step > 0)
        reach("restored" if resumed else "before", "entered", ctx.step, ctx.engine.generation)
        source = StreamingDataset() if PLAN["source"] == "stream" else Own()
        loader = DataLoader(source, reproducible=DATA.ordered, embedding_staleness=PLAN["staleness"])
        for _ in range(MOST_LOOPS):
            one_loop(ctx, loader)
            if ctx.step >= DATA.steps:
                break
            if ctx.step == PLAN["stop"]:
                between(ctx)
        else:
            raise RuntimeError(f"the data have ended after step {ctx.step} of {DATA.steps}")
        distributed.agree(True)  # the pushes of all ranks are applied
        reach("end", "trained", ctx.step, ctx.engine.generation)
        if env.get_rank() == 0:
            read(ctx, ctx.step)
        distributed.agree(True)  # no rank ends earlier
    reach("end", "left", DATA.steps)


if __name__ == "__main__":
    main()
