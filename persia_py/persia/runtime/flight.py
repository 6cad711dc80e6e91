"""The flight recorder of a process: its last calls, for the report of a hang, for statistics and for a profile.

A call is a wait for data, a look-up, a forward, a backward, a push, a collective, an agreement of ranks, a checkpoint.
The recorder is always on. A call costs one to two microseconds: an object in a ring, without a lock.

Only the thread of the training loop adds to :func:`totals`, from the first loop on, and only calls that are inside no
other call. Before the first loop it is the main thread.
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
from persia.runtime.settings import settings

CALLS = 1024
"""Calls that are kept."""

DATA_WAIT, LOOK_UP, FORWARD, BACKWARD = "data wait", "look-up", "forward", "backward"
ALL_REDUCE, AGREEMENT, COLLECTIVE = "all-reduce", "agreement", "collective"
PUSH, OPTIMIZER, CHECKPOINT = "push", "optimizer", "checkpoint"
READ = "read"
"""What the thread that reads ahead does; the other verbs are those of the training loop."""
TOGETHER = (ALL_REDUCE, AGREEMENT, COLLECTIVE)
"""The verbs at which every rank waits for the others."""


class Observer(Protocol):
    """What is told of each call, in the thread of the call."""

    def begun(self, call: "Call") -> None:
        """A call begins."""

    def ended(self, call: "Call") -> None:
        """A call has ended."""

    def stepped(self, step: int) -> None:
        """The training loop has done a step."""

    def apart(self) -> None:
        """The time since the last step is not the training loop's: it has evaluated, for example."""


class Call:
    """One call; a context manager around it.

    Attributes:
        verb: One of this module's.
        step: The step that it is of; None if it has none.
        detail: What exactly, such as the topic of an agreement.
        thread: The thread's number.
        began: When it began, in seconds of ``time.monotonic``.
        ended: When it ended; None while it lasts.
        error: The class of the exception that ended it; empty without one.
        counted: It is in no other call of the training loop, so that it counts in :func:`totals`.
    """

    __slots__ = ("began", "counted", "detail", "ended", "error", "step", "thread", "verb")

    def __init__(self, verb: str, step: int | None = None, detail: str = "", *, of_loop: bool = False) -> None:
        """Prepare it.

        Args:
            verb: What is done.
            step: Of which step.
            detail: What exactly.
            of_loop: The training loop waits for this call, whichever thread begins it.
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
            del _state.open[_state.open.index(self) :]  # with a call inside it that an exception has left open
            if self.counted:
                _state.seconds[self.verb] = _state.seconds.get(self.verb, 0.0) + self.seconds
                _state.counts[self.verb] = _state.counts.get(self.verb, 0) + 1
        for observer in _state.observers:
            observer.ended(self)

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON; times are seconds before now."""
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
"""Returns the last collectives of torch's own flight recorder as JSON; set where NCCL is in use."""


class _State:
    """The recorder of this process."""

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=CALLS)
        self.open: list[Call] = []  # of the loop's thread, the innermost last
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
    _state.open.clear()


def stepped(step: int) -> None:
    """Record that the training loop has done a step."""
    _state.step = step
    for observer in _state.observers:
        observer.stepped(step)


def apart() -> None:
    """Record that the time since the last step was not the training loop's."""
    for observer in _state.observers:
        observer.apart()


def observe(observer: Observer) -> None:
    """Tell ``observer`` of every call from now on."""
    _state.observers = (*_state.observers, observer)


def unobserve(observer: Observer) -> None:
    """Tell it no more."""
    _state.observers = tuple(each for each in _state.observers if each is not observer)


def totals() -> dict[str, float]:
    """Return the seconds of the training loop in each verb, since the process started."""
    return dict(_state.seconds)


def counts() -> dict[str, int]:
    """Return the number of calls of the training loop of each verb, since the process started."""
    return dict(_state.counts)


def last_seconds() -> dict[str, list[float]]:
    """Return how long each of the last calls of the training loop took, by verb; at most :data:`CALLS` in all."""
    found: dict[str, list[float]] = {}
    for call in [*_state.calls]:
        if call.counted and call.ended is not None:
            found.setdefault(call.verb, []).append(call.ended - call.began)
    return found


def position() -> dict[str, Any]:
    """Return where the training loop of this process is, JSON-ready.

    ``call`` is the call that it is in, or the last one that it has left (``open`` is false then: the script's own code
    runs), ``seconds`` since when. ``together`` counts the calls at which ranks wait for each other: a rank that has
    begun fewer than another one lags.
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
    """Return the last calls, JSON-ready, the oldest first."""
    return [call.as_dict() for call in itertools.islice([*_state.calls], max(0, len(_state.calls) - count), None)]


def use_folder(folder: Path | None) -> None:
    """Write dumps below this run's folder; None means :func:`persia.runtime.job.run_dir`."""
    _state.folder = folder


def folder() -> Path:
    """Return the folder of the dumps: ``PERSIA_FLIGHT_DIR``, else ``flight`` in the run's folder."""
    given = settings.flight_dir
    return Path(given) if given is not None else (_state.folder or job.run_dir()) / "flight"


def dump(reason: str) -> Path:
    """Write the last calls to ``rank-N.json`` in :func:`folder`, and return the file.

    Raises:
        OSError: It cannot be written.
        ConfigError: The job's name, which decides about the folder, is not valid.
    """
    path = folder() / f"rank-{settings.rank}.json"
    content = {"reason": reason, "time": time.time(), "position": position(), "calls": last()}
    files.make_folders(path.parent)
    files.write_whole(path, json.dumps(content, indent=1).encode() + b"\n")
    if collectives is not None and (text := collectives()) is not None:
        files.write_whole(path.with_name(f"nccl-rank-{settings.rank}.json"), text.encode())
    return path


def keep(reason: str) -> str:
    """Write the last calls as :func:`dump` does, and return a line that names the file, or says why there is none."""
    try:
        return f"last calls of rank {settings.rank}: {dump(reason)}"
    except (OSError, PersiaError) as error:
        return f"last calls of rank {settings.rank}: not written: {error}"


def _thread_name(ident: int) -> str:
    return next((each.name for each in threading.enumerate() if each.ident == ident), str(ident))
