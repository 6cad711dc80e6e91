"""The ranks of one trainer replica: starts, supervises and stops them together."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from persia.launch import threads
from persia.launch.process import Process
from persia.launch.supervision import SAVING_GRACE, Events, stop, stopped_by
from persia.runtime import environment, job
from persia.runtime.errors import ConfigError, UsageError
from persia.runtime.exit_codes import AGAIN, ExitCode
from persia.runtime.settings import settings

_OWN_CODES = {
    *(ExitCode.CONFIG, ExitCode.UNREACHABLE, ExitCode.CORRUPT, ExitCode.REFUSED, ExitCode.HUNG),
    ExitCode.INTERRUPTED,  # the user ended the run at a breakpoint
}
"""Exit codes of a rank that are returned unchanged, because they are more specific than :attr:`ExitCode.AGAIN`."""

_NOTICE = 5.0
"""Seconds that the other ranks have to end by themselves after one has failed."""

_output = threading.Lock()


def run(script: Path | None, arguments: Sequence[str], *, ranks: int, node: int, nodes: int) -> int:
    """Run the ranks of this replica until they end.

    Args:
        script: The script that each rank runs; None trains from ``PERSIA_CONFIG``.
        arguments: The arguments of the script.
        ranks: The number of ranks of this replica.
        node: The index of this replica.
        nodes: The number of replicas.

    Returns:
        The exit code. It is 0 if every rank ended with 0, or if ``PERSIA_RUN_DIR`` names a run that is already
        finished. After a signal, it is the code of :func:`persia.launch.supervision.stopped_by`. After a failure, it is
        the code of a failed rank if that is specific, otherwise 75. Without ``PERSIA_RUN_DIR``, every start is a new
        run.

    Raises:
        ConfigError: The summary of the last run cannot be read or renamed.
        UsageError: The arguments contradict each other, or ``CUDA_VISIBLE_DEVICES`` lists too few devices.
    """
    if ranks < 1 or nodes < 1 or not 0 <= node < nodes:
        raise UsageError(
            f"--node-rank {node} --nnodes {nodes} --nproc-per-node {ranks}: expected a node rank from 0 to "
            f"{max(nodes, 1) - 1}, at least 1 node and at least 1 rank per node",
            hint="correct these options, or REPLICA_INDEX, REPLICA_SIZE and GPU_NUM, which are their defaults",
        )
    environment.check_devices(ranks, "GPU_NUM or --nproc-per-node")
    folder = job.run_dir() if settings.nats_url is not None else None
    if folder is not None and (summary := job.finished_summary(folder, of=job.job_name())) is not None:
        if settings.run_dir is not None:
            report_finished(folder, summary)
            return 0
        if node == 0:
            _set_aside(folder / job.SUMMARY)
    events = Events()
    words = [] if script is None else [str(script), *arguments]
    shared = threads.variables(ranks, "rank", _say, os.environ, replicas=settings.host_replicas)
    with events.signals(last=True):
        started = [
            Process(
                f"rank {node * ranks + local}",
                [sys.executable, "-m", "persia.launch.rank_main", *words],
                env={**os.environ, **shared, **_rank_variables(local, ranks=ranks, node=node, nodes=nodes)},
                line=_print_with_prefix(f"[rank {node * ranks + local}]") if ranks > 1 else None,
                ended=events.ended,
            )
            for local in range(ranks)
        ]
        return supervise(started, events, folder)


def supervise(ranks: Sequence[Process], events: Events, folder: Path | None) -> int:
    """Wait for ranks; stop all of them when one fails or this process receives a signal. Return the exit code.

    Args:
        ranks: The processes of the ranks.
        events: The events: ends of ranks, and signals.
        folder: The folder of the run, whose summary says whether it is finished; None if there is none.
    """
    left = set(ranks)
    while left:
        event = events.next()
        if isinstance(event, int):
            _say(f"{signal.Signals(event).name}: ending all ranks")
            stop(left, events, grace=SAVING_GRACE, say=_say)
            finished = folder is not None and job.finished_summary(folder, of=job.job_name()) is not None
            return 0 if finished else stopped_by(event)
        if isinstance(event, Process):
            left.discard(event)
            if event.code != 0:
                _say(f"{event.name} {event.outcome()}" + (", ending the others" if left else ""))
                _wait_for_other_failures(left, events)
                stop(left, events, say=_say)
                codes = [_exit_code(rank.code) for rank in (event, *(other for other in ranks if other is not event))]
                return next((code for code in codes if code in _OWN_CODES), codes[0])
    return 0


def _wait_for_other_failures(left: set[Process], events: Events) -> None:
    """Let the other ranks end by themselves, because one of them may report the cause."""
    deadline = time.monotonic() + _NOTICE
    while left and (seconds := deadline - time.monotonic()) > 0:
        event = events.next(seconds)
        if isinstance(event, int):
            return
        if isinstance(event, Process):
            left.discard(event)


def _exit_code(code: int) -> int:
    # FAILED means that the script raised an exception, which would occur again after a restart.
    return code if code == ExitCode.FAILED or code in _OWN_CODES else AGAIN


def _rank_variables(local: int, *, ranks: int, node: int, nodes: int) -> dict[str, str]:
    return {
        "RANK": str(node * ranks + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(node),
    }


def report_finished(
    folder: Path, summary: dict[str, Any], change: str = "set PERSIA_RUN_DIR to another folder"
) -> None:
    """Print that the run in this folder is finished, with its summary and the way to train again.

    Args:
        folder: The folder.
        summary: The content of its summary.
        change: The change that starts another run, for the message.
    """
    path = folder / job.SUMMARY
    sys.stdout.write(
        f"this run is finished: {path}\n{json.dumps(summary, indent=1)}\n"
        f"to train again, {change}, or: rm {shlex.quote(str(path))}\n"
    )
    sys.stdout.flush()


def _set_aside(summary: Path) -> None:
    """Rename the summary of the previous run, so that it does not appear to be the summary of this run."""
    previous = summary.with_name("summary-previous.json")
    try:
        summary.replace(previous)
    except OSError as error:
        raise ConfigError(
            f"cannot rename {summary}, the summary of the previous run, to {previous}: {error.strerror}",
            hint=f"move {summary} to another folder, then start the ranks again",
        ) from error
    _say(f"a new run begins; the summary of the previous run is now {previous}")


def _print_with_prefix(prefix: str) -> Callable[[str], None]:
    def write(line: str) -> None:
        with _output:
            sys.stdout.write(f"{prefix} {line}\n")
            sys.stdout.flush()

    return write


def _say(line: str) -> None:
    with _output:
        sys.stderr.write(f"persia-launcher: {line}\n")
        sys.stderr.flush()
