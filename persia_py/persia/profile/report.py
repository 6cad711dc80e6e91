"""The report of a profile: the times of each rank's steps, and one line of advice."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from persia.profile.advice import advise
from persia.profile.profiler import FOLDER, MEMORY
from persia.profile.stages import shares, stages
from persia.runtime.errors import UsageError

_SHOWN = 8
"""The maximum number of missing ranks that a message lists."""


@dataclass(frozen=True)
class RankProfile:
    """The record of a rank.

    Attributes:
        rank: The rank.
        content: The content of the file of the rank, see :class:`persia.profile.profiler.Profiler`.
        stages: The seconds spent in each stage of the recorded steps.
    """

    rank: int
    content: dict[str, Any]
    stages: dict[str, float]

    @classmethod
    def read(cls, path: Path) -> "RankProfile":
        """Read the file of a rank.

        Raises:
            UsageError: The file cannot be read, or is damaged.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            calls = {verb: float(each["seconds"]) for verb, each in content["calls"].items()}
            found = stages(calls, float(content["seconds"]), content["engine"], staleness=int(content["staleness"]))
            return cls(int(content["rank"]), content, found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damage = f"the file is damaged, or of another version of Persia ({type(error).__name__}: {error})"
            why, hint = damage, "record the profile again: persia train persia.yml --profile"
            if isinstance(error, OSError):
                why, hint = error.strerror or str(error), "check the owner of the file and its permissions"
            raise UsageError(f"cannot read a profile of a rank from {path}: {why}", hint=hint) from error

    @property
    def shares(self) -> dict[str, float]:
        """The share of each stage."""
        return shares(self.stages)


def read(folder: Path) -> list[RankProfile]:
    """Read the profile of a run, ordered by rank.

    Args:
        folder: The folder of a profile, or of a run that has one.

    Raises:
        UsageError: The folder has no profile, the profile is damaged, or files of ranks are missing.
    """
    place = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    found = sorted((RankProfile.read(path) for path in place.glob("rank-*.json") if _is_times(path)), key=_rank)
    if not found:
        raise UsageError(
            f"{folder} has no profile",
            hint="record one: persia train persia.yml --profile; for a job, add the block `profile: {}` to persia.yml",
        )
    size = int(found[0].content["world_size"])
    missing = sorted({*range(size)} - {each.rank for each in found})
    if missing or len(found) > size:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        ranks = ", ".join(map(str, missing[:_SHOWN]))
        lacks = (
            f"found none of rank{'s' * (len(missing) > 1)} {ranks}{more}: if a rank ended with an error, record the "
            "profile again; if it ran on another machine, copy its rank-N.json to this folder"
        )
        problem = lacks if missing else f"found those of {len(found)}: remove the files of an older run"
        raise UsageError(f"{place}: expected the files of {size} rank{'s' * (size > 1)}, {problem}")
    return found


def show_steps(profiles: list[RankProfile], console: Console | None = None) -> None:
    """Print a table of the calls in a step, for each rank."""
    console = console or Console()
    for each in profiles:
        content = each.content
        first, last = content["steps"]
        title = f"rank {each.rank}: steps {first} to {last}"
        table = Table("", "share", "p50 ms", "p99 ms", title=title if len(profiles) > 1 else title.partition(": ")[2])
        rows = sorted(content["calls"].items(), key=lambda item: -item[1]["seconds"])
        for verb, row in [*rows, ("step", content["step"])]:
            table.add_row(verb, f"{row['share']:.1%}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}")
        console.print(table)


def memory_tables(folder: Path) -> str:
    """Return the operations that allocate most, for each rank that has recorded them.

    Args:
        folder: The folder of a profile, or of a run that has one.

    Raises:
        UsageError: No rank has recorded them.
    """
    place = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    found = sorted(place.glob(f"rank-*.{MEMORY}"), key=lambda path: int(path.name.split(".")[0][5:]))
    if not found:
        raise UsageError(
            f"the profile in {folder} has no record of memory",
            hint="record memory: persia train persia.yml --profile --set profile.memory=true",
        )
    return "\n".join(f"rank {path.name.split('.')[0][5:]}\n{path.read_text(encoding='utf-8')}" for path in found)


def show_report(profiles: list[RankProfile], console: Console | None = None) -> None:
    """Print the share of each stage on each rank, and the advice as the last line."""
    console = console or Console()
    table = Table("", "p50 ms", "p99 ms", *profiles[0].stages, title="share of the time, and milliseconds per step")
    for each in profiles:
        step = each.content["step"]
        parts = [f"{share:.0%}" for share in each.shares.values()]
        table.add_row(f"rank {each.rank}", f"{step['p50_ms']:.2f}", f"{step['p99_ms']:.2f}", *parts)
    console.print(table)
    console.print(str(advise(profiles)), markup=False, highlight=False, soft_wrap=True)


def _is_times(path: Path) -> bool:
    return not path.name.endswith(".pt.trace.json")


def _rank(profile: RankProfile) -> int:
    return profile.rank
