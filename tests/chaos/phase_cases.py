"""The table of faults and phases, and the case that a seed selects from one of its cells.

Each seed determines one case: its cell, the moment in the phase, the victim, the duration of the fault, the data, the
policy of the tables, and the kind of job. ``SEEDS=1-N`` with N cells has each cell once.
"""

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phase_data import TABLES, Data
from phase_faults import FAULTS, Fault, disk_of
from phase_job import PhaseJob

PHASES = ("before", "restored", "loop", "between", "evaluation", "save", "publish", "serving", "end")
"""Before the first loop; between a restore and a loop; in a loop; between two loops; in an evaluation; in a save and
its commit; while a model is published; while it is served and reloaded; after the last step."""

ELSEWHERE = {
    "publish": "a process that is no part of the job exports a bundle: tests/unit/test_bundle.py",
    "serving": "a process that is no part of the job serves a bundle: tests/unit/test_serving_faults.py",
}
"""Phases without cells: why, and where their faults are tested."""

MOMENTS: dict[str, tuple[str, ...]] = {
    "before": ("start", "entered"),
    "restored": ("entered", "loaded"),
    "loop": ("forward", "backward"),
    "between": ("left", "evaluated"),
    "evaluation": ("0", "1", "2"),
    "save": ("due", "cut", "written", "committed"),
    "end": ("trained", "left", "finishing", "finished"),
}
"""The moments of a phase, in the order of the run."""

CELLS = [(fault, phase) for fault in FAULTS for phase in PHASES if phase not in ELSEWHERE]
"""The cells of the table: each fault in each phase that has cells."""


def _shuffled(cells: list[tuple[str, str]]) -> list[tuple[str, str]]:
    random.Random(9).shuffle(cells)
    return cells


_LATER = {"delay rank", "delay rank 0"}
"""Faults whose cells come last, because the seeds of the other cells were already recorded."""
_ORDER = [
    *_shuffled([cell for cell in CELLS if cell[0] not in _LATER]),
    *_shuffled([cell for cell in CELLS if cell[0] in _LATER]),
]

TRY_S = 3
"""The time limit in seconds of one attempt of a request in a job with links."""
SILENCE_S = 8.0
"""Seconds after which a silent rank counts as lost."""
BIG = 1 << 20
"""The capacity of a shard that never has to evict rows."""


@dataclass(frozen=True)
class Case:
    """The case that a seed determines.

    Attributes:
        seed: The seed that determines the case.
        fault: Key of :data:`FAULTS`.
        phase: One of :data:`PHASES`.
        gate: The point at which the fault begins: phase, moment, step and rank. With ``hold``, the rank waits at the
            gate, so the fault hits this moment. Without ``hold``, the fault hits a running loop some steps later.
        during: Whether the gate opens when the fault has begun. Otherwise, it opens when the fault has ended.
        length: The duration of the fault in seconds.
        amount: The delay of a message or of a sync in seconds.
        victim: The index of the victim among equivalent parts.
        also: The part or rank that is killed when its disk is lost; empty if there is none.
        log: When the log of the servers is synced; None means that there is no log.
        plan: The plan for ``phase_train.py``.
        data: The data that is trained on.
    """

    seed: int
    fault: str
    phase: str
    gate: dict[str, Any]
    during: bool
    length: float
    amount: float
    victim: int
    also: str
    log: str | None
    plan: dict[str, Any]
    data: Data

    @property
    def what(self) -> Fault:
        """The fault."""
        return FAULTS[self.fault]

    @property
    def target(self) -> str:
        """The kind of target of the fault."""
        return self.what.target

    @cached_property
    def rank(self) -> int | None:
        """The rank that is the target, or is on the machine of the target."""
        if self.target in {"rank", "rank 0"}:
            return int(self.target == "rank")
        return int(self.also.removeprefix("rank-")) if self.also.startswith("rank") else None

    @cached_property
    def part(self) -> str:
        """The name of the part that is the target, or is on the machine of the target; empty if there is none."""
        names = {
            "server": f"server-{self.victim}",
            "middleware": "middleware-0",
            "data-compose": "data-0",
            "NATS": "nats",
        }
        return names.get(self.target, self.also)

    def folder(self, job: PhaseJob) -> Path:
        """Return the folder of the disk that is the target."""
        return disk_of(self.target, job.stack.folder, self.victim)

    @property
    def links(self) -> bool:
        """Whether the fault needs proxies in front of servers and middlewares."""
        return self.what.kind in {"cut", "delay", "duplicate"}

    @property
    def text(self) -> str:
        """The case in one line."""
        at = " ".join(f"{key} {value}" for key, value in self.gate.items() if value is not None)
        kind = "reproducible" if self.data.ordered else f"staleness {self.plan['staleness']}"
        return (
            f"{self.fault} ({self.part or self.rank}{', ' + self.also if self.also else ''}) at {at}, "
            f"{'during' if self.during else 'before it goes on'}, {self.length:.1f} s; log {self.log}, {kind}, "
            f"data by {self.plan['source']}, restore {self.plan['restore']}, every {self.plan['every']}, "
            f"stop {self.plan['stop']} of {self.data.steps}, budget {self.data.budget}, "
            f"min_count {list(self.data.min_counts.values())}, ttl {list(self.data.ttls.values())}"
        )


