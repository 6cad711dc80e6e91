"""Batches on their way from data-compose to trainers.

A batch waits in one place only: the :class:`persia.feed.inbox.Inbox` of the rank that will train on it.

* :mod:`persia.feed.inbox`: the trainer's side: batches of all replicas, merged in turn
* :mod:`persia.feed.server`: fills the inbox of a rank over gRPC (``PERSIA_NATS_URL`` is set)
* :mod:`persia.feed.script`: fills it from a data script in a thread of this process (embedded mode)
* :mod:`persia.feed.sender`: data-compose's side: one stream to each rank, in :mod:`persia.feed.stream`
* :mod:`persia.feed.replay`: whether a script that starts again sends the same batches
* :mod:`persia.feed.channel`: tokens and TLS of gRPC
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persia.feed.server import FeedServer

PROTOCOL = 1
"""Number of the protocol; sides with different numbers refuse each other."""

MAX_BATCH_BYTES = 1 << 30
"""A batch on the wire; as the limit of a request in ``persia_types::limits``."""

MAX_REPLICAS = 256
"""Data-compose replicas of a job, as many as connections of a server in ``persia_types::limits``."""

SERVED = "PERSIA_LAUNCHER_SERVED"
"""Variable by which the launcher names a file; the address of the rank 0 that gets the batches is written to it."""


class Stopped(BaseException):
    """No batch is wanted any more; ends the ``with DataCtx()`` block, which swallows it."""


class RunRestarted(BaseException):
    """The trainers began a new generation of the run: the data script has to start again.

    The launcher catches it and runs the script once more.
    """


def serve(job: str, *, host: str) -> "FeedServer":
    """Listen for the batches of data-compose, on a free port.

    The server is made before the rank is announced, so that its address is known; senders wait until
    :meth:`~persia.feed.server.FeedServer.welcome` says which generation began, and until the rank's data loader asks for
    its first batch.

    Args:
        job: The job's name; senders of another one are refused.
        host: Where data-compose reaches this process. Without ``PERSIA_TOKEN_FILE`` it is loopback whatever is given.

    Raises:
        AuthError: The token file cannot be read.
        ConfigError: A certificate file cannot be read.
        UnreachableError: It cannot listen there.
    """
    from persia.feed.server import FeedServer

    return FeedServer(job, host=host)
