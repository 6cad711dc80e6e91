"""Moments of a ledger run at which a fault can be injected."""

import glob
import random
from pathlib import Path

from supervisor import Job, Run


def some_step(job: Run, rng: random.Random, low: float = 0.1, high: float = 0.4) -> None:
    """Wait for a step in this range of the run."""
    steps = job.plan["steps"]
    job.reach(rng.randrange(int(steps * low), int(steps * high)))


def a_save(job: Job) -> None:
    """Wait until a save begins."""
    before = set(staging(job))
    job.wait("a save", lambda: set(staging(job)) - before)


def staging(job: Run) -> list[Path]:
    """Return the folders in which saves are being written."""
    # pathlib's function fails if a folder is removed in the meantime.
    found = glob.iglob("*/step-*/.saving-*", root_dir=job.checkpoints)  # noqa: PTH207
    return [job.checkpoints / path for path in found]


def further(job: Job, steps: int) -> None:
    """Wait until this many more steps are done."""
    job.reach(job.furthest + steps)
