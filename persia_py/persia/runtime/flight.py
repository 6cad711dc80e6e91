"""The flight recorder of a process: its last calls, for the report of a hang, for statistics and for a profile.

A call is a wait for data, a look-up, a forward or backward pass, a push, a collective, an agreement of ranks, or a
checkpoint. The recorder is always on. Recording a call takes one to two microseconds: it adds an object to a ring,
without a lock.

Only the calls of the training loop's thread, from the start of the first loop on, are added to :func:`totals`. Calls
inside another call are not added.
"""

import itertools
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self

from persia.runtime import files, job
from persia.runtime.errors import PersiaError
from persia.runtime.logging import context, next_step
from persia.runtime.settings import settings

CALLS = 1024
"""The number of calls that are kept."""

DATA_WAIT, LOOK_UP, FORWARD, BACKWARD = "data wait", "look-up", "forward", "backward"
ALL_REDUCE, AGREEMENT, COLLECTIVE = "all-reduce", "agreement", "collective"
PUSH, OPTIMIZER, CHECKPOINT = "push", "optimizer", "checkpoint"
READ, WRITE = "read", "checkpoint write"
"""The verbs of the threads that read ahead and write checkpoints. All other verbs are those of the training loop."""
TOGETHER = (ALL_REDUCE, AGREEMENT, COLLECTIVE)
"""The verbs in which every rank waits for the others."""


class Observer(Protocol):
    """An observer of calls. Its methods run in the thread of the observed call."""

    def begun(self, call: "Call") -> None:
        """Called when a call begins."""

    def ended(self, call: "Call") -> None:
        """Called when a call has ended."""

    def stepped(self, step: int) -> None:
        """Called when the training loop has completed a step."""

    def apart(self) -> None:
        """Called to exclude the time since the last step, which was spent on other work, such as an evaluation."""


class Call:
    """A recorded call, used as a context manager around the call.

    Attributes:
        verb: The kind of call, one of the verbs of this module.
        step: The step to which the call belongs; None if there is none.
        detail: The subject of the call, such as the topic of an agreement.
        thread: The id of the thread that made the call.
        began: The time at which it began, in seconds of ``time.monotonic``.
        ended: The time at which it ended; None while it is running.
        error: The class of the exception that ended it; empty if there was none.
        counted: Whether it counts in :func:`totals`: the loop's thread made it after the first loop had started, and
            not inside another call.
    """

    __slots__ = ("began", "counted", "detail", "ended", "error", "step", "thread", "verb")

    def __init__(self, verb: str, step: int | None = None, detail: str = "", *, of_loop: bool = False) -> None:
        """Prepare the call; recording starts on entry.

        Args:
            verb: The kind of the call.
            step: The step of the call.
            detail: The subject of the call, such as a topic.
            of_loop: Whether the training loop waits for this call, even if another thread begins it.
        """
        self.verb, self.step, self.detail = verb, step, detail
        self.thread = _state.loop_thread if of_loop else threading.get_ident()
        self.began = 0.0
        self.ended: float | None = None
        self.error = ""
        self.counted = False

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        if self.thread == _state.loop_thread:
            self.counted = _state.has_begun and not _state.open
            _state.open.append(self)
        if self.verb in TOGETHER:
            _state.together += 1
        _state.calls.append(self)
        for observer in _state.observers:
            observer.begun(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended = time.monotonic()
        if kind is not None:
            self.error = kind.__name__
        if self in _state.open:
            del _state.open[_state.open.index(self) :]  # also removes a nested call that an exception has left open
            if self.counted:
                _state.seconds[self.verb] = _state.seconds.get(self.verb, 0.0) + self.seconds
                _state.counts[self.verb] = _state.counts.get(self.verb, 0) + 1
        for observer in _state.observers:
            observer.ended(self)

    @property
    def seconds(self) -> float:
        """The duration of the call so far, in seconds."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    def as_dict(self) -> dict[str, Any]:
        """Return the call as a dictionary for JSON. Times are seconds before now."""
        now = time.monotonic()
        return {
            "verb": self.verb,
            "step": self.step,
            "detail": self.detail,
            "thread": "loop" if self.thread == _state.loop_thread else _thread_name(self.thread),
            "state": self.error or ("open" if self.ended is None else "done"),
            "began_s_ago": round(now - self.began, 6),
            "seconds": round(self.seconds, 6),
        }


collectives: Callable[[], str | None] | None = None
"""Returns the last collectives of torch's flight recorder as JSON. This variable is set if NCCL is in use."""


class _State:
    """The recorder of this process."""

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=CALLS)
        self.open: list[Call] = []  # open calls of the loop's thread, innermost last
        self.loop_thread = threading.main_thread().ident or 0
        self.has_begun = False
        self.together = 0
        self.step = 0
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.observers: tuple[Observer, ...] = ()
        self.folder: Path | None = None


