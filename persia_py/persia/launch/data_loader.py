"""One data-compose replica: its script, run once for each generation of the run."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from persia.launch.entry import check_replica
from persia.launch.generations import wait_for_new_trainers
from persia.launch.process import Process
from persia.launch.watch import Events, stop
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import AGAIN
from persia.runtime.settings import SERVED, settings


def run(script: Path, arguments: Sequence[str], *, index: int, size: int) -> int:
    """Run the script, and again for every new generation, until SIGTERM.

    Args:
        script: What sends the batches.
        arguments: Its arguments.
        index: This replica's index.
        size: How many replicas there are.

    Returns:
        0 after SIGTERM or SIGINT, else the exit code of the script that failed.

    Raises:
        UsageError: The index is not below the size, or PERSIA_NATS_URL is not set.
    """
    check_replica(index, size)
    if settings.nats_url is None:
        raise UsageError(
            "PERSIA_NATS_URL is not set: in the embedded mode the trainer runs the data script itself; "
            "start only the trainer, or give NATS's address"
        )
    events = Events()
    command = [sys.executable, "-m", "persia.launch.data", str(script), *arguments]
    with tempfile.TemporaryDirectory(prefix="persia-data-") as folder, events.signals():
        served = Path(folder) / "rank-0"
        environment = {**os.environ, "REPLICA_INDEX": str(index), "REPLICA_SIZE": str(size), SERVED: str(served)}
        while True:
            served.unlink(missing_ok=True)
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
                _say(f"the script {process.how()}")
                return process.code if process.code > 0 else AGAIN


def _say(line: str) -> None:
    sys.stderr.write(f"persia-launcher: {line}\n")
    sys.stderr.flush()
