"""One data-compose replica: run its script once for each generation of the run."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from persia.launch.process import Process
from persia.launch.supervision import Events, stop
from persia.runtime.errors import UnreachableError, UsageError
from persia.runtime.exit_codes import AGAIN
from persia.runtime.settings import SERVED, settings

_PERIOD = 2.0
"""Seconds between two queries to NATS for new trainers."""


def run(script: Path | None, arguments: Sequence[str], *, index: int, size: int) -> int:
    """Run the script, and restart it for every new generation, until SIGTERM.

    Args:
        script: The data script; None sends the rows of ``PERSIA_CONFIG``.
        arguments: Its arguments.
        index: The index of this replica.
        size: The number of replicas.

    Returns:
        0 after SIGTERM or SIGINT, else the exit code of the script that failed.

    Raises:
        UsageError: ``PERSIA_NATS_URL`` is empty.
    """
    if settings.nats_url is None:
        raise UsageError(
            "PERSIA_NATS_URL is empty: in embedded mode the training script runs the data script itself; "
            "start only `python train.py`, or set PERSIA_NATS_URL"
        )
    events = Events()
    words = [] if script is None else [str(script), *arguments]
    command = [sys.executable, "-m", "persia.launch.data_loader_main", *words]
    with os.fdopen(os.memfd_create("persia-served"), "rb") as memory, events.signals(last=True):
        # The kernel removes it with this process, however that ends: a temporary folder would stay.
        served = Path(f"/proc/{os.getpid()}/fd/{memory.fileno()}")
        environment = {**os.environ, "REPLICA_INDEX": str(index), "REPLICA_SIZE": str(size), SERVED: str(served)}
        while True:
            served.write_bytes(b"")
            process = Process("data-compose", command, env=environment, line=None, ended=events.ended)
            event = events.next()
            if isinstance(event, int):
                stop([process], events, say=_say)
                return 0
            if process.code == 0:
                _say("every batch is sent; waiting for the next generation of the run")
                if not wait_for_new_trainers(events, served=served.read_text(encoding="utf-8")):
                    return 0
            elif process.code != AGAIN:
                _say(f"the script {process.outcome()}")
                return process.code if process.code > 0 else AGAIN


def wait_for_new_trainers(events: Events, *, served: str) -> bool:
    """Wait until a rank 0 is announced at another address than ``served``.

    Every training context has a different address, also in the same process. The new one may be announced already.

    Args:
        events: A signal among them ends the wait.
        served: The address of the rank 0 that has received all batches.

    Returns:
        True if there is a new one, False after a signal.
    """
    from persia.discovery import services

    discovery = services.connect()
    try:
        while True:
            try:
                trainers = services.trainers(discovery)
            except UnreachableError:  # discovery logs that NATS is unreachable
                trainers = []
            if any(str(peer["index"]) == "0" and peer["address"] not in {"", served} for peer in trainers):
                return True
            event = events.next(_PERIOD)
            if isinstance(event, int):
                return False
    finally:
        discovery.close()


def _say(line: str) -> None:
    sys.stderr.write(f"persia-launcher: {line}\n")
    sys.stderr.flush()
