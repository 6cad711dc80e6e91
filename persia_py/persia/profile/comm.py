"""What look-ups, pushes and other ranks have cost so far."""

from collections.abc import Callable
from typing import Any

from persia.profile.profiler import percentile
from persia.runtime import flight
from persia_core.engine import Engine

_VERBS = (flight.DATA_WAIT, flight.LOOK_UP, flight.PUSH, *flight.TOGETHER)


class Comm:
    """The communication of this process.

    Args:
        engine: Returns the engine.
    """

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine

    def stats(self) -> dict[str, Any]:
        """Return counts and times, JSON-ready.

        Returns:
            ``calls``: for each call of the training loop (wait for data, look-up, push, all-reduce, agreement,
            collective) its ``count`` and ``seconds`` since the process started, and ``p50_ms`` and ``p99_ms`` of the
            last ones. They are the time of the loop: look-ups and pushes go on beside it. ``engine``: the seconds that
            each stage of the engine took in its own threads: ``lookup`` and ``push`` are requests to the tables,
            ``permit_wait`` is what the staleness holds back. ``lookups``, ``pushes``: the counters of
            ``engine.stats()``. ``staleness``: pushes in flight.

        Raises:
            UsageError: The context or trainer has no engine now.
        """
        engine = self._engine().stats()
        counts, totals, last = flight.counts(), flight.totals(), flight.last_seconds()
        calls = {
            verb: {
                "count": counts.get(verb, 0),
                "seconds": round(totals.get(verb, 0.0), 6),
                "p50_ms": round(1e3 * percentile(last.get(verb, []), 0.5), 3),
                "p99_ms": round(1e3 * percentile(last.get(verb, []), 0.99), 3),
            }
            for verb in _VERBS
        }
        names = ("seconds", "lookups", "pushes", "staleness")
        seconds, lookups, pushes, staleness = (engine[name] for name in names)
        return {"calls": calls, "engine": seconds, "lookups": lookups, "pushes": pushes, "staleness": staleness}
