"""Records steps of a training loop: the time of each stage, and a trace for TensorBoard and Perfetto."""

import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from persia.profile.servers import Servers
from persia.profile.stages import difference
from persia.runtime import files, flight
from persia.runtime.errors import StorageError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

_logger = get_logger("profile")

FOLDER = "profile"
"""The folder for a profile, inside a run's folder."""
MEMORY = "memory.txt"
"""The suffix of the file with the operations that allocate most."""
_OPERATIONS = 20
"""The number of operations in this file."""
SPAN = "persia: "
"""The prefix of the names of persia's spans in a trace."""


@dataclass(frozen=True)
class Schedule:
    """The selection of steps to record.

    Attributes:
        wait: The number of steps at the start that are not recorded.
        warmup: The number of following steps in which torch's profiler runs but its results are discarded.
        active: The number of steps that are recorded.
        stack: Whether to record the Python stack of each operation in the trace, which slows down the steps.
        memory: Whether to also record which operations allocate memory.
    """

    wait: int = 5
    warmup: int = 5
    active: int = 20
    stack: bool = False
    memory: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: A value is out of range.
        """
        if self.wait < 0 or self.warmup < 0 or self.active < 1:
            raise UsageError(
                f"profile: wait={self.wait}, warmup={self.warmup}, active={self.active}: wait and warmup must be at "
                "least 0, active at least 1"
            )


class Profiler:
    """Records the training loop inside its ``with`` block.

    ::

        with TrainCtx(...) as ctx, Profiler("profile", ctx):
            for batch in loader:
                ...

    The class writes ``rank-N.json`` with the times of the recorded steps, and ``rank-N.pt.trace.json``, which
    TensorBoard (with the folder as ``--logdir``) and Perfetto can open. With ``Schedule(memory=True)``,
    ``rank-N.memory.txt`` lists the operations that allocate most. Each rank replaces its files of an earlier profile.

    Args:
        folder: The folder for the files.
        ctx: The context of the loop; None omits the times of the engine.
        schedule: The selection of steps to record.
        facts: Additional content of ``rank-N.json``, such as settings that the advice mentions.

    Raises:
        StorageError: The folder cannot be created, or a file of an earlier profile cannot be removed.
    """

    def __init__(
        self,
        folder: str | Path,
        ctx: Any = None,
        schedule: Schedule | None = None,
        *,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._ctx = ctx
        self._schedule = schedule or Schedule()
        self._facts = dict(facts or {})
        self._steps = 0  # the number of steps that the loop has run inside the block
        self._times = _Times()
        self._spans: dict[int, Any] = {}
        self._engine: dict[str, Any] = {}  # the seconds of the engine's stages at the start of the recording
        self._servers: Servers | None = None  # rank 0 reads the metrics of servers
        self._kineto: Any = None
        self._written = False
        try:
            files.make_folders(self.folder.absolute())
            for path in map(self._path, ("json", "pt.trace.json", MEMORY)):
                # Remove the files of an earlier profile, which must not be mistaken for those of this profile.
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write the profile to {self.folder}: {error.strerror}") from error

    def __enter__(self) -> Self:
        plan = self._schedule
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(wait=plan.wait, warmup=plan.warmup, active=plan.active, repeat=1)
        self._kineto = torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self._export,
            with_stack=plan.stack,
            profile_memory=plan.memory,
        )
        self._kineto.__enter__()
        if settings.nats_url is not None and settings.rank == 0:
            self._servers = Servers.find()
        if plan.wait + plan.warmup == 0:
            self._begin()
        flight.observe(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        flight.unobserve(self)
        if self._times.active:
            self._end()
        if self._kineto is not None:
            kineto, self._kineto = self._kineto, None
            kineto.__exit__(kind, value, trace)
        if not self._written and kind is None:
            plan = self._schedule
            _logger.warning(
                "profile: no step was recorded. Steps of the loop: %d; steps at the start that are not recorded: %d "
                "(profile.wait=%d, profile.warmup=%d); next: train more steps, or lower these two numbers",
                self._steps,
                plan.wait + plan.warmup,
                plan.wait,
                plan.warmup,
            )

    def begun(self, call: flight.Call) -> None:
        """Open the span of a call of the training loop."""
        if self._kineto is not None and call.thread == threading.get_ident():
            span: Any = torch.profiler.record_function(f"{SPAN}{call.verb}")
            span.__enter__()
            self._spans[id(call)] = span

    def ended(self, call: flight.Call) -> None:
        """Close the span, and add its time."""
        span = self._spans.pop(id(call), None)
        if span is not None:
            span.__exit__(None, None, None)
        self._times.add(call)

    def stepped(self, step: int) -> None:
        """Count a step, and record it if the schedule selects it."""
        self._steps += 1
        plan = self._schedule
        skipped = plan.wait + plan.warmup
        if self._times.active:
            self._times.step(step)
        if self._kineto is not None:
            self._kineto.step()
        if self._steps == skipped:
            self._begin()
        elif self._steps == skipped + plan.active:
            self._end()

    def apart(self) -> None:
        """Exclude the time since the last step."""
        self._times.restart()

    def _begin(self) -> None:
        self._times.active = True
        self._times.restart()
        self._engine = self._engine_seconds()
        if self._servers is not None:
            self._servers.begin()

    def _end(self) -> None:
        """Write the times of this rank."""
        self._times.active = False
        if not self._times.walls or self._written:
            return
        engine = difference(self._engine_seconds(), self._engine)
        content = {
            "rank": settings.rank,
            "world_size": settings.world_size,
            "servers": settings.nats_url is not None,
            **self._times.as_dict(),
            "engine": {name: round(each, 6) for name, each in engine.items()},
            **self._facts,
        }
        if self._servers is not None:
            content["of_servers"] = self._servers.end()
        content.setdefault("staleness", self._staleness())
        path = self._path("json")
        try:
            files.write_whole(path, json.dumps(content, indent=1).encode() + b"\n")
        except OSError as error:
            raise StorageError(f"cannot write the profile to {path}: {error.strerror}") from error
        self._written = True

    def _path(self, ending: str) -> Path:
        return self.folder / f"rank-{settings.rank}.{ending}"

    def _engine_seconds(self) -> dict[str, Any]:
        return {} if self._ctx is None else dict(self._ctx.engine.stats()["seconds"])

    def _staleness(self) -> int:
        """Return the observed K: one more than the maximum number of steps that were in flight at a look-up."""
        return 1 if self._ctx is None else 1 + int(self._ctx.engine.stats()["max_staleness"])

    def _export(self, kineto: Any) -> None:
        """Write the trace. A failure does not end the training."""
        path = self._path("pt.trace.json")
        try:
            kineto.export_chrome_trace(str(path))
            if self._schedule.memory:
                path = self._path(MEMORY)
                files.write_whole(path, _memory_table(kineto).encode())
        except (OSError, RuntimeError) as error:
            _logger.error("profile: cannot write %s: %s; training continues without this file", path, error)


def _memory_table(kineto: Any) -> str:
    """Return the operations that allocate most, as text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    averages = kineto.key_averages()
    return str(averages.table(sort_by=f"self_{device}_memory_usage", row_limit=_OPERATIONS)) + "\n"


