"""A ledger run with all its parts. ``Job`` restarts parts as a container engine does.

``Job`` starts NATS, servers, middlewares, a data-compose and the trainers as processes. A killed part is restarted, and
so is a trainer or a data-compose that exits with 75. Any other end is a failure. Every wait uses :meth:`Run.wait`,
which supervises the parts during the wait. ``containers.py`` has the same run in containers.
"""

import json
import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
from links import Link, NatsLink
from stack import TESTS, Part, Stack
from typing_extensions import Self
from waiting import wait_until

from persia.launch.local_job import Kind
from persia.runtime import job as job_files

CHAOS = Path(__file__).parent
TRAIN, DATA = CHAOS / "ledger_train.py", CHAOS / "ledger_data.py"
STACK: dict[str, Any] = {"servers": 2, "middlewares": 2, "slots": "one: {dim: 4}\nmany: {dim: 4}"}
"""The options of a stack for :class:`Job`."""
RANKS = 2

KILLED = {-signal.SIGKILL}
AGAIN = {75, *KILLED}
"""The exit codes after which trainers and data-compose are restarted."""
FAILED = 1
"""The exit code of trainers whose script fails; they are restarted only if the fault makes the script fail."""
BEHIND = "127.0.0.2"
"""The address that parts behind a link announce; they listen on 127.0.0.1."""
HEALTHY_S = 30.0
"""The time after the end of the run in which all checks must succeed."""
UNDER_WAY = 10
"""The number of steps that may still be done after a part is lost, from look-ups made in advance."""
STEP = re.compile(r"step (\d+) done")

Found = TypeVar("Found")


def clock_library() -> Path | None:
    """Return the library that gives a process a separate clock, or None if it is not installed."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


@dataclass(frozen=True)
class Ledger:
    """The result of the run's own comparison of its rows."""

    rows_checked: int
    rows_wrong: int
    wrong: list[str]
    steps: int
    dense: float
    skipped: int = 0


