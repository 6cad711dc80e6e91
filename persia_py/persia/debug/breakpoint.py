"""Breakpoints in a run of several ranks: one rank stops, the other ranks continue or wait.

``breakpoint_()`` stops the rank that ``RANK_TO_DEBUG`` names (0 by default) in the frame of its caller; the other ranks
continue until they need that rank. With ``breakpoint_(False)`` they wait at the same call until the breakpoint is
cleared on that rank, for example with ``clear_()``. docs/debug-breakpoint.md describes the states of the ranks.
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from persia.debug import gate, process_groups, terminal, watcher
from persia.debug.debugger import Debugger
from persia.debug.gate import RANK, FileGate, Gate, Record, StoreGate
from persia.runtime import clock, preemption, watchdog
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings, variable
from persia.runtime.waits import REMIND_S

_POLL_S = 0.05
_ENDED_S = 3.0
"""The maximum number of seconds that a rank waits until the other ranks acknowledge the end of all ranks."""
_KEPT = 64
"""The number of recent calls whose locations other ranks can compare with the locations of their calls."""
_ENDED = 1 << 60
"""The call count that a rank reports after it has ended."""

_logger = get_logger("debug")


@dataclass
class Stop:
    """An open breakpoint of this rank.

    Attributes:
        call: The number of the call of ``breakpoint_``, from 0, which is equal on all ranks.
        file: The key of the record that exists while the breakpoint is open.
        site: The file and line of the call.
        frame: The frame of the caller.
        blocking: Whether the other ranks wait until the breakpoint is cleared.
    """

    call: int
    file: str
    site: str
    frame: FrameType
    blocking: bool


class Session:
    """The debugging session of this rank.

    A process has one session, from its first breakpoint on or, with ``persia debug run``, from its start.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        debug_rank: The rank that stops at breakpoints.
        gate: The records that the ranks share.
        counter: The number of cleared breakpoints, which is the name of the next one.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.debug_rank = 0
        self.counter = 0
        self.gate: Gate = FileGate(gate.run_name())
        self._calls = 0
        self._passed = 0
        self._continued = 0
        self._stop: Stop | None = None
        self._terminal: terminal.Terminal | None = None
        self._debugger: Debugger | None = None
        self._prompts = False
        self._edited = False
        self._sites: dict[str, str] = {}
        self._told: set[str] = set()
        self.place()

    def place(self) -> None:
        """Determine the rank of this process, and the gate through which the ranks share records.

        Raises:
            UsageError: ``RANK_TO_DEBUG`` is not the number of a rank.
        """
        place = process_groups.place()
        self.rank, self.world_size = place or (settings.rank, settings.world_size)
        self.debug_rank = rank_to_debug(self.world_size)
        if place is not None and not on_one_host(self.world_size) and isinstance(self.gate, FileGate):
            self.gate = StoreGate(process_groups.store())

    def arrive(self, frame: FrameType, *, blocking: bool, when: bool) -> None:
        """Stop, wait or continue at a call of ``breakpoint_``."""
        if self._prompts:  # a breakpoint in code that runs at the prompt
            return
        self.place()
        call, self._calls = self._calls, self._calls + 1
        site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if blocking and isinstance(self.gate, FileGate) and not on_one_host(self.world_size):
            raise UsageError(
                f"breakpoint_(False) at {site}: the ranks are on several hosts, or LOCAL_WORLD_SIZE is not set, and "
                "there is no process group yet, through which ranks could wait for each other",
                hint="call breakpoint_ after init_process_group, or inside TrainCtx",
            )
        watcher.start(self)
        process_groups.extend()
        if self.rank != self.debug_rank:
            if blocking:
                self._wait(call, site)
            elif self._first(site):
                _logger.info("rank %d continues at %s; rank %d stops there", self.rank, site, self.debug_rank)
            return
        self._sites[str(call)] = site
        self._sites.pop(str(call - _KEPT), None)
        self.clear()  # the previous breakpoint
        if when and (descriptor := self._find_terminal(site)) is not None:
            self._open(Stop(call, str(self.counter), site, frame, blocking), descriptor)
        else:
            self._publish(passed=call + 1)

    def _find_terminal(self, site: str) -> int | None:
        descriptor = terminal.find()
        if descriptor is None and self._first(f"no terminal at {site}"):
            _logger.warning(
                "breakpoint_ at %s: rank %d has no terminal, so no rank stops; next: persia debug run --rank %d -- "
                "SCRIPT, in a terminal, or attach an editor: persia debug attach --rank %d",
                *(site, self.rank, self.rank, self.rank),
            )
        return descriptor

    def _open(self, stop: Stop, descriptor: int) -> None:
        self._stop = stop
        self.gate.put(stop.file, {"site": stop.site, "rank": self.rank})
        self._publish(passed=stop.call if stop.blocking else stop.call + 1, stopped=stop.site)
        self.use_terminal(descriptor)
        others = "wait there until clear_()" if stop.blocking else "continue until they need this rank"
        with self.prompting(stop.frame):
            sys.stdout.write(f"[{time.time():.3f}]counter_file created: {self.gate.name(stop.file)}\n")
            if self.world_size > 1:
                sys.stdout.write(f"rank {self.rank} of {self.world_size} stops at {stop.site}; the others {others}\n")
        self._debugger = self._debugger or Debugger(self)
        self._debugger.set_trace(stop.frame)

    def use_terminal(self, descriptor: int) -> None:
        """Take the terminal, when no other rank uses it."""
        if self._terminal is None:
            lock = gate.folder() / f"{gate.PREFIX}{gate.run_name()}_terminal.lock"
            self._terminal = terminal.Terminal(descriptor, lock)
        else:
            os.close(descriptor)

    @contextlib.contextmanager
    def prompting(self, frame: FrameType | None) -> Iterator[None]:
        """Enclose a prompt. The clocks of time limits stop on all ranks until :meth:`continues`."""
        if self._terminal is None and (descriptor := terminal.find()) is not None:
            self.use_terminal(descriptor)  # pdb stopped again after ``c`` had released the terminal
        if frame is not None:
            self._publish(stopped=f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        clock.stop("prompt")
        self._prompts = True
        try:
            with self._terminal.taken() if self._terminal is not None else contextlib.nullcontext():
                yield
        finally:
            self._prompts = False

    def stopped_at(self, site: str) -> None:
        """Notify the other ranks that this rank is stopped, so that their clocks stop."""
        self._publish(stopped=site)

    def edited(self, attached: bool) -> None:
        """Record whether an editor is attached, which may stop this rank.

        Clocks are stopped as long as an editor is attached.
        """
        self._edited = attached
        (clock.stop if attached else clock.go)("editor")
        self._publish()

    def _publish(self, *, passed: int | None = None, stopped: str = "") -> None:
        self._passed = self._passed if passed is None else passed
        stop = {} if self._stop is None else {"call": self._stop.call, "file": self._stop.file}
        stopped = stopped or ("an editor" if self._edited else "")
        progress = {"passed": self._passed, "continued": self._continued}
        record = {**progress, "stopped": stopped, "sites": self._sites, **stop}
        self.gate.put(f"rank-{self.rank}", record)

    def clear(self) -> None:
        """Close the open breakpoint, if any, so that ranks waiting at it continue."""
        stop, self._stop = self._stop, None
        if stop is None:
            return
        self._publish(passed=stop.call + 1, stopped=stop.site if self._prompts else "")
        self.gate.remove(stop.file)
        self.counter += 1
        if self._prompts:
            sys.stdout.write(f"[{time.time():.3f}]counter_file cleared: {self.gate.name(stop.file)}\n")

    def continues(self, *, stops_again: bool) -> str:
        """Record that the program continues; return a message about the other ranks for the user."""
        clock.go("prompt")
        self._continued += 1
        stop, told = self._stop, ""
        if stop is not None and stop.blocking and self.world_size > 1:
            told = (
                f"the other ranks still wait at {stop.site}, because clear_() was not called; they continue when this "
                "frame is left"
                if stops_again
                else f"clear_() was not called; the other ranks, which wait at {stop.site}, continue now"
            )
        if stop is None or not stop.blocking or not stops_again:
            self.clear()
            self._publish()
            self.release_terminal()
        return told

    def release_terminal(self) -> None:
        """Let another rank use the terminal after the prompt has ended."""
        held, self._terminal = self._terminal, None
        if held is not None:
            held.close()

    def left(self, frame: FrameType) -> None:
        """Clear the breakpoint in a frame that has returned."""
        if self._stop is not None and self._stop.frame is frame:
            _logger.info("the frame of the breakpoint at %s has returned: the breakpoint is cleared", self._stop.site)
            self.clear()
            self._publish()

    def quit(self) -> None:
        """End all ranks with exit code 130. This rank ends last."""
        sys.stdout.write(f"rank {self.rank} ends all ranks\n")
        sys.stdout.flush()
        self.gate.put("abort", {"rank": self.rank})
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + _ENDED_S
        while (
            left := [rank for rank in others if self.gate.get(f"ack-{rank}") is None]
        ) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not left and isinstance(self.gate, FileGate):
            self.gate.remove_all()
        os._exit(ExitCode.INTERRUPTED)

    def end(self) -> None:
        """Record the end of this process, so that no rank continues to wait for it."""
        watcher.stop()
        if self.rank == self.debug_rank and self._calls:
            self._stop = None
            with contextlib.suppress(Exception):  # the store ends together with rank 0
                self._publish(passed=_ENDED)
                self.gate.remove(str(self.counter))
                if self.world_size == 1 and isinstance(self.gate, FileGate):
                    self.gate.remove_all()

    def _wait(self, call: int, site: str) -> None:
        """Wait until the rank that is debugged has opened and cleared the breakpoint of this call."""
        opened, reminded = "", 0.0
        with watchdog.waiting():
            while not (record := self._record()) or record["passed"] <= call:
                preemption.exit_if_requested()
                if record is not None and not opened and record.get("call") == call:
                    opened = str(record["file"])
                    _logger.info("counter_file created: %s; waiting for clear_()", self.gate.name(opened))
                    self._check_site(record, call, site)
                if opened and self.gate.get(opened) is None:
                    _logger.info("rank %d continues at %s", self.rank, site)
                    return
                if time.monotonic() - reminded > REMIND_S:
                    reminded = time.monotonic()
                    _logger.info("rank %d waits at %s for rank %d, which stops there", self.rank, site, self.debug_rank)
                time.sleep(_POLL_S)
        if record["passed"] == _ENDED:
            _logger.warning(
                "breakpoint_(False) at %s: rank %d has ended %s; rank %d continues",
                *(site, self.debug_rank, "there" if opened else "without stopping there", self.rank),
            )
        elif opened:
            _logger.info("rank %d continues at %s", self.rank, site)
        else:
            self._check_site(record, call, site)

    def _record(self) -> Record | None:
        """Return the record of the debugged rank. A rank that has ended counts as a rank that has passed all calls."""
        record = self.gate.get(f"rank-{self.debug_rank}")
        if record is not None and not self.gate.is_alive(record):
            record["passed"] = _ENDED
        return record

    def _check_site(self, record: Record, call: int, site: str) -> None:
        """Warn if the debugged rank made this call of breakpoint_ at a different line."""
        theirs = record["sites"].get(str(call), site)
        if theirs != site and self._first("mismatch"):
            _logger.warning(
                "call %d of breakpoint_, counted from 0, is at %s on rank %d and at %s on rank %d, so these ranks do "
                "not wait for each other there: every rank must call each breakpoint_, not only the debugged rank",
                *(call, theirs, self.debug_rank, site, self.rank),
            )

    def _first(self, what: str) -> bool:
        """Whether this message has not been logged before."""
        known = what in self._told
        self._told.add(what)
        return not known


def on_one_host(world_size: int) -> bool:
    """Whether all ranks are on this host, according to their launcher."""
    return world_size == 1 or variable("LOCAL_WORLD_SIZE") == str(world_size)


def rank_to_debug(world_size: int) -> int:
    """Return ``RANK_TO_DEBUG``, by default 0.

    Raises:
        UsageError: The variable is not the number of a rank.
    """
    text = variable(RANK) or "0"
    if not text.isdecimal() or int(text) >= world_size:
        raise UsageError(f"environment variable {RANK}={text!r}: expected a rank from 0 to {world_size - 1}")
    return int(text)


_session: Session | None = None


def session() -> Session:
    """Return the session of this process."""
    global _session
    if _session is None:
        gate.sweep()
        _session = Session()
        atexit.register(_session.end)
    return _session


def breakpoint_(non_block: bool = True, *, when: object = True) -> None:
    """Stop the debugged rank in the frame of the caller, with pdb on its terminal. Collective: every rank must call it.

    ``RANK_TO_DEBUG``, or ``persia debug run --rank``, selects the debugged rank. At the prompt, ``c`` continues, and
    ``q`` ends all ranks with exit code 130. Without a terminal no rank stops, and a message is logged. While a rank is
    stopped, no time limit of persia ends a rank, and torch's collectives wait for it for up to a day.

    Args:
        non_block: If True, the other ranks continue until they need the stopped rank. If False, they wait at this call
            until ``clear_()`` is called, until the calling function returns, or until ``c`` is entered while pdb has no
            other breakpoint.
        when: A condition, which is evaluated on the debugged rank only. If it is false, no rank stops.

    Raises:
        UsageError: ``when`` is a text, ``RANK_TO_DEBUG`` is not a rank, or the ranks are on several hosts without a
            process group.
    """
    if isinstance(when, str):
        raise UsageError(
            f"breakpoint_(when={when!r}): expected a condition, such as digest('x') == 'ab12', not its text"
        )
    session().arrive(sys._getframe(1), blocking=not non_block, when=bool(when))


def clear_() -> None:
    """Let the ranks that wait at the open breakpoint continue. Does nothing on a rank that is not debugged."""
    session().clear()
