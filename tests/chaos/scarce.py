"""Faults of the machines: insufficient bandwidth, processors, descriptors and memory, and wrong clocks."""

import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from containers import Containers
from links import Link
from moments import further, some_step
from supervisor import BEHIND, Job

_BUSY = 10
"""Busy processes for each processor."""
_STRANGERS = 32
"""The number of connections that occupy a part."""
_HOUR_S = 3600


def slow(job: Job, rng: random.Random) -> None:
    """Give each link a round-trip time of 200 ms, then a bandwidth of 1 Mbit/s."""
    some_step(job, rng)
    for name, value in (("delay_s", 0.1), ("bytes_per_s", 125_000.0)):
        job.note_fault()
        usual = getattr(Link, name)
        for link in job.links.values():
            setattr(link, name, value)
        further(job, 20)
        for link in job.links.values():
            setattr(link, name, usual)


def lossy(job: Job, rng: random.Random) -> None:
    """Drop one in twenty packets from and to every server and middleware."""
    some_step(job, rng)
    job.note_fault()
    with ExitStack() as losing:
        for way in ("-d", "-s"):
            losing.enter_context(_losing(way, BEHIND))
        further(job, 100)


@contextmanager
def _losing(way: str, address: str) -> Iterator[None]:
    rule = ["INPUT", "-p", "tcp", way, address, "-m", "statistic", "--mode", "random", "--probability", "0.05"]
    subprocess.run(["iptables", "-I", *rule, "-j", "DROP"], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-D", *rule, "-j", "DROP"], check=True)


def starved(job: Job, rng: random.Random) -> None:
    """Share every processor with ten busy processes."""
    some_step(job, rng)
    job.note_fault()
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(_BUSY * (os.cpu_count() or 1))]
    try:
        further(job, 40)
    finally:
        for each in busy:
            each.kill()
            each.wait()


def descriptors(job: Job, rng: random.Random) -> None:
    """Let a part open only two more files, reset its connections, and let unauthenticated peers connect first."""
    for kind in ("server", "middleware"):
        further(job, rng.randrange(20, 60))
        name = f"{kind}-{rng.randrange(2)}"
        job.note_fault()
        pid = job.stack.parts[name].process.pid
        usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, usual[1]))
        with ExitStack() as strangers:
            for _ in range(_STRANGERS):
                strangers.enter_context(socket.create_connection(job.links[name].far))
            job.links[name].reset()
            job.wait("descriptors to run out", partial(job.said, "cannot accept a connection", name))
        job.recover()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)


def clocks(job: Job, rng: random.Random) -> None:
    """Let the clock of each part except NATS jump by an hour. Then kill and restart parts whose clocks are behind."""
    some_step(job, rng)
    for name in [name for name in job.parts if name != "nats"]:
        job.note_fault()
        job.set_clock(name, rng.choice((-_HOUR_S, _HOUR_S)))
        further(job, 10)
    for kind in ("server", "middleware"):
        name = f"{kind}-{rng.randrange(2)}"
        job.set_clock(name, -_HOUR_S)  # by its clock, the restarted part starts before its predecessor did
        job.kill(name)
        job.recover()
        further(job, 10)


def memory(job: Containers, rng: random.Random) -> None:
    """Fill the memory of a server's container, so the system kills the server."""
    job.reach(rng.randrange(job.plan["steps"] // 4))
    job.exhaust_memory(f"server-{rng.randrange(2)}")
    job.recover()