_state = _State()


def begin_loop(step: int) -> None:
    """Record that a training loop starts in this thread, after ``step``."""
    _state.loop_thread, _state.step, _state.has_begun = threading.get_ident(), step, True
    context["step"] = step
    _state.open.clear()


def stepped(step: int) -> None:
    """Record that the training loop has completed a step. Later log lines have its number."""
    _state.step = context["step"] = step
    for observer in _state.observers:
        observer.stepped(step)


def apart() -> None:
    """Record that the time since the last step was spent outside the training loop."""
    for observer in _state.observers:
        observer.apart()


def observe(observer: Observer) -> None:
    """Call ``observer`` for every call from now on."""
    _state.observers = (*_state.observers, observer)


def unobserve(observer: Observer) -> None:
    """Stop calling ``observer``."""
    _state.observers = tuple(each for each in _state.observers if each is not observer)


def totals() -> dict[str, float]:
    """Return the seconds of the training loop for each verb, since the first loop started."""
    return dict(_state.seconds)


def counts() -> dict[str, int]:
    """Return the number of calls of the training loop for each verb, since the first loop started."""
    return dict(_state.counts)


def last_seconds() -> dict[str, list[float]]:
    """Return the durations of the last calls of the training loop, by verb; at most :data:`CALLS` in total."""
    found: dict[str, list[float]] = {}
    for call in [*_state.calls]:
        if call.counted and call.ended is not None:
            found.setdefault(call.verb, []).append(call.ended - call.began)
    return found


def position() -> dict[str, Any]:
    """Return the current position of this process's training loop, JSON-serializable.

    ``call`` is the current call, or the last call that has ended. In the latter case, ``open`` is false, and code of
    the script is running. ``seconds`` is the time since the call began, or ended. ``together`` counts the calls in
    which ranks wait for each other: a rank that has begun fewer of them than another rank lags.
    """
    now = time.monotonic()
    call = next(iter(reversed([*_state.open])), None)
    is_open = call is not None
    if call is None:
        mine = (each for each in reversed([*_state.calls]) if each.thread == _state.loop_thread)
        call = next(mine, None)
    since = now if call is None else call.began if is_open or call.ended is None else call.ended
    return {
        "rank": settings.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "step": _state.step,
        "together": _state.together,
        "call": None if call is None else [call.verb, call.step, call.detail],
        "open": is_open,
        "seconds": round(now - since, 3),
    }


def last(count: int = CALLS) -> list[dict[str, Any]]:
    """Return the last calls, oldest first, JSON-serializable."""
    return [call.as_dict() for call in itertools.islice([*_state.calls], max(0, len(_state.calls) - count), None)]


def use_folder(folder: Path | None) -> None:
    """Write dumps below this run's folder, unless ``PERSIA_FLIGHT_DIR`` is set.

    None means :func:`persia.runtime.job.run_dir`.
    """
    _state.folder = folder


def folder() -> Path:
    """Return the folder for dumps: ``PERSIA_FLIGHT_DIR``, or else ``flight`` in the run's folder."""
    given = settings.flight_dir
    return Path(given) if given is not None else (_state.folder or job.run_dir()) / "flight"


def dump(reason: str) -> Path:
    """Write the last calls to ``rank-N.json`` in :func:`folder`, and return the path of the file.

    Raises:
        OSError: The file cannot be written.
        ConfigError: The name of the job, which determines the folder, is invalid.
    """
    path = folder() / f"rank-{settings.rank}.json"
    content = {"reason": reason, "time": time.time(), "position": position(), "calls": last()}
    files.make_folders(path.parent)
    files.write_whole(path, json.dumps(content, indent=1).encode() + b"\n")
    if collectives is not None and (text := collectives()) is not None:
        files.write_whole(path.with_name(f"nccl-rank-{settings.rank}.json"), text.encode())
    return path


def keep(reason: str) -> str:
    """Write the last calls like :func:`dump`, and return a line that names the file, or the error."""
    try:
        return f"last calls of rank {settings.rank}: {dump(reason)}"
    except (OSError, PersiaError) as error:
        return f"cannot write the last calls of rank {settings.rank}: {error}{next_step(error)}"


def _thread_name(ident: int) -> str:
    return next((each.name for each in threading.enumerate() if each.ident == ident), str(ident))