class Run(ABC):
    """A ledger run, the injected faults, and the recovery from them.

    Attributes:
        plan: The plan for ``ledger_train.py``.
        step: The last step of rank 0.
        furthest: The highest step of rank 0.
        injected: The number of faults so far.
        recovered: The number of faults after which training was observed to progress.
        late: The number of faults so close to the end that no step could be observed after them.
        longest_pause_s: The longest time between two successive steps of rank 0.
        first_step_s: The time from the start of the trainers to the first step.
    """

    tick = 0.005
    """Seconds between two checks of the parts."""
    patience = 60.0
    """Seconds in which training must reach a step, or continue after a fault."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.plan = dict(plan)
        self.step = self.furthest = self.injected = self.recovered = self.late = 0
        self.longest_pause_s = self.first_step_s = 0.0
        self._started = time.monotonic()
        self._step_at: float | None = None
        self._marks: list[int] = []

    # --- differences between the kinds of runs

    @abstractmethod
    def start(self) -> Self:
        """Start everything."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether every trainer has ended with exit code 0."""

    @property
    @abstractmethod
    def checkpoints(self) -> Path:
        """The folder in which servers and trainers store checkpoints."""

    @property
    @abstractmethod
    def ledger_file(self) -> Path:
        """The file into which rank 0 writes the result of its comparison."""

    @abstractmethod
    def look_after(self) -> None:
        """Record the steps that were done, and restart parts."""

    @abstractmethod
    def kill(self, name: str) -> None:
        """Send SIGKILL to a part, such as ``server-0``. The part is restarted."""

    @abstractmethod
    def kill_rank(self, rank: int) -> None:
        """Send SIGKILL to a rank. The rank is restarted."""

    @abstractmethod
    def logs(self) -> str:
        """Return the output of every part, without the steps."""

    @abstractmethod
    def close(self) -> None:
        """End everything."""

    # --- steps

    def saw(self, lines: Iterable[str]) -> None:
        """Record the steps that rank 0 has reported."""
        now = time.monotonic()
        for line in lines:
            if not (match := STEP.search(line)):
                continue
            if self._step_at is None:
                self.first_step_s = now - self._started
            else:
                self.longest_pause_s = max(self.longest_pause_s, now - self._step_at)
            self._step_at = now
            self.step = int(match[1])
            self.furthest = max(self.furthest, self.step)
            over = [mark for mark in self._marks if self.step > mark + UNDER_WAY]
            self._marks = [mark for mark in self._marks if mark not in over]
            self.recovered += len(over)

    def note_fault(self) -> None:
        """Count a fault. It counts as recovered when training has progressed."""
        self.look_after()
        self.injected += 1
        self._marks.append(self.furthest)

    # --- waiting

    def wait(self, what: str, condition: Callable[[], Found | None], timeout: float = 60.0) -> Found:
        """Wait until ``condition`` returns a true value, and return it. Supervise the parts until then."""

        def look() -> Found | None:
            ended = self.finished
            self.look_after()
            found = condition()
            assert found or not ended, f"the run ended before {what}\n{self.logs()}"
            return found

        return wait_until(what, look, timeout, evidence=self.logs, interval=self.tick)

    def reach(self, step: int) -> None:
        """Wait until rank 0 has done ``step``, or a later one."""
        self.wait(f"step {step}", lambda: self.furthest >= step, self.patience)

    def recover(self) -> None:
        """Wait until training has progressed beyond every fault."""
        self.wait("training to go on", lambda: not self._marks, self.patience)

    def let_pass(self, seconds: float) -> None:
        """Supervise the parts for this long, or until the run has ended."""
        until = time.monotonic() + seconds
        self.wait("time to pass", lambda: self.finished or time.monotonic() >= until, seconds + 60)

    # --- the end

    def finish(self, timeout: float = 90.0) -> Ledger:
        """Wait for the end of the run and return its result."""
        self.wait("the end of the run", lambda: self.finished, timeout)
        self.look_after()  # steps may have been written after the last read
        self.late = sum(mark + UNDER_WAY >= self.plan["steps"] for mark in self._marks)
        return Ledger(**json.loads(self.ledger_file.read_text()))

    def saves(self) -> Path | None:
        """Return the folder of the run's checkpoints, or None before it is created."""
        return next(self.checkpoints.glob("*/"), None)


