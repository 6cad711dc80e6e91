"""The script of the ranks in the tests of the debugger. Its first argument names a part of it."""

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from waiting import wait_until

from persia.debug import breakpoint_, clear_, digest, record

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IMPATIENT = timedelta(seconds=1)
"""The time limit of a collective, as the script asks for it."""


def say(text: str) -> None:
    """Print a line without buffering."""
    sys.stdout.write(f"[{RANK}] {text}\n")
    sys.stdout.flush()


def added(value: int) -> int:
    """Return a sum."""
    value += 1
    return value


def one(passed: Path) -> None:
    """Stop one rank, which arrives last. The others continue to the barrier."""
    if RANK == 1:
        wait_until("rank 0 to run on", passed.exists, 60)
    value = 40
    breakpoint_()
    value = added(value)
    value += 1
    say(f"one {value}")
    passed.touch()
    distributed.barrier()


def two(late: Path) -> None:
    """Let the debugged rank arrive last."""
    if RANK == 1:
        wait_until("the test to let rank 1 come", late.exists, 60)
    breakpoint_(False)
    say("two")
    distributed.barrier()


def three() -> None:
    """Stop at a breakpoint that is continued without clear_()."""
    breakpoint_(False)
    say("three")
    distributed.barrier()


def framed() -> None:
    """Stop before a line at which a test sets a breakpoint of pdb."""
    breakpoint_(False)
    later = "later"
    say(f"framed {later}")


def four() -> None:
    """Leave the frame of a breakpoint."""
    framed()
    say("four")
    distributed.barrier()


def five() -> None:
    """Stop where a digest has the given value."""
    for step in range(5):
        x = torch.full((3,), float(step))
        breakpoint_(when=digest("x") == digest(torch.full((3,), 3.0)))
        say(f"five {step} {x[0]:g}")
    distributed.barrier()


def six() -> None:
    """End all ranks."""
    breakpoint_(False)
    say("six")
    distributed.barrier()


def tour(late: str) -> None:
    """Every kind of breakpoint, one after another."""
    say(f"arguments {json.dumps(sys.argv[1:])}")
    distributed.init_process_group("gloo", timeout=IMPATIENT)
    one(Path(late).with_name("passed"))
    two(Path(late))
    three()
    four()
    five()
    six()


def plain() -> None:
    """One breakpoint of each kind, without a collective."""
    breakpoint_()
    say("first")
    breakpoint_(False)
    say("second")


def grouped() -> None:
    """A breakpoint of all ranks of a process group."""
    distributed.init_process_group("gloo")
    breakpoint_(False)
    say("passed")
    distributed.barrier()
    distributed.destroy_process_group()


def recorded() -> None:
    """Record digests of a loop without TrainCtx."""
    import pdb_utils  # type: ignore[import-not-found]  # the launcher adds the folder of this module to PYTHONPATH

    assert pdb_utils.breakpoint_ is breakpoint_ and pdb_utils.clear_ is clear_
    for step in range(1, 5):
        record(step, x=torch.full((2,), float(step)))


def endless() -> None:
    """Wait forever."""
    breakpoint_()
    say("endless")
    threading.Event().wait()


def broken(depth: int) -> None:
    """Fail on one rank."""
    secret = f"depth {depth}"
    if RANK == WORLD - 1:
        raise ValueError(f"wrong {secret}")


def failing() -> None:
    """Fail on the last rank while the others wait for it."""
    distributed.init_process_group("gloo", timeout=IMPATIENT)
    breakpoint_(False)
    broken(7)
    distributed.barrier()


def crashing() -> None:
    """Crash in C on rank 0 while rank 1 runs in the background."""
    distributed.init_process_group("gloo")
    distributed.barrier()
    if RANK == 0:
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    distributed.barrier()


PARTS: dict[str, Callable[..., None]] = {
    "tour": tour,
    "plain": plain,
    "grouped": grouped,
    "endless": endless,
    "recorded": recorded,
    "failing": failing,
    "crashing": crashing,
}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:3])
