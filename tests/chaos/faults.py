"""The faults by name. Each fault disturbs a running ledger job at a step that a seed chooses.

``run("F3", 7, new_stack)`` starts a job, injects the fault, waits for the job's end and returns the result of the
ledger. The seed determines the steps and the victims. Timing determines the point within a step.
"""

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import containers
import pyarrow
import pyarrow.ipc
import scarce
import torch
from moments import a_save, further, some_step, staging
from stack import Stack
from supervisor import RANKS, STACK, Job, Ledger, Run, clock_library

from persia_core import checkpoint

SILENT = "silent for"
STORM_S = 60.0
"""The default duration of a storm."""
STORM_STEPS, STORM_STEPS_IN_CONTAINERS = 60, 40
"""Steps of the run for each second of its storm."""
PLAN: dict[str, Any] = {"steps": 400, "every": 50}
"""The default plan of the ledger."""
SAVING: dict[str, Any] = {"steps": 120, "every": 4}
"""The plan of faults that hit a save."""
DISK = 24 << 20
"""The size in bytes of the disk that is filled."""
TRY_S = 3
"""Seconds that one attempt of a look-up or push may take over links: a quarter of the PERSIA_RPC_TIMEOUT of the job."""

NEEDS: dict[str, Callable[[], bool]] = {
    "root": lambda: os.geteuid() == 0,
    "root and iptables": lambda: os.geteuid() == 0 and shutil.which("iptables") is not None,
    "libfaketime": lambda: clock_library() is not None,
}
"""The requirements of faults, and whether they are met."""

NewStack = Callable[..., Stack]


@dataclass(frozen=True)
class Record:
    """The result of a run with a fault; ``runs/chaos.json`` is a list of these."""

    fault: str
    seed: int
    injected: int
    recovered: int
    longest_pause_s: float
    rows_checked: int
    rows_wrong: int


@dataclass(frozen=True)
class Fault:
    """A fault, and the job into which it is injected.

    Attributes:
        what: Its description in the table.
        inject: The function that injects it.
        goes_on: Whether training must continue. If so, trainers do not restart, and the generation stays the first.
        plan: Entries of the ledger's plan in addition to :data:`PLAN`.
        job: The arguments of :class:`supervisor.Job`.
        stack: The arguments of the job's :class:`stack.Stack`.
        containers: Whether the job is the compose stack: :class:`containers.Containers`.
        needs: A requirement for this machine, one of :data:`NEEDS`.
    """

    what: str
    inject: Callable[[Any, random.Random], None]
    goes_on: bool = False
    plan: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    stack: Mapping[str, Any] = field(default_factory=dict)
    containers: bool = False
    needs: str = ""

    def missing(self) -> str | None:
        """Return the reason why the fault cannot be injected here, or None."""
        if self.containers and (reason := containers.missing()):
            return reason
        return f"it needs {self.needs}" if self.needs and not NEEDS[self.needs]() else None


def server(job: Job, rng: random.Random) -> None:
    some_step(job, rng)
    job.kill(f"server-{rng.randrange(2)}")


def server_in_save(job: Job, rng: random.Random) -> None:
    some_step(job, rng)
    victim = f"server-{rng.randrange(2)}"
    a_save(job)
    job.kill(victim)


def servers(job: Job, rng: random.Random) -> None:
    """Kill a random server three times, the first time when a save begins."""
    some_step(job, rng)
    a_save(job)
    for _ in range(3):
        job.kill(f"server-{rng.randrange(2)}")
        job.recover()
        further(job, rng.randrange(30, 60))


def middleware_in_save(job: Job, rng: random.Random) -> None:
    """Kill the two middlewares in turn when saves begin. Repeat this, because a save may end before the kill."""
    some_step(job, rng)
    for number in range(5):
        a_save(job)
        job.kill(f"middleware-{number % 2}")
        job.recover()


def middleware(job: Job, rng: random.Random) -> None:
    for part in range(3):
        some_step(job, rng, 0.1 + part / 4, 0.2 + part / 4)
        job.kill(f"middleware-{rng.randrange(2)}")
        job.recover()


def no_middleware(job: Job, rng: random.Random) -> None:
    """Stop all middlewares for longer than a request may take."""
    some_step(job, rng)
    both = ("middleware-0", "middleware-1")
    for name in both:
        job.take_away(name)
    job.wait("the trainers to give up", lambda: job.said("is lost to this run"))
    for name in both:
        job.bring_back(name)
    job.recover()


