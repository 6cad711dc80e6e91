"""What limits a run on servers: a slow server, a staleness of 1, a slow rank."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stack import MakeStack, Part

from persia.profile import advice, report

SCRIPT = """
import sys
import time

import torch
from conftest import Batches, TinyModel

from persia import env
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD
from persia.profile import Profiler
from persia.profile.profiler import Schedule

folder, staleness, slow_rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Model(TinyModel):
    def forward(self, non_id_tensors, embedding_tensors):
        time.sleep(0.05 if env.get_rank() == slow_rank else 0)
        return super().forward(non_id_tensors, embedding_tensors)


model = Model()
dense = torch.optim.SGD(model.parameters(), 0.1)
with TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model) as ctx, Profiler(folder, ctx, Schedule(4, 1, 20)):
    for batch in DataLoader(Batches(30), embedding_staleness=staleness):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
"""


@contextmanager
def slowed(server: Part, stopped_s: float = 0.04, runs_s: float = 0.004) -> Iterator[None]:
    """Let a server run for a tenth of the time only."""
    end = threading.Event()

    def pulse() -> None:
        while not end.is_set():
            server.process.signal(signal.SIGSTOP)
            end.wait(stopped_s)
            server.process.signal(signal.SIGCONT)
            end.wait(runs_s)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.row("S4-62", "S3-19")
def test_each_bottleneck_gets_an_advice_of_its_own(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def advised(name: str, staleness: int, *, slow_rank: int = -1, ranks: int = 1) -> advice.Advice:
        env = {"PERSIA_RUN_DIR": str(tmp_path / name)}
        arguments = (str(tmp_path / f"{name}-profile"), str(staleness), str(slow_rank))
        trainer = stack.trainer(script, *arguments, ranks=ranks, env=env)
        assert trainer.wait(120) == 0, trainer.output
        return advice.advise(report.read(tmp_path / f"{name}-profile"))

    with slowed(stack.parts["server-0"]):
        lookup, push = advised("server", 8), advised("staleness", 1)
    ranks = advised("rank", 8, slow_rank=1, ranks=2)
    assert lookup.limit == "lookup" and "--servers" in lookup.text, str(lookup)
    assert push.limit == "push" and "train.staleness from 1" in push.text, str(push)
    assert (ranks.limit, ranks.rank) == ("ranks", 1) and "in dense" in ranks.text, str(ranks)
