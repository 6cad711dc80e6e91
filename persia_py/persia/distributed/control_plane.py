"""The control plane of a run: every rank above 0 keeps one connection to rank 0.

Over these connections the ranks agree on flags (:meth:`Peers.all_gather`), and learn immediately which rank fails, dies
or stops responding. Torch's collectives provide neither.

Messages are lines of JSON. The connections carry flags and names, never tensors.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from persia.distributed import lag
from persia.distributed.held import Held
from persia.distributed.link import Link, Message, names
from persia.runtime import clock, flight, preemption, watchdog
from persia.runtime.errors import PersiaError, RunLostError, UnreachableError, UsageError, WaitTimeoutError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia.runtime.waits import REMIND_S, SLICE_S

_logger = get_logger("peers")

_ALIVE_S = 2.0
"""Seconds between the heartbeats of a rank."""
SILENCE_S = 120.0
"""Seconds without a message after which a rank counts as lost, for example because it is frozen or has no network.

If ``PERSIA_HANG_TIMEOUT`` is shorter, it is the limit.
"""
_LEAST_SILENCE_S = 10.0
"""The minimum of the limit for silent ranks, because a busy rank may be silent for some seconds."""
_GATHER_S = 4.0
"""The number of seconds that ranks have to report their positions, after one of them hangs."""
_VERDICT_S = 6.0
"""The number of seconds that rank 0 has to report which rank lags."""
_GRACE_S = 15.0
"""Seconds that the training loop has to notice a lost rank, before this process is ended."""
_ENDED_S = 5.0
"""Seconds in a collective after which a rank whose script has ended counts as lost."""
_SAME_STEPS = "make the same number of steps on every rank, then restart the trainers"
"""The next step if the script of a rank has ended before that of another rank."""
_LATE, _LATE_KEYS = "a collective of torch exceeded its time limit", "(dist.timeout_s, PERSIA_DIST_TIMEOUT)"
_NOTICED_S = 3.0
"""Seconds within which this rank detects, after a collective has failed, that another rank has ended."""


class Peers:
    """The connections of this rank to the other ranks, and their known states.

    :func:`persia.distributed.handshake.host` creates the object on rank 0, and ``join`` of the same module on other
    ranks.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        links: On rank 0, a connection to each other rank; on the other ranks, the connection to rank 0.

    Attributes:
        loops: The number of training loops that this rank has begun, in all contexts of its process; for :meth:`note`.
        limit_s: Seconds that a rank may wait in a collective, not counting time in a debugger; None means no limit.
    """

    def __init__(self, rank: int, world_size: int, links: dict[int, Link]) -> None:
        self.rank, self.world_size = rank, world_size
        self.loops = 0
        self.limit_s: float | None = None
        self._links = links
        self._changed = threading.Condition()
        self._shares: dict[int, dict[int, tuple[str, Any]]] = {}
        self._answers: dict[int, tuple[str, list[Any]]] = {}
        self._count = 0
        self._notes: dict[int, int] = {}
        self._met: dict[int, tuple[int, Any]] = {}
        self._asked = False
        self._lost: tuple[int, str] | None = None
        self._left: set[int] = set()
        self._ended: dict[int, int] = {}  # the step at which the script of a rank ended with exit code 0
        self._collective_since: float | None = None
        self._reminded = 0.0  # the time at which the log last named the ranks that lag
        self._positions = lag.Positions(rank, links)
        self._held = Held(rank, links)
        self._closed = False
        for rank, link in links.items():
            threading.Thread(target=self._read, args=(rank, link), name=f"persia-rank-{rank}", daemon=True).start()
        threading.Thread(target=self._watch, name="persia-peers", daemon=True).start()

    def all_gather(self, topic: str, value: Any) -> list[Any]:
        """Return the values of all ranks for ``topic``, ordered by rank; blocks until all have called this.

        Every rank calls this in the same order. There is no time limit while all ranks are alive, because a rank may be
        waiting for data or evaluating. A log line every 30 s names the missing ranks.

        Raises:
            RunLostError: A rank has ended or cannot be reached; the message names it.
            SystemExit: A rank ends the run in :meth:`all_gather_at_exit`, and does not make this call.
            UsageError: The ranks are at different places in the script.
        """
        number, self._count = self._count, self._count + 1
        with flight.Call(flight.AGREEMENT, detail=topic):
            if self.rank == 0:
                return self._gather_and_answer(number, topic, value)
            return self._share_and_wait(number, topic, value)

    def _share_and_wait(self, number: int, topic: str, value: Any) -> list[Any]:
        self._links[0].send({"share": [number, topic, value]})

        def answer() -> tuple[str, list[Any]] | None:
            if number not in self._answers:
                self._check_left([0])
            return self._answers.pop(number, None)

        others: tuple[str, list[Any]] = self._wait(answer, lambda: f"rank 0 to reach {topic!r}", lambda: [0])
        if others[0] != topic:
            if 0 in self._ended:
                raise self._left_error(0)
            raise _different_operations(f"rank 0 at {others[0]!r}, this rank at {topic!r}")
        return others[1]

    def _gather_and_answer(self, number: int, topic: str, value: Any) -> list[Any]:
        shares = self._shares.setdefault(number, {})

        def missing() -> list[int]:
            return [rank for rank in self._links if rank not in shares]

        def complete() -> bool | None:
            self._check_left(missing())
            return None if missing() else True

        self._wait(complete, lambda: f"{names(missing())} to reach {topic!r}", missing)
        del self._shares[number]
        different = {rank: at for rank, (at, _) in shares.items() if at != topic}
        if ended := [rank for rank in different if rank in self._ended]:
            raise self._left_error(ended[0])
        values = [value if rank == 0 else shares[rank][1] for rank in range(self.world_size)]
        for link in self._links.values():
            link.send({"answer": [number, topic, values]})
        if different:
            places = ", ".join(f"rank {rank} at {at!r}" for rank, at in sorted(different.items()))
            raise _different_operations(f"rank 0 at {topic!r}, {places}")
        return values

    def ended(self, step: int) -> None:
        """Notify the other ranks that the script of this rank has ended at ``step`` with exit code 0."""
        self._ended[self.rank] = step
        for link in self._links.values():
            link.send({"ended": [self.rank, step]})

    @contextlib.contextmanager
    def in_collective(self) -> Iterator[None]:
        """Enclose a collective of torch, or a forward or backward pass that contains one.

        In the block, this rank may wait ``limit_s`` for other ranks; its computation has no limit. If it waits for a
        rank whose script has ended, this process ends.
        """
        self._collective_since = clock.now()
        try:
            yield
        finally:
            self._collective_since = None

    def all_gather_at_exit(self, mine: Any, timeout_s: float) -> list[Any]:
        """Return the values of all ranks before the run ends.

        A rank that waits in another all-gather receives SystemExit there, and then calls this method.

        Raises:
            RunLostError: A rank is lost; the message names it.
            UnreachableError: A rank did not arrive in time; the message names it.
        """
        deadline = clock.now() + timeout_s
        self._note_at_exit(self.rank, self._count, mine)

        def missing() -> list[int]:
            return [rank for rank in range(self.world_size) if rank not in self._met]

        def complete() -> bool | None:
            self._check_left(missing())
            if missing() and clock.now() > deadline:
                raise UnreachableError(f"waited {timeout_s:g} s for {names(missing())} to end the run")
            return None if missing() else True

        self._wait(complete, lambda: f"{names(missing())} to end the run")
        met, self._met = self._met, {}
        # The counts may differ, because some ranks may have waited in an all-gather that other ranks did not reach.
        self._count = max(count for count, _ in met.values())
        return [met[rank][1] for rank in range(self.world_size)]

    def _note_at_exit(self, of: int, count: int, value: Any) -> None:
        """Record that rank ``of`` waits in :meth:`all_gather_at_exit`."""
        with self._changed:
            self._met[of] = (count, value)
        preemption.note_remote_stop(gone=True)
        self._relay_stop(of, {"meet": [of, count, value]})

    def _relay_stop(self, of: int, message: Message) -> None:
        """Notify all ranks that ``of`` ends the run. Rank 0 forwards the message."""
        self._asked = True
        preemption.note_remote_stop()
        for rank, link in self._links.items():
            if rank != of and self.rank in {0, of}:
                link.send(message)

    def note(self, value: int) -> None:
        """Report this rank's progress to rank 0, for :meth:`wait_for_notes`."""
        if self.rank != 0:
            self._links[0].send({"note": value})

    def wait_for_notes(self, value: int, what: str, timeout_s: float) -> None:
        """On rank 0: wait until every other rank has reported ``value`` or more with :meth:`note`.

        Raises:
            UnreachableError: A rank has not done so in time; the message names it.
        """
        deadline = clock.now() + timeout_s

        def late() -> list[int]:
            return [rank for rank in self._links if self._notes.get(rank, 0) < value]

        def done() -> bool | None:
            if late() and clock.now() > deadline:
                raise UnreachableError(f"waited {timeout_s:g} s for {names(late())} {what}")
            return None if late() else True

        self._wait(done, lambda: f"{names(late())} {what}")

    def blame(self, error: BaseException) -> None:
        """After a failed collective: raise an error that names a lost or lagging rank; return if there is none.

        Raises:
            RunLostError: A rank is lost.
            WaitTimeoutError: The collective took longer than its limit.
        """
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        if late and self.rank != 0:
            self._links[0].send({"where": True})
        with self._changed:
            self._changed.wait_for(
                lambda: self._lost is not None or (late and bool(self._positions.verdict)), _NOTICED_S
            )
            if self._lost is not None:
                raise self._lost_error() from error
        if late:
            where = self._positions.verdict or self._positions.report()
            raise WaitTimeoutError(f"{_LATE} {_LATE_KEYS}\n{where}") from error

    def leave(self, reason: str | None) -> None:
        """Notify the other ranks that this rank leaves, either cleanly or with a reason."""
        self._held.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for link in self._links.values():
            link.send({"left": reason})
            link.hang_up()

    def hung(self, reason: str) -> None:
        """End all ranks, because this rank makes no progress. Each rank prints its stacks."""
        for link in self._links.values():
            link.send({"hung": [reason, flight.position()]})

    def verdict(self) -> str:
        """After :meth:`hung`: return which rank lags, and where each one is.

        Rank 0 waits a few seconds for the responses, and sends the result, for which the other ranks wait.
        """
        positions = self._positions
        with self._changed:
            if self.rank != 0:
                self._changed.wait_for(lambda: bool(positions.verdict), _VERDICT_S)
                return positions.verdict or positions.report()
            self._changed.wait_for(lambda: positions.answered >= {*self._links}, _GATHER_S)
            positions.verdict = positions.report(answered=True)
        for link in self._links.values():
            link.send({"verdict": positions.verdict})
        return positions.verdict

    def gone(self, error: BaseException) -> bool:
        """Return whether another rank is lost or has left.

        For a RuntimeError of torch, wait up to 3 s, because torch may notice the loss first.
        """
        may_be = isinstance(error, RuntimeError) and not isinstance(error, PersiaError)
        with self._changed:
            return self._changed.wait_for(
                lambda: self._lost is not None or bool(self._left), _NOTICED_S if may_be else 0.0
            )

    @property
    def closed(self) -> bool:
        """Whether this rank has left."""
        return self._closed

    def holds(self, rank: int) -> bool:
        """Whether ``rank`` is still part of the run, according to the messages that this rank has received."""
        with self._changed:
            over = self._closed or self._lost is not None or rank in self._left
        return not over and not self._links[rank].over

    def _wait(self, look: Callable[[], Any], what: Callable[[], str], late: Callable[[], list[int]] = list) -> Any:
        """Wait until ``look`` returns a value, and return it.

        Args:
            look: Returns the value, or None while it is not available.
            what: The name of the awaited event, for log lines.
            late: The ranks for which this rank waits; the log line reports their positions.
        """
        started = reminded = time.monotonic()
        with watchdog.waiting(), self._changed:
            while True:
                if (found := look()) is not None:  # the value is valid even if a rank has left in the meantime
                    return found
                if self._lost is not None:
                    raise self._lost_error()
                if self._closed:
                    raise RunLostError(f"this rank has left the run while it waited for {what()}")
                if self._met and self.rank not in self._met:
                    raise SystemExit(preemption.exit_code())
                if preemption.stop_asked() and not self._asked:
                    self._relay_stop(self.rank, {"stop": self.rank})  # also stops an awaited rank that is evaluating
                self._changed.wait(SLICE_S)
                if time.monotonic() - reminded > REMIND_S:
                    reminded = time.monotonic()
                    where = self._positions.of(late())
                    _logger.warning("still waiting, after %.0f s, for %s%s", reminded - started, what(), where)

    def _lost_error(self) -> RunLostError:
        assert self._lost is not None  # noqa: S101  # every caller has checked
        rank, why = self._lost
        return RunLostError(f"rank {rank} {why}" if why.startswith(LEFT) else f"rank {rank} is gone: {why}")

    def _left_error(self, rank: int) -> RunLostError:
        why = left_at(self._ended[rank], 0)
        self._lose(rank, why)
        return RunLostError(f"rank {rank} {why}", hint=_SAME_STEPS)

    def _check_left(self, wanted: list[int]) -> None:
        for rank in wanted:
            if rank in self._left:
                raise RunLostError(
                    f"rank {rank} is gone: its script has ended, while that of this rank continues", hint=_SAME_STEPS
                )

    def _read(self, rank: int, link: Link) -> None:
        """Receive the messages of ``rank`` until its connection ends."""
        while (message := link.receive()) is not None:
            with self._changed:
                self._take(rank, message)
                self._changed.notify_all()
        link.close()
        self._lose(rank, "its connection ended without a message: the process died, was killed, or lost its network")

    def _take(self, rank: int, message: Message) -> None:
        if "share" in message:
            number, topic, value = message["share"]
            self._shares.setdefault(number, {})[rank] = (topic, value)
        elif "answer" in message:
            number, topic, values = message["answer"]
            self._answers[number] = (topic, values)
        elif "note" in message:
            self._notes[rank] = message["note"]
        elif "meet" in message:
            self._note_at_exit(*message["meet"])
        elif "stop" in message:
            self._relay_stop(message["stop"], message)
        elif "ended" in message:
            of, step = message["ended"]
            self._ended[of] = step
            for other, link in self._links.items():
                if self.rank == 0 and other != of:
                    link.send(message)
        elif "hung" in message:
            reason, position = message["hung"]
            self._positions.note(rank, position)
            self._links[rank].send({"position": flight.position()})
            end = (str(reason), self.hung, self.verdict)  # on rank 0, self.hung forwards the message
            threading.Thread(target=watchdog.end, args=end, name="persia-hung", daemon=True).start()
        elif "position" in message or "alive" in message:
            self._positions.note(rank, message.get("position") or message["alive"], answers="position" in message)
        elif "where" in message:
            self._links[rank].send({"verdict": self._positions.report()})
        elif "verdict" in message:
            self._positions.verdict = str(message["verdict"])
        elif "held" in message:
            self._held.note(*message["held"])
        elif "lost" in message:
            self._lost = self._lost or (message["lost"][0], message["lost"][1])
        elif "over" in message:
            self._note_left(message["over"])
        elif "left" in message:
            if message["left"] is None:
                self._note_left(rank)
            else:
                self._lost = self._lost or (rank, message["left"])

    def _note_left(self, rank: int) -> None:
        """Record that a rank has left cleanly. Rank 0 forwards the message."""
        self._left.add(rank)
        for other, link in self._links.items():
            if self.rank == 0 and other != rank:
                link.send({"over": rank})

    def _lose(self, rank: int, why: str) -> None:
        why += self._positions.last_of(rank)
        with self._changed:
            self._held.note(rank, is_held=False)
            if self._lost is None and rank not in self._left and not self._closed:
                self._lost = (rank, why)
            self._changed.notify_all()

    def _watch(self) -> None:
        """Send heartbeats. End the process if its training loop cannot notice that another rank is lost."""
        reported, ends = threading.Event(), 0.0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (self._lost is not None and not reported.is_set()), timeout=_ALIVE_S
                )
                if self._closed:
                    return
                lost = self._lost
            if lost is not None and not reported.is_set():
                reported.set()
                ends = time.monotonic() + _GRACE_S
                for rank, link in self._links.items():
                    if rank != lost[0]:
                        link.send({"lost": lost})
            elif reported.is_set() and time.monotonic() > ends:
                self._end()
            self._end_if_left_alone()
            self._end_if_late()
            self._remind()
            for rank, link in self._links.items():
                link.send({"alive": flight.position()})
                silent = clock.now() - link.heard
                if self._lost is None and silent > _silence_limit() and rank not in self._left:
                    self._lose(rank, f"silent for {silent:.0f} s: stopped, frozen, or without a network")
                    _logger.error("%s", flight.keep(f"rank {rank} is silent"))

    def _end_if_left_alone(self) -> None:
        """End the process if its main thread waits in a collective for a rank whose script has ended."""
        since, others = self._collective_since, [rank for rank in self._ended if rank != self.rank]
        if since is None or not others or clock.now() - since < _ENDED_S:
            return
        self._lose(others[0], left_at(self._ended[others[0]], 0))
        for rank, link in self._links.items():
            if rank != others[0]:
                link.send({"lost": self._lost})
        self._end()

    def _end_if_late(self) -> None:
        """End all ranks if the main thread of this rank waits for others longer than the limit of a collective."""
        since, limit = self._collective_since, self.limit_s
        if since is None or limit is None or clock.now() - since <= limit:
            return
        if self._positions.waited_s(clock.now() - since) > limit:
            watchdog.end(f"rank {self.rank}: {_LATE} of {limit:g} s {_LATE_KEYS}", self.hung, self.verdict)

    def _remind(self) -> None:
        """Log which rank lags, if the main thread of this rank has waited for it in a step for a long time."""
        since, now = self._collective_since, clock.now()
        if since is None or now - max(since, self._reminded) <= REMIND_S:
            return
        if late := self._positions.late():
            self._reminded = now
            _logger.warning("waiting in a forward pass, backward pass or collective for %.0f s\n%s", now - since, late)

    def _end(self) -> None:
        """End the process from this thread, because the main thread waits in a collective that never returns."""
        error = self._lost_error()
        try:
            sys.stderr.write(f"error: {error}\nnext: {error.hint}\n")
            sys.stderr.flush()
        finally:
            os._exit(error.exit_code)


LEFT = "left at step"
"""The beginning of the reason that a rank sends when its script ends."""


def left_at(step: int, code: object) -> str:
    """Return the reason that a rank sends when its script ends, with an exit code, while other ranks train."""
    return f"{LEFT} {step} (exit {code})"


def _different_operations(places: str) -> UsageError:
    return UsageError(
        f"the ranks are at different operations: {places}",
        hint="run the same script on every rank, and make the same calls of persia in the same order",
    )


def _silence_limit() -> float:
    """Return the seconds without a message after which a rank counts as lost."""
    hang = settings.hang_timeout
    return SILENCE_S if not hang else min(SILENCE_S, max(_LEAST_SILENCE_S, hang))
