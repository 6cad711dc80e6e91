"""A short run in one process, and one on a server with a log. Later versions resume ``tests/data/upgrade/VERSION``.

All numbers that torch computes are exact, so the rows are the same with every version of torch and on every processor.
``python tests/upgrade_job.py`` writes the files of this version; ``make upgrade-data`` runs it.
"""

import hashlib
import json
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import stack
import torch
from torch.utils.dlpack import from_dlpack

import persia
from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad

VERSIONS = Path(__file__).parent / "data" / "upgrade"
SAVED, STEPS = 5, 12
"""The step of the checkpoint, and the last step."""
IDS, SAMPLES = 6, 8
CAPACITY = 1000
SLOTS = """\
a: {dim: 4}
b: {dim: 4, dtype: f16, rounding: stochastic, admission: {min_count: 2}, ttl: 3}
"""
JOB = "upgrade"
KEPT = ("servers", "checkpoints", "run")
"""The folders of a job on this host that an upgrade keeps."""


class Fixed(IterableDataset):
    """Batches that are computed from their number. A state dict continues them."""

    def __init__(self) -> None:
        super().__init__(buffer_size=2)
        self.next = 0

    def __iter__(self) -> Iterator[PersiaBatch]:
        while self.next < STEPS:
            self.next += 1
            yield batch(self.next)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches yielded."""
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the batches that were yielded."""
        self.next = state_dict["next"]


def batch(number: int) -> PersiaBatch:
    """Return batch ``number``."""
    samples = np.arange(SAMPLES, dtype=np.uint64)
    single = (samples * 5 + number * 7) % IDS
    lists = [np.arange(number * sample % 3, dtype=np.uint64) * 2 % IDS for sample in range(SAMPLES)]
    label = ((samples * number) % 4).astype(np.float32)[:, None] / 4
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("a", single), IDTypeFeature("b", lists)],
        [NonIDTypeFeature(np.ones((SAMPLES, 1), np.float32))],
        [Label(label)],
    )


class Exact(torch.nn.Module):
    """The sum of all embeddings and a bias. Gradients are sums of labels, which are multiples of 1/4."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return ``[batch, 1]``."""
        return torch.cat(embedding_tensors, 1).sum(1, keepdim=True) + self.bias


def configure(folder: Path) -> dict[str, str]:
    """Write the configuration files and return their variables."""
    embedding, general = folder / "embedding_config.yml", folder / "global_config.yml"
    embedding.write_text("slots_config:\n" + textwrap.indent(SLOTS, "  "))
    general.write_text(f"embedding_parameter_server_config: {{capacity: {CAPACITY}}}\n")
    return {"PERSIA_EMBEDDING_CONFIG": str(embedding), "PERSIA_GLOBAL_CONFIG": str(general)}


def train(run: Path | str, *, until: int = STEPS) -> tuple[int, str]:
    """Train from the newest checkpoint in ``run``, if any. Return the first step and a digest of the rows."""
    model = Exact()
    dense = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    rows = Adagrad(lr=0.0625, initial_accumulator_value=0.25)
    with TrainCtx(
        rows,
        dense,
        mixed_precision=False,
        model=model,
        embedding_config=EmbeddingConfig((-0.5, 0.5)),
        checkpoints=Checkpoints(run, every=SAVED),
    ) as ctx:
        start = ctx.step
        for each in DataLoader(Fixed(), reproducible=True) if start < until else ():
            output, labels = ctx.forward(each)
            ctx.backward((output * labels[0]).sum())
            if ctx.step == until < STEPS:
                break
        ids = np.arange(IDS, dtype=np.uint64)
        all_ids = PersiaBatch([IDTypeFeatureWithSingleID(slot, ids) for slot in "ab"], requires_grad=False)
        tensors = [*map(from_dlpack, ctx.get_embedding_from_data(all_ids).embeddings()), model.bias.detach()]
        content = b"".join(tensor.float().numpy().tobytes() for tensor in tensors)
        return start, hashlib.sha256(content).hexdigest()


def options() -> dict[str, Any]:
    """Return the options of the job's :class:`stack.Stack`: a server that syncs each record of its log."""
    return {"slots": SLOTS, "capacity": CAPACITY, "log": "always", "job": JOB}


def interrupted(run: Path | str) -> str:
    """Train a little further than the checkpoint, and return the digest of the checkpoint."""
    torch.manual_seed(7)  # the seed of the rows; a resumed run uses the seed of its checkpoint
    train(run, until=SAVED + 2)  # a step is saved when the next one begins
    start, saved = train(run, until=SAVED)
    assert start == SAVED, start
    return saved


def write() -> None:
    """Write the files of this version, and the digests of the uninterrupted run.

    Raises:
        FileExistsError: The files exist. They are written once, before the version is released.
    """
    folder = VERSIONS / persia.__version__
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(configure(Path(scratch)))
        saved = interrupted(Path(scratch, "run"))
        torch.manual_seed(7)
        _, trained = train(Path(scratch, "whole"))
        shutil.copytree(Path(scratch, "run"), folder / "run")
        job = stack.Stack(Path(scratch, "job"), **options())
        try:
            os.environ.update(job.start().settings)
            torch.manual_seed(7)
            train("run", until=SAVED + 2)
            job.kill("server-0")  # the log has the pushes of the steps after the checkpoint
        finally:
            job.close()
        for name in KEPT:
            if (job.folder / name).exists():
                shutil.copytree(job.folder / name, folder / "job" / name, ignore=shutil.ignore_patterns("lock"))
    (folder / "expected.json").write_text(json.dumps({"saved": saved, "trained": trained}, indent=1) + "\n")


if __name__ == "__main__":
    write()
