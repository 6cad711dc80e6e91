"""The part of the feed that trainers and data-compose share."""

from persia.runtime.settings import settings

PROTOCOL = 1
"""The version of the protocol. A trainer refuses data-compose of another version."""

MAX_BATCH_BYTES = 1 << 30
"""The maximum size of an encoded batch; equals the limit of a request in ``persia_types::limits``."""

MAX_REPLICAS = 256
"""The maximum number of data-compose replicas; equals the limit of a server's connections in
``persia_types::limits``."""


def sender_name(index: int) -> str:
    """Return the name of a sender for messages. Without a job, the only sender is the data script in this process."""
    return "the data script" if settings.nats_url is None else f"data-compose replica {index}"


class Stopped(BaseException):
    """Raised when the trainers have stopped accepting batches.

    ``DataCtx`` ends its block and suppresses the exception.
    """


class RunRestarted(BaseException):
    """Raised when the trainers have started a new generation. The data script must then restart.

    The launcher restarts it.
    """
