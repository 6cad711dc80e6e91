"""The part of the feed that trainers and data-compose share."""

PROTOCOL = 1
"""The version of the protocol. A trainer refuses data-compose of another version."""

MAX_BATCH_BYTES = 1 << 30
"""The maximum size of an encoded batch; equals the limit of a request in ``persia_types::limits``."""

MAX_REPLICAS = 256
"""The maximum number of data-compose replicas; equals the limit of a server's connections in
``persia_types::limits``."""


class Stopped(BaseException):
    """Raised when the trainers have stopped accepting batches.

    ``DataCtx`` ends its block and suppresses the exception.
    """


class RunRestarted(BaseException):
    """Raised when the trainers started a new generation, so that the data script must restart.

    The launcher restarts it.
    """
