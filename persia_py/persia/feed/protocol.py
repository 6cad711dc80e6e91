"""What both sides of a feed know."""

PROTOCOL = 1
"""Number of the protocol; sides with different numbers refuse each other."""

MAX_BATCH_BYTES = 1 << 30
"""A batch on the wire; as the limit of a request in ``persia_types::limits``."""

MAX_REPLICAS = 256
"""Data-compose replicas of a job, as many as connections of a server in ``persia_types::limits``."""


class Stopped(BaseException):
    """No batch is wanted any more; ends the ``with DataCtx()`` block, which swallows it."""


class RunRestarted(BaseException):
    """The trainers began a new generation of the run: the data script has to start again.

    The launcher catches it and runs the script once more.
    """
