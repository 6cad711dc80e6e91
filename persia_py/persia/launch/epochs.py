"""Noticing that trainers of a new epoch are up."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from persia import job
from persia.launch.process import Process
from persia.launch.watch import Events

_PERIOD = 2.0
"""Seconds between two looks at who is there."""
_ASK = 1.0
"""Seconds given to the answers of one look."""


def wait_for_new_trainers(events: Events) -> bool:
    """Wait until a rank 0 is up that was not when the wait began.

    Args:
        events: A signal among them ends the wait.

    Returns:
        Whether there is one; False after a signal.
    """
    from persia_core.discovery import Discovery

    discovery = Discovery(
        os.environ["PERSIA_NATS_URL"], job.job_name(), token_file=os.environ.get("PERSIA_TOKEN_FILE") or None
    )
    try:
        known = _identities(discovery.find("persia-trainer", _ASK))
        while True:
            event = events.next(_PERIOD)
            if isinstance(event, int):
                return False
            if isinstance(event, Process):
                continue
            if _identities(discovery.find("persia-trainer", _ASK)) - known:
                return True
    finally:
        discovery.close()


def _identities(trainers: Iterable[Mapping[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (str(trainer.get("host")), str(trainer.get("pid")), str(trainer.get("started")))
        for trainer in trainers
        if str(trainer.get("index")) == "0"
    }
