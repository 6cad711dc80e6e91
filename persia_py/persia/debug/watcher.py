"""Pauses the time limits of a rank while another rank is stopped.

It also logs the wait, and ends the rank if the user ends all ranks (q).
"""

import os
import sys
import threading

from persia.debug import attach, ranks
from persia.debug.gate import Gate, RankSession
from persia.loop import training
from persia.runtime import clock
from persia.runtime.errors import PersiaError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.logging import get_logger

_POLL_S = 0.2

_logger = get_logger("debug")


_NAME = "persia-debug"
_LEAVE_S = 5.0
"""Seconds within which the thread must end."""
_running: "list[_Watcher]" = []


def start(session: RankSession) -> None:
    """Start the thread that watches the other ranks. A process starts it once."""
    if not _running:
        ranks.register(session.rank, session.world_size)
        _running.append(_Watcher(session))
        ranks.accept_editors()


def stop() -> None:
    """End the thread. The process would abort if the thread were inside torch's store when the interpreter exits."""
    while _running:
        _running.pop().stop()


class _Watcher:
    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._stopped: tuple[int, str, int] | None = None
        self._said = False
        self._requests = attach.Requests(session)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        """Read the records of the other ranks until :meth:`stop`, or until the process group's store is closed."""
        while not self._end.wait(_POLL_S):
            try:
                self._look(self._session.gate)
            except RuntimeError as error:  # an error of torch's store, which rank 0 serves
                clock.go(_NAME)
                _logger.debug("the ranks no longer share breakpoints: %s", error)
                return
            self._requests.look()

    def _look(self, gate: Gate) -> None:
        session = self._session
        if (abort := gate.get("abort")) is not None and abort["rank"] != session.rank:
            gate.put(f"ack-{session.rank}", {"rank": session.rank})
            sys.stderr.write(f"rank {abort['rank']} ends all ranks (q): rank {session.rank} ends\n")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(ExitCode.INTERRUPTED)
        stopped = self._find(gate)
        if stopped is None:
            clock.go(_NAME)
        else:
            clock.stop(_NAME, elsewhere=True)
        if stopped != self._stopped:
            self._stopped, self._said = stopped, False
            if stopped is not None:
                where = (*stopped[:2], session.rank)
                _logger.info("rank %d is stopped at %s; the time limits of rank %d are paused", *where)
        if stopped is not None and not self._said:
            self._said = self._say_permits(*stopped[:2])

    def _find(self, gate: Gate) -> tuple[int, str, int] | None:
        """Return a stopped rank, its place, and how often it has continued, because it may stop at a place repeatedly.

        Return None if no other rank is stopped.
        """
        for rank in range(self._session.world_size):
            if rank != self._session.rank:
                record = gate.get(f"rank-{rank}")
                if record is not None and record["stopped"] and gate.is_alive(record):
                    return rank, str(record["stopped"]), int(record["continued"])
        return None

    def _say_permits(self, rank: int, site: str) -> bool:
        """Log once that the staleness limit blocks further look-ups; return whether this was logged."""
        loop = training.running()
        if loop is None:
            return False
        try:
            held, most = loop.permits
        except (PersiaError, AttributeError):  # the loop may end at the same time
            return False
        if held < most:
            return False
        _logger.warning(
            "rank %d has reached its staleness limit of %d. Its next look-up waits for rank %d, which is stopped at %s",
            *(self._session.rank, most, rank, site),
        )
        return True