def nats(job: Job, rng: random.Random) -> None:
    """Restart NATS, which stores nothing on disk and therefore forgets all processes."""
    some_step(job, rng)
    job.take_away("nats")
    further(job, 150)
    job.bring_back("nats")
    further(job, 50)


def messages(job: Job, rng: random.Random) -> None:
    """Restart parts while a fifth of NATS's messages is lost, a fifth is sent twice and a fifth is late."""
    link = job.nats_link
    assert link is not None
    some_step(job, rng)
    link.disturb(0.2, rng.randrange(2**32))
    for name in (f"middleware-{rng.randrange(2)}", f"middleware-{rng.randrange(2)}", f"server-{rng.randrange(2)}"):
        job.kill(name)
        job.recover()
        further(job, rng.randrange(10, 30))
    assert link.lost and link.twice and link.late, (link.lost, link.twice, link.late)


def rank(job: Job, rng: random.Random) -> None:
    some_step(job, rng)
    job.kill_rank(rng.randrange(2))


def hang(job: Job, rng: random.Random) -> None:
    """Suspend a rank and its launcher, as on a frozen host, start another process in its place, and resume them."""
    some_step(job, rng)
    process = job.rank(1)
    job.note_fault()
    process.suspend()
    job.stack.parts["trainer-1"].process.signal(signal.SIGSTOP)
    job.wait("the other rank to miss it", lambda: job.said(SILENT))
    old = job.replace("trainer-1")
    job.recover()
    old.process.signal(signal.SIGCONT)
    process.resume()
    job.wait("the old rank to end", lambda: not old.process.running)
    assert old.process.code != 0, old.output
    assert "belongs to another run: the current generation is" in old.output, old.output


def data(job: Job, rng: random.Random) -> None:
    some_step(job, rng)
    job.kill("data-0")


def partition(job: Job, rng: random.Random) -> None:
    """Delay messages to or from a middleware or a server for longer than one attempt may take.

    The delayed messages arrive after their senders have sent them again.
    """
    for name in (f"middleware-{rng.randrange(2)}", f"server-{rng.randrange(2)}"):
        further(job, rng.randrange(30, 120))
        job.note_fault()
        job.links[name].hold(rng.choice(("requests", "replies")))
        job.let_pass(float(TRY_S) * rng.uniform(1.2, 1.6))
        job.links[name].heal()
        job.recover()


def reset(job: Job, rng: random.Random) -> None:
    for _ in range(5):
        further(job, rng.randrange(20, 70))
        job.note_fault()
        rng.choice(sorted(job.links.items()))[1].reset()
        job.recover()


def disk_full(job: Job, rng: random.Random) -> None:
    job.wait("the first save", lambda: (saves := job.saves()) is not None and checkpoint.latest(saves) is not None)
    some_step(job, rng)
    filler = job.checkpoints / "filler"
    job.note_fault()
    fill(filler)
    job.wait("a save to be given up", lambda: job.said("abandoned, training continues"))
    assert job.said("failed, retrying in"), "no warning"
    newest = newest_save(job)
    problems = {Path(each["path"]): each["problem"] for each in checkpoint.listing(newest.parent)}
    assert problems[newest] is None, problems
    filler.unlink()
    job.wait("the next save", lambda: newest_save(job) != newest)


def kills(job: Run, rng: random.Random) -> list[Callable[[], None]]:
    """Return a kill for each kind of part."""
    return [
        lambda: job.kill("nats"),
        lambda: job.kill(f"server-{rng.randrange(2)}"),
        lambda: job.kill(f"middleware-{rng.randrange(2)}"),
        lambda: job.kill("data-0"),
        lambda: job.kill_rank(rng.randrange(2)),
    ]


def poison(job: Job, rng: random.Random) -> None:
    """Let training always fail at one batch of one rank. The plan names the batch."""
    del rng
    step, rank = job.plan["poison"] // RANKS + 1, job.plan["poison"] % RANKS
    for times in ("1st", "2nd", "3rd"):
        text = f"step {step} failed on rank {rank} for the {times} time"
        job.wait("the batch to fail", partial(job.said, text), job.patience + 30)
        job.note_fault()
    job.wait("the step to be left out", lambda: job.said(f"step {step} skipped"), job.patience)
    job.recover()
    saves = job.saves()
    assert saves is not None
    kept = sorted(path.name for path in (saves / "poison").iterdir())
    assert kept == [f"step-{step}.rank-{rank}{suffix}" for suffix in (".batch", ".json")], kept
    assert job.trainer_starts == 4, f"the trainers were started {job.trainer_starts} times\n{job.logs()}"


