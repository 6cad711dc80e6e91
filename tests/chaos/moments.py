"""Moments of a ledger run to do something in."""

import glob
import random
from pathlib import Path

from supervisor import Job, Run


def some_step(job: Run, rng: random.Random, low: float = 0.1, high: float = 0.4) -> None:
    """Wait for a step in this part of the run."""
    steps = job.plan["steps"]
    job.reach(rng.randrange(int(steps * low), int(steps * high)))


def a_save(job: Job) -> None:
    """Wait for the moment in which a save begins."""
    before = set(staging(job))
    job.wait("a save", lambda: set(staging(job)) - before)


def staging(job: Run) -> list[Path]:
    """Return where saves are being written."""
    # pathlib's fails where a folder goes meanwhile.
    found = glob.iglob("*/step-*/.saving-*", root_dir=job.checkpoints)  # noqa: PTH207
    return [job.checkpoints / path for path in found]


def further(job: Job, steps: int) -> None:
    """Wait until so many more steps are done."""
    job.reach(job.furthest + steps)
