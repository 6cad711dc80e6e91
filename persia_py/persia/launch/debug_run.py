"""``persia debug run``: runs the ranks of a script as children, one of them in the foreground with the terminal."""

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from persia.debug import ranks as registered
from persia.debug.gate import POST_MORTEM, RANK, RUN, FileGate
from persia.debug.terminal import VARIABLE as TTY
from persia.launch.debug_command import Script
from persia.launch.local_job import LOOPBACK, find_free_port
from persia.launch.logs import Logs
from persia.launch.process import Process
from persia.launch.supervision import ONE_SIGNAL, Events, stop
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import ExitCode

LONGEST_S = "86400"
"""The time limit of a look-up or push in seconds. The limit is long, because a stopped rank blocks the ordered requests
of the other ranks in a reproducible run."""
_NOTICE_S = 5.0
"""Seconds that the other ranks have to end after one rank has ended them or has failed."""
_LOOK_S = 0.5
_TAIL = 15
"""The number of last lines that are shown of a rank that failed in the background."""
_FATAL = "Fatal Python error"


@dataclass(frozen=True)
class DebugRun:
    """The ranks that ``persia debug run`` starts.

    Attributes:
        script: The script, and its number of ranks.
        rank: The rank in the foreground.
        logs: The folder for the output of the other ranks.
        post_mortem: Whether a failing rank prompts at its error.
        paths: The folders that are appended to ``PYTHONPATH``.
    """

    script: Script
    rank: int
    logs: Path
    post_mortem: bool
    paths: Sequence[str] = ()

    def environment(self, run: str, port: int) -> dict[str, str]:
        """Return the environment variables for all ranks of this host."""
        script = self.script
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *self.paths])
        own = {
            "WORLD_SIZE": str(script.nodes * script.ranks),
            "LOCAL_WORLD_SIZE": str(script.ranks),
            "GROUP_RANK": str(script.node),
            "MASTER_ADDR": script.master or LOOPBACK,
            "MASTER_PORT": str(script.port or port),
            "PERSIA_RPC_TIMEOUT": LONGEST_S,
            "PYTHONPATH": path,
            RANK: str(self.rank),
            POST_MORTEM: "1" if self.post_mortem else "0",
            RUN: run,
        }
        terminal = _terminal()
        return {**os.environ, **own, **({} if terminal is None else {TTY: terminal})}


def run(job: DebugRun) -> int:
    """Run the ranks of this host until they end, and return the exit code: that of the first rank that failed.

    Raises:
        UsageError: The rank does not exist.
    """
    script = job.script
    world_size = script.nodes * script.ranks
    if not 0 <= job.rank < world_size:
        more = f", or start more ranks: --nproc {job.rank + 1}" if job.rank > 0 else ""
        raise UsageError(
            f"rank {job.rank} does not exist: expected a rank from 0 to {world_size - 1}",
            hint=f"choose another rank{more}",
        )
    if _terminal() is None:
        _say("standard input is not a terminal, so no rank stops at a breakpoint")
    name = secrets.token_hex(4)
    environment = job.environment(name, find_free_port())
    first = script.node * script.ranks
    for local in range(script.ranks):
        (job.logs / f"rank-{first + local}.log").unlink(missing_ok=True)
    events = Events()
    gate = FileGate(name)
    with Logs(job.logs) as logs, events.signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
        if not first <= job.rank < first + script.ranks:
            _say(f"rank {job.rank} runs on another host; the ranks of this host write to {job.logs}/rank-N.log")
        elif script.ranks > 1:
            _say(f"rank {job.rank} of {world_size} runs here; the other ranks write to {job.logs}/rank-N.log")
        try:
            started = {
                first + local: _start(job, first, local, environment, logs, events) for local in range(script.ranks)
            }
            return _Supervision(job, started, events, gate).run()
        finally:
            gate.remove_all()


def _start(
    job: DebugRun, first: int, local: int, environment: Mapping[str, str], logs: Logs, events: Events
) -> Process:
    rank = first + local
    return Process(
        f"rank {rank}",
        [sys.executable, "-m", "persia.launch.debug_rank", *job.script.words],
        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(local)},
        line=None if rank == job.rank else logs.writer(f"rank-{rank}", shown=False),
        ended=events.ended,
    )