class Job(Run):
    """A ledger run whose parts are processes of this host.

    Args:
        stack: The stack, made with :data:`STACK` and not started. For ``links``, it uses TCP.
        plan: The plan for ``ledger_train.py``.
        replicas: Trainer replicas that share the ranks.
        links: Whether to put a :class:`Link` in front of every server and middleware.
        disk: The size of a separate file system for the checkpoints; 0 means none. Needs root.
        twice: A batch that data-compose also sends in place of the one after it.
        link_nats: Whether to put a :class:`NatsLink` in front of NATS.
        clocks: Whether to give each part except NATS a separate clock: :meth:`set_clock`.
    """

    def __init__(
        self,
        stack: Stack,
        plan: Mapping[str, Any],
        *,
        replicas: int = 1,
        links: bool = False,
        disk: int = 0,
        twice: int | None = None,
        link_nats: bool = False,
        clocks: bool = False,
    ) -> None:
        super().__init__(plan)
        self.stack = stack
        self.links: dict[str, Link] = {}
        self._replicas = replicas
        self._with_links = links
        self._twice = twice
        self._link_nats = link_nats
        self._with_clocks = clocks
        self.nats_link: NatsLink | None = None
        self._away: set[str] = set()
        self._past: list[Part] = []
        self._read = 0
        self._mounted: Path | None = None
        self._folder = stack.folder / "ledger"
        self._folder.mkdir()
        self._clocks = stack.folder / "clocks"
        self._clocks.mkdir()
        self._env = {"PYTHONPATH": os.pathsep.join([str(CHAOS), TESTS, os.environ.get("PYTHONPATH", "")])}
        self._may_fail = {FAILED} if "poison" in self.plan else set()
        self._starts: dict[str, Callable[[], object]] = {"nats": self._start_nats}
        for kind, index in self._served():
            self._starts[f"{kind}-{index}"] = partial(self._start_part, kind, index)
        self._starts["data-0"] = self._start_data
        for node in range(replicas):
            self._starts[f"trainer-{node}"] = partial(self._start_trainer, node)
        if disk:
            self._mount(disk)

    # --- the parts

    def start(self) -> Self:
        """Start everything."""
        if self._with_links:
            for kind, index in self._served():
                host, _, port = self.stack.job.address(kind, index).rpartition(":")
                self.links[f"{kind}-{index}"] = Link((BEHIND, int(port)), (host, int(port)))
        for start in self._starts.values():
            start()
        self._started = time.monotonic()
        return self

    def wait_healthy(self) -> None:
        """Wait until every server and middleware is ready to serve."""

        def healthy() -> bool:
            self.look_after()
            return all(self.stack.healthy(kind, index) for kind, index in self._served())

        wait_until("servers and middlewares to be healthy", healthy, HEALTHY_S, evidence=self.logs)

    def _served(self) -> list[tuple[Kind, int]]:
        servers: list[tuple[Kind, int]] = [("server", index) for index in range(self.stack.job.servers)]
        return [*servers, *(("middleware", index) for index in range(self.stack.job.middlewares))]

    def _start_nats(self) -> None:
        self.stack.start_nats()
        if self._link_nats:
            port = int(self.stack.nats_url.rsplit(":", 1)[1])
            if self.nats_link is None:
                self.nats_link = NatsLink((BEHIND, port), ("127.0.0.1", port))
            self.stack.nats_url = f"nats://{BEHIND}:{port}"

    def _start_part(self, kind: Kind, index: int) -> None:
        env = {"PERSIA_ADVERTISE": BEHIND} if self._with_links else {}
        self.stack.start_part(kind, index, env=env | self._clock(f"{kind}-{index}"))

    def _start_data(self) -> None:
        sent = {"count": self.plan["steps"] * RANKS, "twice": self._twice, "poison": self.plan.get("poison")}
        self.stack.data(DATA, json.dumps(sent), env=self._env | self._clock("data-0"))

    def _start_trainer(self, node: int) -> None:
        if node == 0:
            self._read = 0
        ranks = RANKS // self._replicas
        arguments = (str(self._folder), json.dumps(self.plan))
        env = self._env | self._clock(f"trainer-{node}")
        self.stack.trainer(TRAIN, *arguments, ranks=ranks, node=node, nodes=self._replicas, env=env)

    def _clock(self, name: str) -> dict[str, str]:
        """Return the variables that make a part read the time from the file of :meth:`set_clock`."""
        library = clock_library()
        if not self._with_clocks or library is None:
            return {}
        if not (file := self._clocks / name).exists():
            self.set_clock(name, 0)
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",
        }

    def set_clock(self, name: str, seconds: int) -> None:
        """Set the offset of a part's wall clock from the correct time. Its monotonic clock is not changed."""
        fresh = self._clocks / f".{name}"
        fresh.write_text(f"{seconds:+d}\n")
        fresh.replace(self._clocks / name)

    @property
    def parts(self) -> list[str]:
        """The names of the parts of the job."""
        return list(self._starts)

    @property
    def finished(self) -> bool:
        """Whether every trainer has ended with exit code 0."""
        trainers = [self.stack.parts[name] for name in self._starts if name.startswith("trainer")]
        return all(not part.process.running and part.process.code == 0 for part in trainers)

    @property
    def trainer_starts(self) -> int:
        """The number of starts of the replica of rank 0."""
        return 1 + sum(part.process.name == "trainer-0" for part in self._past)

    def rank(self, rank: int) -> psutil.Process:
        """Return the process of a rank."""

        def found() -> psutil.Process | None:
            for name in [name for name in self._starts if name.startswith("trainer")]:
                for child in _children(self.stack.parts[name].process.pid):
                    if _is_rank(child, rank):
                        return child
            return None

        return self.wait(f"a process of rank {rank}", found)

    def look_after(self) -> None:
        """Restart parts that ended and should run. Record the steps that were done."""
        for name, start in self._starts.items():
            if name in self._away:
                continue
            part = self.stack.parts[name]
            running = part.process.running
            if name == "trainer-0":
                self._read_steps(part)
            if running:
                continue
            code, kind = part.process.code, name.partition("-")[0]
            if kind == "trainer" and code == 0:
                continue
            may = {"trainer": self._may_fail | AGAIN, "data": AGAIN}.get(kind, KILLED)
            assert code in may, f"{name} {part.process.outcome()}\n{self.logs()}"
            self._past.append(part)
            start()

    def _read_steps(self, part: Part) -> None:
        lines = part.lines[self._read :]
        self._read += len(lines)
        self.saw(lines)

    def said(self, text: str, name: str = "trainer-0") -> list[str]:
        """Return the lines with ``text`` that a part has written, over all its restarts."""
        parts = [part for part in [*self._past, self.stack.parts[name]] if part.process.name == name]
        return [line for part in parts for line in list(part.lines) if text in line]

    # --- faults

    def kill(self, name: str) -> None:
        """Send SIGKILL to a part. :meth:`look_after` restarts the part."""
        self.note_fault()
        self.stack.kill(name)

    def kill_rank(self, rank: int) -> None:
        """Send SIGKILL to a rank. Its launcher ends with 75 and is restarted."""
        process = self.rank(rank)
        self.note_fault()
        process.kill()

    def take_away(self, name: str) -> None:
        """Send SIGKILL to a part, which is not restarted before :meth:`bring_back`."""
        self._away.add(name)
        self.kill(name)

    def bring_back(self, name: str) -> None:
        """Let :meth:`look_after` restart a part that was taken away."""
        self._away.discard(name)

    def replace(self, name: str) -> Part:
        """Start another process in a part's place, and return the old process without ending it."""
        old = self.stack.parts[name]
        self._past.append(old)
        self._starts[name]()
        return old

    # --- the end

    @property
    def ledger_file(self) -> Path:
        """The file into which rank 0 writes the result of its comparison."""
        return self._folder / "ledger.json"

    @property
    def generation(self) -> int:
        """The generation in which the run ended."""
        summary = job_files.finished_summary(self.stack.folder / "run")
        assert summary is not None, "no summary"
        return int(summary["generation"])

    @property
    def checkpoints(self) -> Path:
        """The folder in which servers and trainers store checkpoints."""
        return Path(self.stack.settings["PERSIA_CKPT_DIR"])

    def logs(self) -> str:
        """Return the output of every part, without the steps."""
        parts = [*self._past, *self.stack.parts.values()]
        return "\n".join(
            line
            for part in parts
            for line in (f"--- {part.process.name}", *(line for line in list(part.lines) if not STEP.search(line)))
        )

    def close(self) -> None:
        """End everything."""
        for part in self._past:
            if part.process.running:
                part.process.signal(signal.SIGKILL)
                part.wait()
        self.stack.close()
        for link in [*self.links.values(), *filter(None, [self.nats_link])]:
            link.close()
        if self._mounted is not None:
            subprocess.run(["umount", self._mounted], check=True)

    def _mount(self, size: int) -> None:
        folder = self.checkpoints
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        self._mounted = folder


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _is_rank(process: psutil.Process, rank: int) -> bool:
    try:
        return "persia.launch.rank_main" in process.cmdline() and process.environ().get("RANK") == str(rank)
    except psutil.NoSuchProcess:
        return False
