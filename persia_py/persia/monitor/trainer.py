"""The counters of the calls and steps of a rank, which Prometheus reads."""

import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import psutil
import torch
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from persia.monitor import memory
from persia.monitor.exporter import Exported, Exporter
from persia.monitor.series import TRAINER, Durations, Families
from persia.profile.stages import STAGES, stages
from persia.runtime import flight
from persia.runtime.settings import settings
from persia_core.engine import Engine

_SIDE = (flight.READ, flight.WRITE)
"""Calls of threads other than that of the training loop."""


class Trained(Protocol):
    """The training context whose values are read at a scrape."""

    @property
    def engine(self) -> Engine:
        """The engine of the context."""

    @property
    def device_id(self) -> int | None:
        """The CUDA device."""

    @property
    def samples(self) -> int:
        """The number of samples in the steps so far."""

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss of the last step."""

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradient in the last step."""

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because of NaN or infinity."""


class Saved(Protocol):
    """The checkpoints of a run, as :class:`persia.ctx.Checkpoints`.

    Attributes:
        every: The number of steps between two checkpoints.
        written: The step of the newest written checkpoint, or of that from which the run was resumed; 0 if there is
            none.
        failed: The number of checkpoints that were abandoned.
    """

    every: int
    written: int
    failed: int


class TrainerMetrics(Collector):
    """The metrics of this rank.

    A step only updates counters, in the thread of the training loop. A scrape computes the other values.

    One object serves all contexts of a process, one after another.
    """

    def __init__(self) -> None:
        self._ctx: weakref.ref[Any] | None = None
        self._steps = self._last = 0
        self._step_durations = Durations()
        self._call_durations: dict[str, Durations] = {}
        self._mark: float | None = None  # the time at which the last step ended; None before the first loop
        self._whole = 0.0
        self._now: dict[str, float] = {}  # seconds of each call since the last step ended
        self._in_steps: dict[str, float] = {}
        self._staleness = 1
        self._parameters = (0, 0)
        self._checkpoints: Saved | None = None
        self._written = (0, 0.0)  # the step of the last checkpoint, and the seconds of steps when it was written
        self._recovery: float | None = None
        self._lock = threading.Lock()  # guards the values that are kept between scrapes
        self._taken: tuple[float, dict[str, float], dict[str, float]] = (0.0, {}, {})
        self._stages = dict.fromkeys(STAGES, 0.0)
        self._before = (0, 0)  # samples and skipped steps of earlier contexts

    # --- Called by the context

    def open(self, ctx: Trained, checkpoints: Saved | None) -> None:
        """Read the values of a context from now on.

        Args:
            ctx: The context.
            checkpoints: The checkpoints that this process writes; None if it writes none.
        """
        with self._lock:
            self._ctx, self._checkpoints = weakref.ref(ctx), checkpoints
            self._written = 0, self._whole

    def close(self, ctx: Trained) -> None:
        """Keep the counters of a context that ends, after a scrape that is reading them has ended."""
        with self._lock:
            samples, skipped = self._before
            self._before = samples + ctx.samples, skipped + ctx.skipped_steps
            self._ctx = self._checkpoints = None

    def begin_loop(self, staleness: int, step: int, model: torch.nn.Module | None) -> None:
        """Start measuring the time of steps.

        Args:
            staleness: The staleness K.
            step: The last trained step.
            model: The model, whose weights on this rank are counted.
        """
        self._staleness, self._last = staleness, step
        weights = [] if model is None else [*model.parameters()]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in weights]
        self._parameters = (
            sum(each.numel() for each in local),
            sum(each.numel() * each.element_size() for each in local),
        )
        self.apart()

    # --- Called by the flight recorder

    def begun(self, call: flight.Call) -> None:
        """Do nothing, because a call counts when it has ended."""

    def ended(self, call: flight.Call) -> None:
        """Count a call."""
        if not call.counted and call.verb not in _SIDE:
            return
        seconds = call.seconds
        durations = self._call_durations.get(call.verb)
        if durations is None:
            durations = self._call_durations[call.verb] = Durations()
        durations.add(seconds)
        if call.counted:
            self._now[call.verb] = self._now.get(call.verb, 0.0) + seconds

    def stepped(self, step: int) -> None:
        """Count a step."""
        now = time.monotonic()
        self._steps += 1
        self._last = step
        if self._recovery is None:
            self._recovery = time.time() - psutil.Process().create_time()
        if self._mark is not None:
            spent = now - self._mark
            self._step_durations.add(spent)
            self._whole += spent
            for verb, seconds in self._now.items():
                self._in_steps[verb] = self._in_steps.get(verb, 0.0) + seconds
        self._mark, self._now = now, {}
        self._look_for_checkpoint()

    def apart(self) -> None:
        """Exclude the time since the last step."""
        self._mark, self._now = time.monotonic(), {}

    # --- Called by a scrape

    def collect(self) -> Iterable[Metric]:
        """Return the current values."""
        found = Families(("rank", str(settings.rank)))
        add, series = found.add, TRAINER
        with self._lock:
            ctx: Trained | None = None if self._ctx is None else self._ctx()
            add(series["step"], self._last)
            add(series["steps"], self._steps)
            add(series["step_duration_seconds"], self._step_durations)
            for verb, durations in {**self._call_durations}.items():
                add(series["call_duration_seconds"], durations, verb.replace(" ", "_").replace("-", "_"))
            for name, value in zip(("parameters", "parameter_bytes"), self._parameters, strict=True):
                add(series[name], value)
            if self._recovery is not None:
                add(series["recovery_duration_seconds"], self._recovery)
            self._add_checkpoints(found)
            self._add_context(found, ctx)
        return found

    def _look_for_checkpoint(self) -> None:
        """Record the time of a checkpoint that has been written since the last call."""
        checkpoints = self._checkpoints
        if checkpoints is not None and checkpoints.written != self._written[0]:
            self._written = checkpoints.written, self._whole

    def _add_checkpoints(self, found: Families) -> None:
        if self._checkpoints is None:
            return
        self._look_for_checkpoint()
        step, at = self._written
        found.add(TRAINER["checkpoint_age_seconds"], self._whole - at)
        found.add(TRAINER["checkpoint_interval_steps"], self._checkpoints.every)
        found.add(TRAINER["checkpoint_failures"], self._checkpoints.failed)
        if step > 0:
            found.add(TRAINER["checkpoint_step"], step)

    def _add_context(self, found: Families, ctx: Trained | None) -> None:
        samples, skipped = self._before
        seconds: dict[str, float] = {}
        if ctx is not None:
            samples, skipped = samples + ctx.samples, skipped + ctx.skipped_steps
            seconds = self._add_engine(found, ctx.engine)
            for name, value in (("loss", ctx.loss), ("grad_norm", ctx.grad_norm)):
                if value is not None:
                    found.add(TRAINER[name], float(value))
            for kind, value in memory.device(ctx.device_id).items():
                found.add(TRAINER["device_memory_bytes"], value, kind)
            for kind, value in memory.whole_device(ctx.device_id).items():
                found.add(TRAINER["device_bytes"], value, kind)
        found.add(TRAINER["samples"], samples)
        found.add(TRAINER["skipped_steps"], skipped)
        self._add_stages(found, seconds)

    def _add_engine(self, found: Families, engine: Engine) -> dict[str, float]:
        """Add the statistics of the engine, and return the seconds of its stages."""
        stats = engine.stats(tables=False)
        found.add(TRAINER["generation"], engine.generation)
        found.add(TRAINER["staleness"], stats["staleness"])
        found.add(TRAINER["staleness_limit"], self._staleness)
        for stage, value in stats["seconds"].items():
            found.add(TRAINER["engine_seconds"], value, stage)
        for slot, kinds in stats["slots"].items():
            for kind, value in kinds.items():
                found.add(TRAINER["ids"], value, slot, kind)
        for outcome, value in stats["lookups"].items():
            found.add(TRAINER["lookup_rows"], value, outcome)
        for outcome, value in stats["pushes"].items():
            found.add(TRAINER["push_rows"], value, outcome.removeprefix("rows_"))
        return dict(stats["seconds"])

    def _add_stages(self, found: Families, engine: dict[str, float]) -> None:
        """Add the stages of the steps since the last scrape to the earlier ones."""
        now = self._whole, {**self._in_steps}, engine
        whole, calls, spent = self._taken
        self._taken = now
        since = stages(_since(now[1], calls), now[0] - whole, _since(engine, spent), staleness=self._staleness)
        for stage, seconds in since.items():
            self._stages[stage] += seconds
            found.add(TRAINER["stage_seconds"], self._stages[stage], stage)


def _since(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return the difference to the previous values, or ``now`` if a value has decreased because the engine is new."""
    found = {name: value - before.get(name, 0.0) for name, value in now.items()}
    return found if all(value >= 0 for value in found.values()) else now


_exported = Exported(TrainerMetrics)


def start() -> tuple[TrainerMetrics, Exporter] | None:
    """Return the metrics of this rank and their port; see :meth:`Exported.start`."""
    is_new = _exported.own is None
    exported = _exported.start(f"trainer-{settings.rank}", settings.place.local_rank)
    if is_new and exported is not None:
        flight.observe(exported[0])
    return exported
