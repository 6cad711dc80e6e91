"""The script of a rank in the tests of several ranks. Its argument is a plan in JSON.

Every rank trains on its part of the same global batches. At the end, rank 0 writes the rows of all ids and the model's
weights to ``out``.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import TinyModel
from waiting import wait_until

from persia import distributed, env
from persia.ctx import Checkpoints, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.debug.breakpoint import session as debugger
from persia.distributed import control_plane
from persia.distributed.wrapped import unwrap_model
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.runtime.spot import SpotWatch
from persia_core.forward import TrainingBatch

PLAN: dict[str, Any] = {
    "steps": 20,
    "batch": 32,  # the samples of all ranks together
    "ids": 200,
    "optimizer": "SGD",
    "reproducible": True,
    "more": {},  # the number of additional steps, by rank
    "data": "part",
    "passes": 1,
    "swapped": None,  # the rank whose batches have their features in the opposite order
    "dense": "SGD",
    "parallel": "ddp",
    "nonfinite": "skip",
    "clip": None,
    "parts": {},  # the micro-batch size, by rank
    "leave": [],  # steps whose last part is not back-propagated
    "gather": False,  # gather weights and evaluate on rank 0, between a load and the first loop
    "regions": None,
    "compression": None,  # arguments of Compression
    "checkpoints": None,  # arguments of Checkpoints
    "spot": None,  # the address that the first rank of each host polls
    "kinds": False,  # a weighted, a raw and a hash-stacked slot instead of two plain ones
    **json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}"),
}
STARTED = time.monotonic()
RANK, WORLD = env.get_rank(), env.get_world_size()
DENSE: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "Adagrad": torch.optim.Adagrad}
OPTIMIZERS: dict[str, Optimizer] = {"SGD": SGD(0.1), "Adagrad": Adagrad(0.1), "Adam": Adam(0.01)}


class Part(IterableDataset):
    """The part of this rank in every global batch."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        for number in range(PLAN["steps"] + PLAN["more"].get(str(RANK), 0)):
            if due("stall", number + 1):
                hang()
            yield part(number)


class StatefulPart(Part):
    """Like ``Part``, but with a state dict by which it continues."""

    next = 0

    def __iter__(self) -> Iterator[PersiaBatch]:
        for batch in list(super().__iter__())[self.next :]:
            self.next += 1
            yield batch
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches yielded."""
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the batches that were yielded."""
        self.next = state_dict["next"]


class Flat(TinyModel):
    """A model for slots of any shape."""

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return ``[batch, 1]`` logits."""
        return super().forward(non_id_tensors, [tensor.flatten(1) for tensor in embedding_tensors])


DATASETS: dict[str, type[IterableDataset]] = {"part": Part, "stateful": StatefulPart, "stream": StreamingDataset}


def part(number: int) -> PersiaBatch:
    """Return this rank's part of batch ``number``."""
    size, ids = PLAN["batch"], PLAN["ids"]
    rng = np.random.default_rng([7, number])
    single = rng.integers(0, ids, size, dtype=np.uint64)
    lists = [rng.integers(0, ids, rng.integers(0, 4), dtype=np.uint64) for _ in range(size)]
    dense = rng.standard_normal((size, 3), dtype=np.float32)
    label = ((single % 3 == 0) | (dense[:, 0] > 1)).astype(np.float32)[:, None]
    weights = [rng.standard_normal(len(each), dtype=np.float32) for each in lists]
    mine = slice(RANK * size // WORLD, (RANK + 1) * size // WORLD)
    features: list[IDTypeFeature | IDTypeFeatureWithSingleID]
    if PLAN["kinds"]:
        features = [
            IDTypeFeature("weighted", lists[mine], weights[mine]),
            IDTypeFeature("raw", lists[mine]),
            IDTypeFeatureWithSingleID("stacked", single[mine]),
        ]
    else:
        features = [IDTypeFeatureWithSingleID("a", single[mine]), IDTypeFeature("b", lists[mine])]
    return PersiaBatch(
        features[::-1] if PLAN["swapped"] == RANK else features,
        [NonIDTypeFeature(np.ascontiguousarray(dense[mine]))],
        [Label(np.ascontiguousarray(label[mine]), binary=True)],
    )


def due(event: str, step: int) -> bool:
    """Whether the plan has ``event`` on this rank at ``step``."""
    wanted = PLAN.get(event)
    return wanted is not None and wanted["rank"] == RANK and wanted["step"] == step


def before(step: int) -> None:
    """Execute the plan's actions before a step."""
    if due("kill", step):
        os.kill(os.getpid(), signal.SIGKILL)
    if due("raise", step):
        raise ValueError("as the plan wants")
    if due("exit", step):
        sys.exit(PLAN["exit"]["code"])
    if due("hang", step):
        hang()
    if due("prompt", step):
        prompt()
    if (pause := PLAN.get("pause")) is not None and pause["step"] == step:
        if RANK == 0:
            Path(pause["reached"]).touch()
        wait_until(f"the test to make {pause['until']}", Path(pause["until"]).exists, 180)


def hang() -> None:
    """Wait for an event that never occurs."""
    threading.Event().wait()


def prompt() -> None:
    """Stay at the prompt of the debugger for longer than any limit, while the other ranks run without a breakpoint."""
    session, began = debugger(), time.monotonic()
    with session.prompting(sys._getframe()):
        wait_until("the limits to pass", lambda: time.monotonic() - began > PLAN["prompt"]["seconds"], 60)
    session.continues(stops_again=False)


class Late(distributed.DDPOption):
    """DDP whose process group never starts on the rank that the plan names."""

    def initialize(self, *arguments: Any) -> None:
        """Start the process group, or hang if the plan has ``late`` on this rank."""
        if due("late", 0):
            hang()
        super().initialize(*arguments)


def averaged() -> distributed.DDPOption:
    """Return DDP with the regions and the compression of the plan."""
    compression = None if PLAN["compression"] is None else distributed.Compression(**PLAN["compression"])
    return Late("tcp", "gloo", regions=PLAN["regions"], compression=compression)


def evaluate(model: torch.nn.Module | None) -> None:
    """Run the model on this rank alone, while the other ranks wait at their next step."""
    with eval_ctx(model=model) as ctx:
        for batch in DataLoader(Part(buffer_size=4)):
            output, _ = ctx.forward(batch)
            assert torch.isfinite(output).all()


def train(ctx: TrainCtx) -> None:
    """Train on all batches, as many times as the plan has."""
    loader = DataLoader(DATASETS[PLAN["data"]](buffer_size=4), reproducible=PLAN["reproducible"])
    for _ in range(PLAN["passes"]):
        train_once(ctx, loader)


def train_once(ctx: TrainCtx, loader: DataLoader) -> None:
    """Train one pass."""
    loss_fn = torch.nn.BCEWithLogitsLoss()
    for batch in loader:
        before(batch.step)
        if due("evaluate", batch.step):
            evaluate(ctx.model)
        if rows := PLAN["parts"].get(str(RANK)):
            divided(ctx, batch, rows)
            continue
        output, labels = ctx.forward(batch)
        loss = loss_fn(output, labels[0])
        if due("nan", batch.step):
            loss = loss * float("nan")
        if due("overflow", batch.step):  # the loss is finite, but its scaled gradient is not
            loss = loss * 1e36
        ctx.backward(loss)
        if due("freeze", batch.step):
            wait_until("a heartbeat", lambda: time.monotonic() > STARTED + 2 * control_plane._ALIVE_S, 60)
            os.kill(os.getpid(), signal.SIGSTOP)
        if RANK == 0:
            sys.stderr.write(f"step {batch.step} done\n")


def divided(ctx: TrainCtx, batch: TrainingBatch, rows: int) -> None:
    """Train in micro-batches. Leave some steps in their middle."""
    for part in ctx.micro_batches(batch, rows):
        output, labels = ctx.forward(part)
        leaves = batch.step in PLAN["leave"]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]) * part.share
        if not (leaves and part.is_last):
            ctx.backward(loss)