def everything(job: Job, rng: random.Random) -> None:
    each = kills(job, rng)
    rng.shuffle(each)
    for kill in each:
        further(job, rng.randrange(10, job.plan["steps"] // 8))
        kill()
        job.recover()


def storm(job: Run, rng: random.Random) -> None:
    """Kill random parts. The mean interval is three times the longest pause so far, or the time to the first step."""
    until = time.monotonic() + job.plan["storm_s"]
    victims = kills(job, rng)
    job.reach(1)
    while True:
        job.let_pass(
            min(rng.expovariate(1 / (3 * max(job.first_step_s, job.longest_pause_s))), until - time.monotonic())
        )
        if job.finished or time.monotonic() >= until:
            return
        rng.choice(victims)()


FAULTS: dict[str, Fault] = {
    "F1": Fault("server killed while a checkpoint is saved", server_in_save, plan=SAVING),
    "F2": Fault("server killed in mid-training", server),
    "F2l": Fault("server with a log killed, three times", servers, goes_on=True, stack={"log": "always"}),
    "F1m": Fault(
        "middleware killed while a checkpoint is saved, five times", middleware_in_save, goes_on=True, plan=SAVING
    ),
    "F3": Fault("middleware killed, three times", middleware, goes_on=True),
    "F3a": Fault("all middlewares down for longer than a request may take", no_middleware, job={"links": True}),
    "F4": Fault("NATS killed, and back with nothing", nats, goes_on=True),
    "F5": Fault("NATS loses, doubles and reorders messages while parts are killed", messages, job={"link_nats": True}),
    "F6": Fault("rank killed", rank),
    "F7": Fault("rank stopped, replaced, and woken", hang, plan={"silence_s": 8.0}, job={"replicas": 2}),
    "F8": Fault("data-compose killed", data, goes_on=True),
    "F9": Fault("link held up in one direction", partition, goes_on=True, job={"links": True}),
    "F10": Fault("200 ms latency on every link, then 1 Mbit/s", scarce.slow, goes_on=True, job={"links": True}),
    "F10l": Fault(
        "one packet in twenty lost", scarce.lossy, goes_on=True, job={"links": True}, needs="root and iptables"
    ),
    "F12": Fault("checkpoint disk full", disk_full, goes_on=True, job={"disk": DISK}, needs="root"),
    "F20": Fault(
        "clocks hours apart that jump, while parts are killed", scarce.clocks, job={"clocks": True}, needs="libfaketime"
    ),
    "F22": Fault("server out of its container's memory", scarce.memory, containers=True),
    "F23": Fault("server and middleware out of descriptors", scarce.descriptors, goes_on=True, job={"links": True}),
    "F24": Fault("ten other busy processes on each processor", scarce.starved, goes_on=True),
    "F26": Fault("storm: anything killed at any time", storm),
    "F26l": Fault("the same storm, servers with logs", storm, stack={"log": "every_second"}),
    "F26d": Fault("the same storm on the compose stack", storm, containers=True),
    "F30": Fault(
        "a batch at which training always fails, left out after three times", poison, plan={"steps": 150, "every": 10}
    ),
    "reset": Fault("connections reset, five times", reset, goes_on=True, job={"links": True}),
    "equal": Fault("five parts killed, reproducible run", everything, plan={"bits": True, "reproducible": True}),
    "equall": Fault(
        "the same, servers with logs",
        everything,
        plan={"bits": True, "reproducible": True},
        stack={"log": "every_second"},
    ),
}


def run(name: str, seed: int, new_stack: NewStack, seconds: float = STORM_S) -> tuple[Record, str | None]:
    """Run a job through a fault.

    Args:
        name: One of :data:`FAULTS`.
        seed: Determines the steps and the victims.
        new_stack: Creates a stack from options of :class:`stack.Stack`, without starting it.
        seconds: The duration of a storm.

    Returns:
        The result, and its problem, which is None if there is no problem.
    """
    fault = FAULTS[name]
    plan = {**PLAN, **fault.plan}
    if fault.inject is storm:
        pace = STORM_STEPS_IN_CONTAINERS if fault.containers else STORM_STEPS
        plan |= {"storm_s": seconds, "steps": int(seconds * pace)}
    if fault.inject is poison:
        batches = plan["steps"] * RANKS
        plan |= {"poison": random.Random(seed).randrange(batches // 5, batches * 4 // 5)}
    job = new_job(fault, plan, new_stack)
    checked = wrong = 0
    problem: str | None = None
    try:
        job.start()
        fault.inject(job, random.Random(seed))
        ledger = job.finish(seconds + 2 * job.patience)
        checked, wrong = ledger.rows_checked, ledger.rows_wrong
        check(job, fault, ledger)
        if plan.get("bits"):
            checked, wrong, problem = compare_bits(job, fault, plan, new_stack)
    except AssertionError as error:
        problem = str(error)
    finally:
        job.close()
    record = Record(name, seed, job.injected, job.recovered, round(job.longest_pause_s, 2), checked, wrong)
    return record, problem


def new_job(fault: Fault, plan: Mapping[str, Any], new_stack: NewStack) -> Run:
    """Return the job of a fault, not started."""
    if fault.containers:
        return containers.Containers(plan)
    options = {**STACK, "tcp": True, "env": {"PERSIA_RPC_TIMEOUT": str(4 * TRY_S)}} if "links" in fault.job else STACK
    return Job(new_stack(**options, **fault.stack), plan, **fault.job)


def check(job: Run, fault: Fault, ledger: Ledger) -> None:
    """Check the conditions at the end of every run."""
    assert not ledger.rows_wrong, f"{ledger.rows_wrong} rows are wrong: {ledger.wrong}\n{job.logs()}"
    assert ledger.steps == job.plan["steps"], f"{ledger.steps} steps, want {job.plan['steps']}"
    skipped = int("poison" in job.plan)
    assert ledger.skipped == skipped, f"{ledger.skipped} steps were left out, want {skipped}"
    if not job.plan.get("bits"):
        trained = ledger.steps - skipped
        assert ledger.dense == -trained, f"dense weight {ledger.dense}, want {-trained}"
    assert not staging(job), f"left behind: {staging(job)}"
    if isinstance(job, Job):
        job.wait_healthy()
    assert job.injected > job.late, "nothing was done to the run before its end"
    assert job.recovered + job.late == job.injected, (
        f"{job.injected} faults, {job.late} of them at the end, {job.recovered} recoveries"
    )
    if fault.goes_on:
        assert isinstance(job, Job)
        assert job.trainer_starts == 1, f"the trainers were started {job.trainer_starts} times\n{job.logs()}"
        assert job.generation == 1, f"generation {job.generation}, want 1"


def compare_bits(job: Run, fault: Fault, plan: Mapping[str, Any], new_stack: NewStack) -> tuple[int, int, str | None]:
    """Compare the last checkpoint with an undisturbed run's. Return the rows, those that differ, and the problem."""
    twin = new_job(fault, plan, new_stack)
    try:
        twin.start().finish()
        ours, theirs = newest_save(job), newest_save(twin)
        assert ours.name == theirs.name == f"step-{plan['steps']}", (ours, theirs)
        shards = sorted(path.name for path in theirs.glob("shard-*.arrow"))
        assert shards == sorted(path.name for path in ours.glob("shard-*.arrow"))
        pairs = [pair for name in shards for pair in zip_longest(rows(ours / name), rows(theirs / name))]
        different = sum(one != other for one, other in pairs)
        files = [name for name in shards if (ours / name).read_bytes() != (theirs / name).read_bytes()]
        one, other = (torch.load(folder / "dense.pt", weights_only=True) for folder in (ours, theirs))
        assert one.keys() == other.keys()
        files += [f"{name} in dense.pt" for name in one if not torch.equal(one[name], other[name])]
        return len(pairs), different, f"different: {', '.join(files)}" if files else None
    finally:
        twin.close()


def newest_save(job: Run) -> Path:
    """Return the newest intact save of a run."""
    folder = job.saves()
    newest = None if folder is None else checkpoint.latest(folder)
    assert newest is not None, "no save"
    return Path(newest)


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a shard file."""
    with pyarrow.ipc.open_file(path) as file:
        content: list[dict[str, Any]] = file.read_all().to_pylist()
    return content


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
