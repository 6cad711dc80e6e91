"""The time spent on look-ups, pushes and waiting for other ranks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from persia.distributed.wrapped import averaged_bytes
from persia.profile.profiler import percentile
from persia.runtime import flight
from persia_core.engine import Engine

_VERBS = (flight.DATA_WAIT, flight.LOOK_UP, flight.PUSH, *flight.TOGETHER)


class Comm:
    """The communication of this process.

    Args:
        engine: Returns the engine.
        model: Returns the model as it is trained.
    """

    def __init__(self, engine: Callable[[], Engine], model: Callable[[], torch.nn.Module | None]) -> None:
        self._engine, self._model = engine, model

    def stats(self) -> dict[str, Any]:
        """Return counts and times, JSON-serializable.

        Returns:
            ``calls``: for each kind of call of the training loop (wait for data, look-up, push, all-reduce, agreement,
            collective), its ``count`` and ``seconds`` since the first loop of the process started. ``p50_ms`` and
            ``p99_ms`` are those of the latest calls. These are times of the loop; look-ups and pushes run concurrently.
            ``engine``: the seconds that each stage of the engine took in its own threads: ``lookup`` and ``push`` are
            requests to the tables, ``permit_wait`` is the wait that the staleness limit causes. ``lookups``,
            ``pushes``: the counters of ``engine.stats()``. ``staleness``: steps in flight. ``dense_bytes``: with
            ``dist.regions`` or ``dist.compression``, the bytes that this rank has passed to collectives of dense
            gradients so far: ``gradients`` in float32, ``in_region`` and ``across_regions`` as they were sent (without
            regions, all bytes count as ``across_regions``); otherwise None.

        Raises:
            UsageError: The context or trainer currently has no engine.
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
        sent = averaged_bytes(self._model())
        return {
            "calls": calls,
            "engine": seconds,
            "lookups": lookups,
            "pushes": pushes,
            "staleness": staleness,
            "dense_bytes": None if sent is None else dataclasses.asdict(sent),
        }