def save(ctx: TrainCtx, out: str) -> None:
    """Write rows and weights."""
    assert ctx.model is not None
    ids = np.arange(PLAN["ids"], dtype=np.uint64)
    slots = ["weighted", "raw", "stacked"] if PLAN["kinds"] else ["a", "b"]
    wanted = PersiaBatch([IDTypeFeatureWithSingleID(slot, ids) for slot in slots], requires_grad=False)
    rows = [from_dlpack(tensor).numpy() for tensor in ctx.get_embedding_from_data(wanted).embeddings()]
    weights = [parameter.detach().numpy() for parameter in unwrap_model(ctx.model).parameters()]
    names = [*slots, *(f"dense{index}" for index in range(len(weights)))]
    arrays: dict[str, Any] = dict(zip(names, [*rows, *weights], strict=True))
    np.savez(out, **arrays)


def main() -> None:
    """Train as planned."""
    torch.manual_seed(1)
    model = Flat(embeddings=4 + 2 * 5 + 4) if PLAN["kinds"] else TinyModel()
    dense = DENSE[PLAN["dense"]](model.parameters(), lr=0.1)
    config = EmbeddingConfig((-0.1, 0.1))
    optimizer = OPTIMIZERS[PLAN["optimizer"]]
    option = distributed.FSDPOption() if PLAN["parallel"] == "fsdp" else averaged()
    checkpoints = None if PLAN["checkpoints"] is None else Checkpoints(**PLAN["checkpoints"])
    polls = PLAN["spot"] is not None and env.get_local_rank() == 0
    watch = SpotWatch(PLAN["spot"], every_s=0.05) if polls else contextlib.nullcontext()
    with (
        watch,
        TrainCtx(
            optimizer,
            dense,
            mixed_precision=False,
            distributed_option=option,
            model=model,
            embedding_config=config,
            nonfinite=PLAN["nonfinite"],
            clip_norm=PLAN["clip"],
            precision=PLAN.get("precision"),
            checkpoints=checkpoints,
        ) as ctx,
    ):
        if (load := PLAN.get("load")) and (RANK == 0 or load["all"]):
            ctx.load_checkpoint(load["dir"])
        if PLAN["gather"]:
            ctx.gather_model()
            if RANK == 0:
                evaluate(ctx.model)
        train(ctx)
        if (dump := PLAN.get("dump")) and (RANK == 0 or dump["all"]):
            ctx.dump_checkpoint(dump["dir"])
        distributed.agree(True)  # the pushes of every rank are applied
        if RANK == 0 and (out := PLAN.get("out")):
            save(ctx, out)
        if RANK == 0:
            distributed.report({"sizes": ctx.get_embedding_size(), "step": ctx.step})
        weights = sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())).hexdigest()
        peers = distributed.peers()
        all_weights = [weights] if peers is None else peers.all_gather("weights", weights)  # no rank ends earlier
        distributed.report({"equal_weights": len(set(all_weights)) == 1, "skipped": ctx.skipped_steps})
        sent = ctx.comm_stats()["dense_bytes"]
        distributed.report({"dense_bytes": [sent] if peers is None else peers.all_gather("bytes", sent)})


if __name__ == "__main__":
    main()