class _Supervision:
    def __init__(self, job: DebugRun, ranks: dict[int, Process], events: Events, gate: FileGate) -> None:
        self._job, self._ranks, self._events, self._gate = job, ranks, events, gate
        self._left = set(ranks.values())
        self._interrupted = 0.0

    def run(self) -> int:
        """Wait until all ranks have ended, and return the exit code."""
        while self._left:
            event = self._events.next()
            if isinstance(event, Process):
                self._left.discard(event)
                if event.code != 0:
                    return self._failed(event)
            elif event is not None and not (event == signal.SIGINT and self._passed_on()):
                self._stop()
                return int(ExitCode.INTERRUPTED) if event == signal.SIGINT else 128 + int(event)
        return 0

    def _passed_on(self) -> bool:
        """Pass Ctrl-C on to the rank in the foreground, as the terminal would. Return False for a second Ctrl-C."""
        now, foreground = time.monotonic(), self._ranks.get(self._job.rank)
        impatient = bool(self._interrupted) and now - self._interrupted > ONE_SIGNAL and not self._prompts()
        self._interrupted = self._interrupted or now
        if foreground is None or not foreground.running or impatient:
            return False
        foreground.signal(signal.SIGINT)
        return True

    def _prompts(self) -> bool:
        """Whether the rank in the foreground is stopped at a prompt.

        In this case its session continues after another rank fails.
        """
        record = self._gate.get(f"rank-{self._job.rank}")
        return record is not None and bool(record["stopped"]) and self._gate.is_alive(record)

    def _failed(self, failed: Process) -> int:
        rank = next(rank for rank, process in self._ranks.items() if process is failed)
        code = failed.code
        if code != ExitCode.INTERRUPTED:
            self._report(rank, failed)
        foreground = self._ranks.get(self._job.rank)
        if self._prompts() and foreground is not failed:
            _say(f"{failed.name} has ended; rank {self._job.rank} is still stopped here: c or q ends the others")
            self._wait(lambda: self._prompts())
        deadline = time.monotonic() + (0.0 if code == ExitCode.INTERRUPTED and self._interrupted else _NOTICE_S)
        self._wait(lambda: time.monotonic() < deadline)
        self._stop()
        return code if code >= 0 else 128 - code

    def _wait(self, longer: Callable[[], bool]) -> None:
        while self._left and longer():
            event = self._events.next(_LOOK_S)
            if isinstance(event, Process):
                self._left.discard(event)
            elif event == signal.SIGINT:
                self._passed_on()
            elif event is not None:
                return

    def _report(self, rank: int, failed: Process) -> None:
        """Print the last output of a rank and, after a crash, the positions of the other ranks."""
        _say(f"{failed.name} {failed.outcome()}")
        if rank != self._job.rank:
            path = self._job.logs / f"rank-{rank}.log"
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
            crash = next((place for place, line in enumerate(lines) if line.startswith(_FATAL)), None)
            shown = lines[-_TAIL:] if crash is None else lines[crash:]
            sys.stderr.write("".join(f"  {line}\n" for line in shown))
            _say(f"the whole output of {failed.name}: {path}")
        if failed.code < 0:
            self._write_stacks()

    def _write_stacks(self) -> None:
        pids = {process.pid for process in self._left}
        found = [entry for entry in registered.running() if entry.pid in pids]
        if found:
            path = self._job.logs / "stacks.txt"
            path.write_text("".join(f"{entry.title}\n{registered.stacks_of(entry)}\n" for entry in found))
            _say(f"the stacks of the other ranks: {path}")

    def _stop(self) -> None:
        stop(self._left, self._events, say=_say)


def _terminal() -> str | None:
    """Return the path of the terminal of this process; empty if it has no path, None if there is no terminal."""
    try:
        return os.ttyname(0) if os.isatty(0) else None
    except OSError:  # the terminal has no path in this container; ranks use the descriptor
        return ""


def _say(line: str) -> None:
    sys.stderr.write(f"persia debug: {line}\n")
    sys.stderr.flush()