class _Times:
    """The times of the recorded steps.

    Attributes:
        active: Whether steps are currently recorded.
        walls: The duration of each step, in seconds.
    """

    def __init__(self) -> None:
        self.active = False
        self.walls: list[float] = []
        self._steps: list[int] = []
        self._verbs: dict[str, list[float]] = {}  # seconds of each call, per step
        self._now: dict[str, float] = {}
        self._mark = 0.0

    def restart(self) -> None:
        self._mark, self._now = time.perf_counter(), {}

    def add(self, call: flight.Call) -> None:
        if self.active and call.counted:
            self._now[call.verb] = self._now.get(call.verb, 0.0) + call.seconds

    def step(self, step: int) -> None:
        wall = time.perf_counter() - self._mark
        for verb in {*self._verbs, *self._now}:
            seconds = self._verbs.setdefault(verb, [0.0] * len(self.walls))
            seconds.append(self._now.get(verb, 0.0))
        self.walls.append(wall)
        self._steps.append(step)
        self.restart()

    def as_dict(self) -> dict[str, Any]:
        whole = sum(self.walls)
        verbs = {verb: summary(seconds, whole) for verb, seconds in self._verbs.items()}
        others = [wall - sum(each[place] for each in self._verbs.values()) for place, wall in enumerate(self.walls)]
        return {
            "steps": [self._steps[0], self._steps[-1]],
            "seconds": round(whole, 6),
            "step": summary(self.walls, whole),
            "calls": {**verbs, "other": summary([max(0.0, each) for each in others], whole)},
        }


def summary(seconds: list[float], whole: float) -> dict[str, float]:
    """Return count, sum, share of ``whole``, and the 50th and 99th percentile (nearest rank) in milliseconds."""
    return {
        "count": len(seconds),
        "seconds": round(sum(seconds), 6),
        "share": round(sum(seconds) / whole, 4) if whole else 0.0,
        "p50_ms": round(1e3 * percentile(seconds, 0.5), 3),
        "p99_ms": round(1e3 * percentile(seconds, 0.99), 3),
    }


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
