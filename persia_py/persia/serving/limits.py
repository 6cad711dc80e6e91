"""What bounds a serving process: sizes, rows, waiting requests, and time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a serving process.

    Attributes:
        body_bytes: The largest request, in bytes.
        request_rows: The most rows of one request.
        waiting: The most requests that are accepted and not answered yet; more are refused.
        waiting_bytes: The most bytes of such requests; more are refused.
        batch_rows: The rows that are scored together. A request with more rows is scored alone.
        batch_delay_s: Seconds that a batch with fewer rows waits for more requests. 0 takes those that wait already.
        timeout_s: Seconds in which a request must arrive, and in which it must be answered.
        connections: The most open HTTP connections; more are refused.
    """

    body_bytes: int = 8 << 20
    request_rows: int = 10_000
    waiting: int = 1_024
    waiting_bytes: int = 256 << 20
    batch_rows: int = 1_024
    batch_delay_s: float = 0.0
    timeout_s: float = 10.0
    connections: int = 1_024
