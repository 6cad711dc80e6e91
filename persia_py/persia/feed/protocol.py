"""The part of the feed that trainers and data-compose share."""

PROTOCOL = 1
"""Version of the protocol. A trainer refuses data-compose of another version."""

MAX_BATCH_BYTES = 1 << 30
"""Limit of an encoded batch; as the limit of a request in ``persia_types::limits``."""

MAX_REPLICAS = 256
"""Limit of data-compose replicas; as the limit of a server's connections in ``persia_types::limits``."""


class Stopped(BaseException):
    """The trainers accept no more batches. ``DataCtx`` ends its block and suppresses it."""


class RunRestarted(BaseException):
    """The trainers began a new generation of the run, so the data script has to restart. The launcher restarts it."""
