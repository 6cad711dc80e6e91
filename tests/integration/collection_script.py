"""A user's loop around EmbeddingCollection, on one rank or under DDP. The script writes the result to ``out``.

The JSON in its argument has further actions.
"""

import contextlib
import copy
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import Batches, TinyModel
from late_push import push_late, waits
from waiting import wait_until

from persia import env
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.embedding.schedule import LRSchedule
from persia.errors import CheckpointError, DataError, RunLostError, UsageError
from persia.nn import EmbeddingCollection, TableConfig

PLAN: dict[str, Any] = json.loads(sys.argv[1])
RANK, WORLD = env.get_rank(), env.get_world_size()
STEPS, BATCH, IDS = 20, 32, 200
MANY = 1_100_000  # ids per feature; a look-up of two such features exceeds MAX_IDS_PER_REQUEST


def slow(step: int) -> float:
    """A learning rate that rank 1 computes slowly, which delays its push."""
    if RANK == 1 and step in PLAN["late"]:
        push_late(Path(PLAN["marks"]), step)
    return 1.0


def waits_for(step: int) -> contextlib.AbstractContextManager[None]:
    """In the block, let the push of rank 1 arrive while rank 0 waits for it."""
    return waits(Path(PLAN["marks"]), step) if RANK == 0 else contextlib.nullcontext()


def optimizer() -> SGD:
    """Return the embedding optimizer of the plan."""
    if courses := PLAN.get("schedules"):  # by rank
        return SGD(0.1).scheduled(LRSchedule(**courses[RANK]))
    return SGD(0.1).scheduled(slow) if "late" in PLAN else SGD(0.1)


def due(event: str, number: int) -> bool:
    """Whether the plan has ``event`` on this rank at this step, counted from 0."""
    return bool(PLAN.get(event) == {"rank": RANK, "step": number})


def barrier() -> None:
    """Wait for the other ranks."""
    if WORLD > 1:
        torch.distributed.barrier()


def read(tables: EmbeddingCollection) -> dict[str, torch.Tensor]:
    """Return the rows of all ids, after every push of this rank."""
    with torch.no_grad():
        found: dict[str, torch.Tensor] = tables({"a": torch.arange(IDS), "b": torch.arange(IDS)})
    return found


