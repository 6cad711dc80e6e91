"""Runs the script of one data-compose replica, once for each generation of the run."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from persia.launch import threads
from persia.launch.process import Process
from persia.launch.supervision import Events, stop, stopped_by
from persia.runtime import job
from persia.runtime.errors import UnreachableError, UsageError
from persia.runtime.exit_codes import AGAIN
from persia.runtime.settings import SERVED, settings

_PERIOD = 2.0
"""Seconds between two queries to NATS for new trainers, and between two reads of the run's summary."""
_LAST_S = 10.0
"""The number of seconds that the script has to end by itself after the end of the run."""


def run(script: Path | None, arguments: Sequence[str], *, index: int, size: int, until_finished: bool = False) -> int:
    """Run the script, and restart it for every new generation, until SIGTERM.

    Args:
        script: The data script; None sends the rows of ``PERSIA_CONFIG``.
        arguments: The arguments of the script.
        index: The index of this replica.
        size: The number of replicas.
        until_finished: Whether to end, with 0, when the run is finished or was stopped by its budget. A run that had
            stopped before this call is resumed, and is over when it is finished or stops again.

    Returns:
        0 after SIGTERM or SIGINT, otherwise the exit code of the script that failed, or 75 if a signal killed it.
        With ``until_finished``, 0 if the run is over, and the code of
        :func:`persia.launch.supervision.stopped_by` after a signal before that.

    Raises:
        UsageError: ``PERSIA_NATS_URL`` is empty.
    """
    if settings.nats_url is None:
        raise UsageError(
            "PERSIA_NATS_URL is empty: in embedded mode the training script runs the data script itself",
            hint="start only `python train.py`, or set PERSIA_NATS_URL",
        )

    folder, name = job.run_dir(), job.job_name()
    earlier = job.stopped_summary(folder, of=name) if until_finished else None

    def over() -> bool:
        if not until_finished:
            return False
        if job.finished_summary(folder, of=name) is not None:
            return True
        return job.stopped_summary(folder, of=name) not in (None, earlier)

    def code_after(number: int) -> int:
        return stopped_by(number) if until_finished and not over() else 0

    events = Events()
    words = [] if script is None else [str(script), *arguments]
    command = [sys.executable, "-m", "persia.launch.data_loader_main", *words]
    with os.fdopen(os.memfd_create("persia-served"), "rb") as memory, events.signals(last=True):
        # The kernel removes this file when the process ends, even if it is killed. A temporary folder would remain.
        served = Path(f"/proc/{os.getpid()}/fd/{memory.fileno()}")
        shared = threads.variables(1, "data script", _say, os.environ, replicas=settings.host_replicas)
        place = {"REPLICA_INDEX": str(index), "REPLICA_SIZE": str(size), SERVED: str(served)}
        environment = {**os.environ, **shared, **place}
        while not over():
            served.write_bytes(b"")
            process = Process("data-compose", command, env=environment, line=None, ended=events.ended)
            event = _end_of_script(events, over)
            if isinstance(event, int):
                stop([process], events, say=_say)
                return code_after(event)
            if event is None:
                _say("the run has ended, but the script has not: stopping the script")
                stop([process], events, say=_say)
                break
            if process.code == 0:
                _say("every batch is sent; waiting for the next generation of the run")
                number = wait_for_new_trainers(events, served=served.read_text(encoding="utf-8"), over=over)
                if number is not None:
                    return code_after(number)
            elif process.code != AGAIN:
                _say(f"the script {process.outcome()}")
                if not over():
                    return process.code if process.code > 0 else AGAIN
        ending = "is finished" if job.finished_summary(folder, of=name) is not None else "has stopped"
        _say(f"this run {ending}: {folder / job.SUMMARY}")
        return 0


def _end_of_script(events: Events, over: Callable[[], bool]) -> Process | int | None:
    """Return the end of the script, or a signal; None if the run is over while the script is still running."""
    while not over():
        event = events.next(_PERIOD)
        if event is not None:
            return event
    return events.next(_LAST_S)


def wait_for_new_trainers(events: Events, *, served: str, over: Callable[[], bool] = lambda: False) -> int | None:
    """Wait until a rank 0 is announced at an address that is not ``served``.

    Every training context has a different address, even in the same process. The address of the next context may
    already be announced.

    Args:
        events: The event queue; a signal ends the wait.
        served: The address of the rank 0 that has received all batches.
        over: Returns whether the run is finished or has stopped. In this case, no new trainer follows.

    Returns:
        The number of the signal that ended the wait; None if a new rank 0 is announced, or the run is over.
    """
    from persia.discovery import services

    discovery = services.connect()
    try:
        while True:
            try:
                trainers = services.trainers(discovery)
            except UnreachableError:  # discovery already logs that NATS is unreachable
                trainers = []
            if any(str(peer["index"]) == "0" and peer["address"] not in {"", served} for peer in trainers):
                return None
            event = events.next(_PERIOD)
            if isinstance(event, int):
                return event
            if over():
                return None
    finally:
        discovery.close()


def _say(line: str) -> None:
    sys.stderr.write(f"persia-launcher: {line}\n")
    sys.stderr.flush()
