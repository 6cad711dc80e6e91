"""The script of ranks with servers in the tests of the debugger: two loops, each with a breakpoint."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import Batches, TinyModel

from persia import env
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.debug import breakpoint_
from persia.embedding.optim import SGD

STEPS = 8
FAILS = sys.argv[1:] == ["fails"]


def check(number: int) -> None:
    """Fail in the third step of rank 1."""
    if FAILS and number == 3 and env.get_rank() == 1:
        raise ValueError("as the test wants")


def train(ctx: TrainCtx, *, reproducible: bool) -> None:
    """Make a pass with a breakpoint in the third step, between look-up and push."""
    batches = Batches(STEPS, seed=env.get_rank())
    loader = DataLoader(
        batches, reproducible=reproducible, embedding_staleness=None if reproducible else 4, timeout_ms=2000
    )
    for number, batch in enumerate(loader, 1):
        output, labels = ctx.forward(batch)
        check(number)
        if number == 3 and not FAILS:
            breakpoint_()
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))


def main() -> None:
    """Train without and with a fixed order of requests."""
    torch.manual_seed(1)
    model = TinyModel()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model) as ctx:
        for reproducible in (False, True):
            train(ctx, reproducible=reproducible)


if __name__ == "__main__":
    main()
