"""Recognizes failed collectives of torch in a log, from the messages of NCCL's watchdog and of gloo."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from persia.doctor.log_lines import Line

_WATCHDOG = re.compile(
    r"[Rr]ank (?P<rank>\d+)\]\s+Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)[^)]*Timeout\(ms\)=(?P<ms>\d+)\)"
)
_GLOO = re.compile(r"Timed out waiting (?P<ms>\d+)ms for (?P<operation>recv|send) operation to complete")
_SETUP = re.compile(r"DistBackendError.*NCCL error|NCCL error.*(unhandled|system error|no socket interface found)")
_SIZE = re.compile(r"\brank \d+ of (\d+)\b|\bworld_size=(\d+)\b")


@dataclass
class Failed:
    """The failed collectives that a log reports.

    Attributes:
        waited: The ranks whose wait has timed out, each with the name and number of the collective.
        seconds: How long they have waited.
        ranks: All ranks of the run that the log names.
        setup: The first line that reports an error of NCCL other than a timeout; empty if there was no such error.
    """

    waited: dict[int, tuple[str, int]] = field(default_factory=dict)
    seconds: float = 0.0
    ranks: set[int] = field(default_factory=set)
    setup: str = ""

    def note(self, line: Line) -> None:
        """Read a line."""
        text = line.text
        if line.rank is not None:
            self.ranks.add(line.rank)
        if (size := _SIZE.search(text)) is not None:
            self.ranks |= set(range(min(int(size[1] or size[2]), 4096)))
        if (found := _WATCHDOG.search(text)) is not None:
            rank, self.seconds = int(found["rank"]), int(found["ms"]) / 1000
            self.ranks.add(rank)
            self.waited.setdefault(rank, (found["operation"], int(found["number"])))
        elif (found := _GLOO.search(text)) is not None and line.rank is not None:
            self.seconds = int(found["ms"]) / 1000
            self.waited.setdefault(line.rank, (f"a {found['operation']} of gloo", 0))
        elif _SETUP.search(text) is not None:
            self.setup = self.setup or text.strip()

    def lines(self) -> list[str]:
        """Return lines about the failed collective, its ranks, the other ranks and the next step.

        The list is empty if nothing failed.
        """
        if self.waited:
            return self._of_wait()
        if self.setup:
            from persia.distributed.network import suggestion

            return [
                f"recognized: NCCL failed, often because it cannot connect: {self.setup}",
                f"next:  {suggestion()}; without InfiniBand also NCCL_IB_DISABLE=1; NCCL_DEBUG=INFO logs its attempts",
            ]
        return []

    def _of_wait(self) -> list[str]:
        last = max(number for _, number in self.waited.values())
        there = {rank: name for rank, (name, number) in sorted(self.waited.items()) if number == last}
        behind = {rank: each for rank, each in sorted(self.waited.items()) if each[1] != last}
        absent = sorted(self.ranks - set(self.waited))
        name = next(iter(there.values()))
        what = f"{name} number {last}" if last else name
        text = f"recognized: a collective timed out after {self.seconds:g} s: {what}; in it: {_ranks(there)}"
        text += "".join(f"; rank {rank} only in {name} number {number}" for rank, (name, number) in behind.items())
        if absent:
            text += f"; not in it: {_ranks(absent)}, which the others waited for"
        elif not behind:
            text += "; all ranks were in it: check the network between them"
        size = max(self.ranks) + 1
        return [text, f"next:  check the connections between the ranks: persia doctor --matrix {max(size, 2)}"]


def _ranks(ranks: Iterable[int]) -> str:
    listed = [*ranks]
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