class Loop:
    """Model, tables, and the steps on them."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = TinyModel()
        self.tables = EmbeddingCollection(
            [TableConfig("a", 4, ["a"]), TableConfig("b", 4, ["b"])], optimizer(), EmbeddingConfig((-0.1, 0.1))
        )
        whole = torch.nn.parallel.DistributedDataParallel(self.model) if WORLD > 1 else self.model
        self.whole: torch.nn.Module = whole
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, first: int, end: int) -> None:
        """Run some of the steps."""
        mine = slice(RANK * BATCH // WORLD, (RANK + 1) * BATCH // WORLD)
        for number in range(first, end):
            rng = np.random.default_rng([7, number])
            a, b = rng.integers(0, IDS, (2, BATCH))
            dense = torch.from_numpy(rng.standard_normal((BATCH, 3), dtype=np.float32)[mine])
            label = torch.from_numpy((a % 3 == 0).astype(np.float32)[mine, None])
            self.before(number)
            vectors = self.tables({"a": a[mine].copy(), "b": b[mine].copy()})
            output = self.whole([dense], [*vectors.values()])
            pause(number)
            torch.autograd.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, label))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def before(self, number: int) -> None:
        """Execute the plan's actions before a step."""
        if due("refused", number):
            with contextlib.suppress(DataError):
                self.tables({"a": np.arange(MANY, dtype=np.uint64), "b": np.arange(MANY, dtype=np.uint64)})
                raise AssertionError("too many ids were looked up")
        if due("broken", number):
            with fails(ValueError, "as the plan wants"):
                self.tables._session._pipeline = Broken()  # type: ignore[assignment]
                self.tables({"a": np.arange(2), "b": np.arange(2)})
            with fails(RunLostError, "ValueError: as the plan wants"):
                self.tables({"a": np.arange(2), "b": np.arange(2)})
            wait_until("the other rank to end this one", lambda: False, 20)

    def apply(self) -> None:
        """Wait until the pushes of all ranks are applied."""
        read(self.tables)
        barrier()

    def save_and_load(self, folder: str) -> None:
        """Continue from a checkpoint of the middle of training. All ranks must have equal rows and results."""
        self.train(0, 10)
        everything = torch.nn.ModuleDict({"model": self.model, "tables": self.tables})
        state = copy.deepcopy(everything.state_dict())
        with waits_for(10):
            self.tables.save(folder, model=self.model.state_dict())
        saved = read(self.tables)
        barrier()
        self.train(10, STEPS)
        self.apply()
        first = read(self.tables)
        barrier()
        self.train(STEPS, STEPS + 1)
        # An error of one rank is raised on all ranks.
        with mock.patch.dict(os.environ), fails(UsageError, "PERSIA_CKPT_DIR"):
            if RANK == WORLD - 1:
                del os.environ["PERSIA_CKPT_DIR"]
            self.tables.load(folder)
        self.train(STEPS + 1, STEPS + 2)  # the ranks continue in the same loop
        with fails(CheckpointError, "the state dict does not belong to the rows"):
            everything.load_state_dict(state)
        with waits_for(STEPS + 2):
            loaded = self.tables.load(folder)
        everything.load_state_dict(state)  # accepted, because the rows are again those of the state dict
        self.model.load_state_dict(loaded.state("model.pt"))
        for name, rows in read(self.tables).items():
            assert torch.equal(rows, saved[name]), name
        assert self.tables.step == 10
        barrier()
        self.train(10, STEPS)
        self.apply()
        for name, rows in read(self.tables).items():
            assert torch.equal(rows, first[name]), name
        with fails(CheckpointError, "nothing"):  # raised on every rank; afterwards, the ranks continue
            self.tables.load(str(Path(folder) / "nothing"))


class Broken:
    """A pipeline that fails."""

    def feed(self, batch: object) -> bool:
        """Fail."""
        raise ValueError("as the plan wants")


@contextlib.contextmanager
def fails(kind: type[Exception], text: str) -> Iterator[None]:
    """Check that the block raises an error of this class with this text."""
    try:
        yield
    except kind as error:
        found = str(error)
    else:
        found = "nothing was raised"
    if text not in found:
        raise AssertionError(found)


def pause(number: int) -> None:
    """If the plan has ``until``, wait for the test before the last backward pass."""
    if PLAN.get("until") and number == STEPS - 1:
        sys.stderr.write("before the last backward\n")
        wait_until("the test to go on", Path(PLAN["until"]).exists, 180)


def train_in_a_context() -> None:
    """Train 3 steps in a TrainCtx."""
    model = TinyModel()
    with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model) as ctx:
        assert sum(ctx.get_embedding_size()) == 0
        for batch in DataLoader(Batches(3)):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))


def write(loop: Loop) -> None:
    """Write rows and weights."""
    barrier()  # the pushes of the other ranks are also applied by now
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in read(loop.tables).items()}
    arrays |= {f"dense{index}": p.detach().numpy() for index, p in enumerate(loop.model.parameters())}
    if RANK == 0 and "out" in PLAN:
        np.savez(PLAN["out"], **arrays)
    barrier()


if "group" in PLAN:  # the script's own process group, before the collection
    torch.distributed.init_process_group("gloo", init_method=PLAN["group"], rank=RANK, world_size=WORLD)
loop = Loop()  # a global of the module, as in scripts: it exists until the process ends

if __name__ == "__main__":
    if "folder" in PLAN:
        loop.save_and_load(PLAN["folder"])
    else:
        loop.train(0, STEPS)
    assert loop.tables.step == STEPS
    if "until" not in PLAN:
        read(loop.tables)
        write(loop)
    if PLAN.get("context"):
        with fails(UsageError, "together with an EmbeddingCollection"):
            train_in_a_context()
        read(loop.tables)
        barrier()
        loop.tables.close()
        barrier()
        train_in_a_context()
    elif PLAN.get("close"):
        loop.tables.close()