def cell_of(seed: int) -> tuple[str, str]:
    """Return the cell of a seed, which is 1 or higher. Consecutive seeds have unrelated cells."""
    return _ORDER[(seed - 1) % len(_ORDER)]


def case_of(seed: int) -> Case:
    """Return the case of a seed."""
    fault, phase = cell_of(seed)
    kind, target = FAULTS[fault].kind, FAULTS[fault].target
    rng = random.Random(seed)
    flies = phase == "loop" and rng.random() < 0.5
    steps, every = rng.randrange(70, 90) if flies else rng.randrange(18, 27), rng.randrange(4, 7)
    stop = rng.randrange(steps - 10 if flies else every + 1, steps - 4)
    source = "own" if rng.random() < 0.3 and target != "data-compose" else "stream"
    restore = rng.choice(["restart", "load"] if source == "own" else ["restart"]) if phase == "restored" else None
    moment = {"restart": "entered", "load": "loaded"}[restore] if restore else rng.choice(MOMENTS[phase])
    data = _data(rng, steps)
    plan = {
        "every": every,
        "stop": stop,
        "source": source,
        "restore": restore,
        "staleness": 1 if data.ordered else rng.randrange(1, 9),
        "silence_s": SILENCE_S,
        "data": data.plan(),
    }
    gate = {
        "phase": phase,
        "moment": moment,
        "step": _step(rng, phase, steps // 3 if flies else steps, every),
        "rank": 0 if phase in {"save", "end"} or moment == "loaded" else rng.choice([0, 0, 1]),
        "hold": not flies,
    }
    plan["gate"] = gate
    disk = kind in {"full", "slow"}
    victim = rng.randrange(2)
    log = rng.choice(["always", "every_second"]) if target == "log" or rng.random() < 0.3 else None
    return Case(
        seed=seed,
        fault=fault,
        phase=phase,
        gate=gate,
        during=disk or rng.random() < 0.5,
        length=_length(rng, kind),
        amount=rng.uniform(0.02, 0.2),
        victim=victim,
        also=_also(rng, kind, target, victim),
        log=log,
        plan={**plan, "steps": steps},
        data=data,
    )


def _data(rng: random.Random, steps: int) -> Data:
    ordered = rng.random() < 0.7
    return Data(
        seed=rng.randrange(1 << 30),
        steps=steps,
        ordered=ordered,
        budget=rng.choice([1, 1, 2, 3, BIG]) if ordered else BIG,
        min_counts={table: rng.choice([1, 2, 2, 3]) for table in TABLES},
        ttls={table: rng.choice([0, 3, 5, 8]) if ordered else 0 for table in TABLES},
    )


def _step(rng: random.Random, phase: str, steps: int, every: int) -> int | None:
    """Return the step of the gate; None means the first time that its phase is reached."""
    if phase == "loop":
        return rng.randrange(1, steps + 1)
    if phase == "save":
        saves: list[int] = [*range(every, steps, every), steps]
        return rng.choice(saves)
    return None


def _length(rng: random.Random, kind: str) -> float:
    """Return the duration of a fault. One freeze, cut or similar fault in four lasts longer than :data:`SILENCE_S`."""
    if kind in {"kill", "lost"}:
        return 0.0
    if kind == "duplicate":
        return TRY_S * rng.uniform(1.2, 1.6)
    return rng.uniform(10.0, 16.0) if rng.random() < 0.25 else rng.uniform(0.2, 2.5)


def _also(rng: random.Random, kind: str, target: str, victim: int) -> str:
    """Return the part or rank that is killed together with its disk, if any."""
    if kind != "lost":
        return ""
    server = f"server-{victim}"
    return {
        "checkpoints": rng.choice(["", server, "rank-0"]),
        "log": server,
        "run": rng.choice(["", "rank-0", "rank-1"]),
    }[target]


def table() -> list[tuple[str, str, str]]:
    """Return each cell of fault and phase with its seeds, or with the reason why it has no case."""
    first = {cell_of(seed): seed for seed in range(len(CELLS), 0, -1)}
    return [
        (fault, phase, ELSEWHERE.get(phase) or f"seed {first[fault, phase]} and every {len(CELLS)}th after it")
        for fault in FAULTS
        for phase in PHASES
    ]
