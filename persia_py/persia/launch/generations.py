"""Noticing that trainers are up that have had no data yet."""

from persia.launch.watch import Events
from persia.runtime.errors import UnreachableError

_PERIOD = 2.0
"""Seconds between two looks at who is there."""


def wait_for_new_trainers(events: Events, *, served: str) -> bool:
    """Wait until a rank 0 is announced at another address than the one that was served.

    It may be another process, or another context of the same one, and may be there already.

    Args:
        events: A signal among them ends the wait.
        served: The address of the rank 0 that has got all batches.

    Returns:
        Whether there is one; False after a signal.
    """
    from persia.discovery import services

    discovery = services.connect()
    try:
        while True:
            try:
                trainers = services.trainers(discovery)
            except UnreachableError:  # NATS is away, which discovery logs
                trainers = []
            if any(str(peer["index"]) == "0" and peer["address"] not in {"", served} for peer in trainers):
                return True
            event = events.next(_PERIOD)
            if isinstance(event, int):
                return False
    finally:
        discovery.close()
