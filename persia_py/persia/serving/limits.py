"""The limits of a serving process: sizes, rows, waiting requests, and time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a serving process.

    Attributes:
        body_bytes: The maximum size of a request, in bytes.
        request_rows: The maximum number of rows of one request.
        waiting: The maximum number of accepted requests without a response; further requests are refused.
        waiting_bytes: The maximum total size of these requests, in bytes; further requests are refused.
        batch_rows: The maximum number of rows that are scored together. A request with more rows is scored alone.
        batch_delay_s: Seconds that a batch with fewer rows waits for more requests. 0 takes only requests that are
            already waiting.
        timeout_s: Seconds within which a request must arrive. A complete request that waits longer than this for its
            batch is refused.
        drain_s: Seconds after a signal during which the process is not ready but still serves new requests.
        connections: The maximum number of open HTTP connections; further connections are refused.
    """

    body_bytes: int = 8 << 20
    request_rows: int = 10_000
    waiting: int = 1_024
    waiting_bytes: int = 256 << 20
    batch_rows: int = 1_024
    batch_delay_s: float = 0.0
    timeout_s: float = 10.0
    drain_s: float = 0.0
    connections: int = 1_024
