"""The stages of a training step, from the calls of the flight recorder."""

from collections.abc import Mapping
from typing import Any

from persia.runtime import flight

DENSE, DATA, LOOKUP, PUSH, RANKS, CHECKPOINT = "dense", "data", "lookup", "push", "ranks", "checkpoint"
STAGES = (DENSE, DATA, LOOKUP, PUSH, RANKS, CHECKPOINT)
"""The stages in which a training loop spends its time.

* ``dense``: the model and the rest of the script: forward, backward, optimizer
* ``data``: waiting for a batch, which is read and transformed
* ``lookup``: waiting for a look-up: planning, servers or tables, pooling
* ``push``: waiting for a look-up that the staleness limit delays until a push is acknowledged
* ``ranks``: waiting for other ranks: all-reduce of dense gradients, agreements
* ``checkpoint``: making a checkpoint
"""

_STAGE_OF = {
    flight.DATA_WAIT: DATA,
    flight.LOOK_UP: LOOKUP,
    flight.CHECKPOINT: CHECKPOINT,
    flight.WRITE: CHECKPOINT,
    **dict.fromkeys(flight.TOGETHER, RANKS),
}


def stages(calls: Mapping[str, float], whole: float, engine: Mapping[str, Any], *, staleness: int) -> dict[str, float]:
    """Return the seconds of each of :data:`STAGES`.

    The wait for look-ups counts as waiting for pushes if the staleness delayed look-ups longer than they took. The same
    applies if the staleness is 1, because no look-up then starts before the push of the previous step is acknowledged.

    Args:
        calls: The seconds of each verb of the flight recorder.
        whole: The total seconds.
        engine: The seconds of each stage of the engine, from its statistics.
        staleness: The staleness K.
    """
    found = dict.fromkeys(STAGES, 0.0)
    for verb, seconds in calls.items():
        if (stage := _STAGE_OF.get(verb)) is not None:
            found[stage] += seconds
    found[DENSE] = max(0.0, whole - sum(found.values()))
    served = sum(float(engine.get(name, 0.0)) for name in ("plan", "lookup", "pool"))
    if staleness == 1 or float(engine.get("permit_wait", 0.0)) > served:
        found[PUSH], found[LOOKUP] = found[LOOKUP], 0.0
    return found


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each stage; 0 if the total time is 0."""
    whole = sum(seconds.values())
    return {name: value / whole if whole else 0.0 for name, value in seconds.items()}


def difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each name since ``before``."""
    return {name: float(value) - float(before.get(name, 0.0)) for name, value in now.items()}
