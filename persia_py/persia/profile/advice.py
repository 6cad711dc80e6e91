"""Finds the bottleneck of a run, and advises what to change, in one line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from persia.profile import stages as names
from persia.profile.servers import blame

SLOW_RANK = 0.25
"""The difference between the waits of ranks, as a share of a step, from which one rank counts as slow."""


class Measured(Protocol):
    """The profile of a rank: see :class:`persia.profile.report.RankProfile`."""

    @property
    def rank(self) -> int:
        """The rank."""

    @property
    def content(self) -> dict[str, Any]:
        """The record of one rank."""

    @property
    def shares(self) -> dict[str, float]:
        """The share of each stage."""


@dataclass(frozen=True)
class Advice:
    """The bottleneck of a run, and advice.

    Attributes:
        limit: One of :data:`persia.profile.stages.STAGES`.
        text: The meaning of the bottleneck, and what to change.
        rank: The slow rank; None if there is none.
    """

    limit: str
    text: str
    rank: int | None = None

    def __str__(self) -> str:
        """Return the line."""
        return f"limited by {self.limit}: {self.text}"


def advise(profiles: Sequence[Measured]) -> Advice:
    """Return the bottleneck of a run, with advice.

    The bottleneck is the stage with the largest share of the time, averaged over the ranks. If one rank waits much less
    than the others, the others wait for that rank. The bottleneck is then that rank, and the stage in which it spends
    its time. If look-ups or pushes limit the run and one server differs from the others, the advice names that server.
    """
    waits = {each.rank: each.shares[names.RANKS] for each in profiles}
    slow = min(profiles, key=lambda each: waits[each.rank])
    if max(waits.values()) - waits[slow.rank] >= SLOW_RANK:
        own = {stage: share for stage, share in slow.shares.items() if stage != names.RANKS}
        stage = max(own, key=lambda name: own[name])
        others = max(waits.values())
        text = (
            f"rank {slow.rank} is slow, and others wait for it during up to {others:.0%} of their time; it spends "
            f"{own[stage]:.0%} of its own time in {stage}: {_change(stage, slow.content)}"
        )
        return Advice(names.RANKS, text, slow.rank)
    shares = {stage: sum(each.shares[stage] for each in profiles) / len(profiles) for stage in names.STAGES}
    limit = max(shares, key=lambda name: shares[name])
    content = profiles[0].content
    change = blame(content.get("of_servers", {})) if limit in (names.LOOKUP, names.PUSH) else None
    return Advice(limit, f"{_MEANS[limit]} {shares[limit]:.0%} of the time: {change or _change(limit, content)}")


_MEANS = {
    names.DENSE: "the model and the script compute during",
    names.DATA: "training waits for batches during",
    names.LOOKUP: "training waits for look-ups during",
    names.PUSH: "look-ups wait for pushes during",
    names.RANKS: "all ranks wait for each other and for the network during",
    names.CHECKPOINT: "training is stopped for checkpoints during",
}


def _change(stage: str, content: dict[str, Any]) -> str:
    """Return advice on what to change: a key of ``persia.yml``, and for a script also the corresponding argument."""
    in_script = "threads" not in content  # only persia train records its settings, such as ``threads``
    staleness, servers = int(content["staleness"]), bool(content["servers"])
    if stage == names.DATA:
        if servers:
            return "start more data-compose replicas (persia up --data-compose N)"
        return "read Parquet rather than text, or let other processes read: persia up persia.yml --data-compose N"
    if stage == names.LOOKUP:
        if servers:
            return (
                "start more servers (persia up --servers N), halve the bytes (wire_dtype: f16 in global_config.yml), "
                "or check the network"
            )
        return "reduce the dim of features, or start servers: persia up persia.yml --servers N"
    if stage == names.PUSH:
        if content.get("reproducible"):
            return "remove train.reproducible, which limits train.staleness to 1, so that look-ups run ahead of pushes"
        if staleness == 1:
            text = "raise train.staleness from 1, to 4 for example, so that look-ups run ahead of pushes"
        else:
            more = ", or start more servers (persia up --servers N)" if servers else ""
            text = f"raise train.staleness from {staleness} to {2 * staleness}{more}"
        return text + ("; in a script, set embedding_staleness of the DataLoader" if in_script else "")
    if stage == names.RANKS:
        return "raise data.batch_size so that ranks synchronize less often, or use a faster network (dist.interface)"
    if stage == names.CHECKPOINT:
        return "raise checkpoint.every" + (" (in a script, every of Checkpoints)" if in_script else "")
    threads = content.get("threads")
    given = " (in a script, torch.set_num_threads)" if in_script else "" if threads is None else f" from {threads}"
    return f"raise train.threads{given}, use a GPU or more ranks, or make the model smaller"
