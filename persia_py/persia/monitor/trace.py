"""Traces of steps by OpenTelemetry: the spans of the training loop of every N-th step.

With ``OTEL_EXPORTER_OTLP_ENDPOINT``, every ``PERSIA_TRACE_EVERY``-th step is traced. Rust code records the spans of the
engine, of middlewares and of servers. It also sends the spans of this module.
"""

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from persia.monitor import exporter
from persia.runtime import flight
from persia.runtime.settings import settings
from persia_core import trace as core
from persia_core.engine import Engine

_Recorded = tuple[str, float, float, int | None, str]
"""A call: verb, start and end in Unix seconds, index of the enclosing call, class of the error that ended it."""


class Trained(Protocol):
    """The training context whose steps are traced."""

    @property
    def engine(self) -> Engine:
        """The engine of the context."""


class StepSpans:
    """An observer of the flight recorder that records the calls of the training loop in traced steps.

    Args:
        every: The interval between traced steps.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._ctx: weakref.ref[Any] | None = None
        self._thread = 0
        self._mark = 0.0  # the time at which the last step ended
        self._traces = False  # whether the next step is traced
        self._calls: list[flight.Call] = []  # calls of the training loop in the next step
        self._reads: dict[int, flight.Call] = {}  # calls of the thread that reads ahead, by step

    def open(self, ctx: Trained) -> None:
        """Record the steps of a context from now on."""
        self._ctx = weakref.ref(ctx)

    def begin_loop(self, step: int) -> None:
        """Begin a training loop in this thread, after ``step``."""
        self._thread = threading.get_ident()
        self._expect(step + 1)

    def close(self) -> None:
        """Stop recording, and send the pending spans, for at most 5 s."""
        flight.unobserve(self)
        self._ctx = None
        core.stop()

    def _expect(self, step: int) -> None:
        self._traces = step % self._every == 0
        self._mark, self._calls = time.monotonic(), []

    # --- Called by the flight recorder

    def begun(self, call: flight.Call) -> None:
        """Do nothing, because a call is recorded when it has ended."""

    def ended(self, call: flight.Call) -> None:
        """Keep a call of a traced step."""
        if self._traces and call.thread == self._thread:
            self._calls.append(call)
        elif call.verb == flight.READ and call.step is not None and call.step % self._every == 0:
            self._reads[call.step] = call

    def stepped(self, step: int) -> None:
        """Record a step, if it is traced."""
        read = self._reads.pop(step, None)
        ctx: Trained | None = None if self._ctx is None else self._ctx()
        if self._traces and ctx is not None:
            calls = self._calls if read is None else [*self._calls, read]
            to_unix = time.time() - (now := time.monotonic())
            core.record_step(ctx.engine, step, self._mark + to_unix, now + to_unix, [*recorded(calls, to_unix)])
        self._expect(step + 1)

    def apart(self) -> None:
        """Exclude the time since the last step from the trace of the next step."""
        self._mark, self._calls = time.monotonic(), []


def recorded(calls: list[flight.Call], to_unix: float) -> Iterator[_Recorded]:
    """Yield the ended calls in the form that ``record_step`` takes.

    Args:
        calls: The calls, in the order of their ends. A call therefore precedes the call that encloses it.
        to_unix: The Unix time, in seconds, at which ``time.monotonic`` is 0.
    """
    for own, call in enumerate(calls):
        later = enumerate(calls[own + 1 :], own + 1)
        around = (index for index, each in later if each.thread == call.thread and each.began <= call.began)
        ended = call.began + call.seconds
        yield call.verb, call.began + to_unix, ended + to_unix, next(around, None), call.error


_own: StepSpans | None = None


def start() -> StepSpans | None:
    """Return a recorder of this rank's steps.

    Return None without a collector, if ``PERSIA_TRACE_EVERY`` is 0, or if a recorder is already active.

    Raises:
        ConfigError: A variable of OpenTelemetry has a value that cannot be used.
        UsageError: ``PERSIA_TRACE_EVERY`` is not an integer of at least 0.
    """
    global _own
    every = settings.trace_every
    if _own is not None or every == 0 or not core.start(settings.rank, exporter.run_id(), every):
        return None
    _own = StepSpans(every)
    flight.observe(_own)
    return _own


def stop(spans: StepSpans | None) -> None:
    """Close a recorder, if it exists."""
    global _own
    if spans is not None:
        _own = None
        spans.close()
