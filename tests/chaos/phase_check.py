"""The verification of a run of :mod:`phase_train`: rows, admission counts, recency, generations, and values read.

At the end, either all values equal those of :mod:`phase_simulation`, or the run has reported that it stopped.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.ipc
import torch
from phase_data import DIM, TABLES, Data
from phase_job import PhaseJob
from phase_simulation import Key, Simulation, states

from persia_core import checkpoint

_SHOWN = 5


def problems(job: PhaseJob, data: Data) -> list[str]:
    """Return all deviations at the end of a run that exited with 0; empty if all values are exact."""
    simulated = list(states(data))
    saves = [each for each in job.checkpoints.glob("*/step-*") if (each / "MANIFEST.json").exists()]
    found = [*_missing(job, data, saves)]
    for save in saves:
        found += [f"{save.name}: {each}" for each in _wrong_in_save(save, simulated)]
    for number, entry in enumerate(job.lines("reads.jsonl")):
        found += [f"read {number} of rank {entry['rank']}: {each}" for each in _wrong_in_read(entry, data, simulated)]
    found += _wrong_generations(job, saves)
    return found


def compared(job: PhaseJob, data: Data) -> int:
    """Return how many rows, counts and values were compared."""
    simulated = list(states(data))
    saves = [each for each in job.checkpoints.glob("*/step-*") if (each / "MANIFEST.json").exists()]
    rows = sum(len(simulated[_step(save)].rows()) + len(simulated[_step(save)].counts()) for save in saves)
    return rows + len(job.lines("reads.jsonl")) * len(TABLES) * len(data.known())


def _step(save: Path) -> int:
    return int(save.name.removeprefix("step-"))


def _missing(job: PhaseJob, data: Data, saves: list[Path]) -> Iterator[str]:
    """Yield the results that a finished run lacks or has wrong, and the files that it has left behind."""
    last = job.plan["steps"]
    if not any(_step(save) == last for save in saves) and not job.lost("checkpoints"):
        yield f"the trainers ended with 0 without a checkpoint of step {last}"
    if not any(entry["step"] == last for entry in job.lines("reads.jsonl")):
        yield f"the rows after step {last} were never read"
    summary = job.summary
    if not summary and not job.lost("run"):
        yield "the trainers ended with 0 without a summary"
    if summary and (summary["status"], summary["steps"]) != ("finished", data.steps):
        yield f"the summary says {summary}"
    left = [path for path in job.checkpoints.glob("*/step-*/.saving-*") if any(path.iterdir())]
    if left and not job.gave_up_a_save:
        yield f"left behind: {', '.join(f'{path.parent.name}/{path.name}' for path in left)}"


def _wrong_in_save(save: Path, simulated: list[Simulation]) -> Iterator[str]:
    problem = next(each["problem"] for each in checkpoint.listing(save.parent) if Path(each["path"]) == save)
    if problem is not None:
        yield f"damaged: {problem}"
        return
    step = _step(save)
    head = json.loads((save / "MANIFEST.json").read_text())["head"]
    if head["step"] != step:
        yield f"is of step {head['step']}"
    other = {rank: seq for rank, seq in head["tokens"].items() if seq != step}
    if other:
        yield f"its last pushes are {head['tokens']}"
    dense = sum(float(each.sum()) for each in torch.load(save / "dense.pt", weights_only=True).values())
    if dense != -step:
        yield f"the dense weight is {dense}"
    rows, counts = content(save)
    expected = simulated[step].rows()
    for key in rows.keys() & expected.keys():
        if not simulated[step].data.ordered and rows[key][0] in simulated[step].possible_uses(key):
            expected[key] = (rows[key][0], expected[key][1])
    yield from _differences("row (last use, value)", rows, expected)
    yield from _differences("admission count", counts, simulated[step].counts())


def content(save: Path) -> tuple[dict[Key, Any], dict[Key, int]]:
    """Return the rows ``(last use, value)`` and the admission counts of a checkpoint.

    A value is a list if the weights of the row differ.
    """
    rows: dict[Key, Any] = {}
    counts: dict[Key, int] = {}
    for path in sorted(save.glob("shard-*.arrow")):
        with pyarrow.ipc.open_file(path) as file:
            for row in file.read_all().to_pylist():
                key = (TABLES.index(row["table"]), row["id"])
                assert key not in rows and key not in counts, f"{path}: {key} twice"
                if row["weights"]:
                    value = row["weights"][0] if row["weights"] == row["weights"][:1] * DIM else row["weights"]
                    rows[key] = (row["last_used"], value)
                else:
                    counts[key] = row["last_used"]
    return rows, counts


def _differences(what: str, found: dict[Key, Any], expected: dict[Key, Any]) -> Iterator[str]:
    wrong = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    for table, number in wrong[:_SHOWN]:
        key = (table, number)
        yield f"{what} of {TABLES[table]} id {number}: {found.get(key)}, want {expected.get(key)}"
    if len(wrong) > _SHOWN:
        yield f"{what}: {len(wrong)} differ, of {len(expected)}"


def _wrong_in_read(entry: dict[str, Any], data: Data, simulated: list[Simulation]) -> Iterator[str]:
    tables = simulated[entry["step"]]
    for table, name in enumerate(TABLES):
        found = {(table, each): row for each, row in zip(data.known(), entry["rows"][name], strict=True)}
        want = {(table, each): [float(tables.read(table, each))] * DIM for each in data.known()}
        yield from _differences(f"at step {entry['step']} the value", found, want)


def _wrong_generations(job: PhaseJob, saves: list[Path]) -> Iterator[str]:
    """Check that each generation is above the earlier ones, and continues the previous one of the same process."""
    lives: dict[int, list[int]] = {}
    for entry in job.lines("phases.jsonl"):
        if entry["rank"] == 0 and entry["generation"]:
            life = lives.setdefault(entry["pid"], [])
            if not life or life[-1] != entry["generation"]:
                life.append(entry["generation"])
    begun = [generation for life in lives.values() for generation in life]
    if begun != sorted(set(begun)):
        yield f"the generations of rank 0 are {list(lives.values())}"
    continued = {later: earlier for life in lives.values() for earlier, later in pairwise(life)}
    for save in saves:
        run = json.loads((save / "MANIFEST.json").read_text())["head"]["run"]
        if run["epoch"] not in continued or run["fresh"] or run["continues"] != continued[run["epoch"]]:
            yield (
                f"{save.name}: generation {run['epoch']} continues {run['continues']}, fresh {run['fresh']}; the "
                f"generations of rank 0 were {list(lives.values())}"
            )
