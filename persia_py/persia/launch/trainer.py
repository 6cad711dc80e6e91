"""The ranks of one trainer replica: started together, watched, ended together."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from persia.launch.process import Process
from persia.launch.watch import SAVING_GRACE, Events, stop
from persia.runtime import job
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import AGAIN
from persia.runtime.settings import settings

_OWN_CODES = {2, 3, 4, 5, 70}
"""Exit codes of a rank that say more than 75: configuration, unreachable, corrupt, refused, hung."""

_NOTICE = 5.0
"""Seconds that ranks have to end by themselves once one has failed."""

_output = threading.Lock()


def run(script: Path, arguments: Sequence[str], *, ranks: int, node: int, nodes: int) -> int:
    """Run the ranks of this replica to their end.

    Args:
        script: What each rank runs.
        arguments: Its arguments.
        ranks: How many ranks this replica has.
        node: This replica's index.
        nodes: How many replicas there are.

    Returns:
        The exit code: 0 when every rank came to its end, or the run was finished before.

    Raises:
        UsageError: The numbers, or ``CUDA_VISIBLE_DEVICES``, do not fit.
    """
    if ranks < 1 or nodes < 1 or not 0 <= node < nodes:
        raise UsageError(
            f"node rank {node} of {nodes} nodes with {ranks} ranks each: want a node rank of 0 to "
            f"{max(nodes, 1) - 1}, and at least one node and rank (REPLICA_INDEX, REPLICA_SIZE, GPU_NUM)"
        )
    _check_devices(ranks)
    folder = job.run_dir() if settings.nats_url is not None else None
    if folder is not None and (summary := job.finished_summary(folder, of=job.job_name())) is not None:
        say_finished(folder, summary)
        return 0
    events = Events()
    with events.signals():
        started = [
            Process(
                f"rank {node * ranks + local}",
                [sys.executable, "-m", "persia.launch.rank", str(script), *arguments],
                env={**os.environ, **_place(local, ranks=ranks, node=node, nodes=nodes)},
                line=_prefixed(f"[rank {node * ranks + local}]") if ranks > 1 else None,
                ended=events.ended,
            )
            for local in range(ranks)
        ]
        return _watch(started, events, folder)


def _watch(ranks: Sequence[Process], events: Events, folder: Path | None) -> int:
    left = set(ranks)
    while left:
        event = events.next()
        if isinstance(event, int):
            _say(f"{signal.Signals(event).name}: ending {len(left)} rank(s)")
            stop(left, events, grace=SAVING_GRACE, say=_say)
            finished = folder is not None and job.finished_summary(folder, of=job.job_name()) is not None
            return 0 if finished else AGAIN
        if isinstance(event, Process):
            left.discard(event)
            if event.code != 0:
                _say(f"{event.name} {event.how()}" + (", ending the others" if left else ""))
                _let_them_notice(left, events)
                stop(left, events, say=_say)
                codes = [_code(rank.code) for rank in (event, *(other for other in ranks if other is not event))]
                return next((code for code in codes if code in _OWN_CODES), codes[0])
    return 0


def _let_them_notice(left: set[Process], events: Events) -> None:
    """Give ranks that learn of another's end time to say why they end: the cause may be theirs."""
    deadline = time.monotonic() + _NOTICE
    while left and (seconds := deadline - time.monotonic()) > 0:
        event = events.next(seconds)
        if isinstance(event, int):
            return
        if isinstance(event, Process):
            left.discard(event)


def _code(code: int) -> int:
    # 1 is an exception of the script itself: starting it again would raise it again
    return code if code == 1 or code in _OWN_CODES else AGAIN


def _place(local: int, *, ranks: int, node: int, nodes: int) -> dict[str, str]:
    return {
        "RANK": str(node * ranks + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(node),
    }


def _check_devices(ranks: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = os.environ.get("GPU_NUM", "").strip()
    if visible is None or not gpus.isdecimal() or int(gpus) == 0:
        return
    devices = [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    if len(set(devices)) < ranks:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={visible!r} names {len(set(devices))} device(s), but {ranks} rank(s) want one each "
            f"(GPU_NUM={gpus})"
        )


def say_finished(folder: Path, summary: dict[str, Any]) -> None:
    """Print that the run in this folder is finished, its summary, and how to train again."""
    path = folder / job.SUMMARY
    sys.stdout.write(
        f"this run is finished: {path}\n{json.dumps(summary, indent=1)}\n"
        f"to train again, give PERSIA_RUN_DIR another folder, or: rm {path}\n"
    )
    sys.stdout.flush()


def _prefixed(prefix: str) -> Callable[[str], None]:
    def write(line: str) -> None:
        with _output:
            sys.stdout.write(f"{prefix} {line}\n")
            sys.stdout.flush()

    return write


def _say(line: str) -> None:
    with _output:
        sys.stderr.write(f"persia-launcher: {line}\n")
        sys.stderr.flush()
