"""Run one fault, or all of them: ``make chaos F=F3 SEED=7``. Results are added to the list in ``runs/chaos.json``.

The faults of a job are in ``faults.py``, those of a served bundle in ``serving_faults.py``.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import faults
import serving_faults
from serving_job import make_bundles
from stack import Stack, missing

ALL: dict[str, faults.Fault | serving_faults.ServingFault] = {**faults.FAULTS, **serving_faults.FAULTS}
RUNS = Path(__file__).resolve().parents[2] / "runs" / "chaos.json"


def append(record: faults.Record) -> None:
    """Add a record to the list."""
    records: list[Any] = json.loads(RUNS.read_text()) if RUNS.exists() else []
    RUNS.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(each) for each in [*records, dataclasses.asdict(record)])
    RUNS.write_text(f"[\n{lines}\n]\n")


def one(name: str, seed: int, seconds: float, shared: Path) -> bool:
    """Run a fault. Return whether the result is correct. ``shared`` keeps the bundles for the next fault."""
    with tempfile.TemporaryDirectory(prefix="persia-chaos-") as folder:

        def new_stack(**options: Any) -> Stack:
            return Stack(Path(tempfile.mkdtemp(dir=folder)), **options)

        if name in serving_faults.FAULTS:
            record, problem = serving_faults.run(name, seed, Path(folder), make_bundles(shared), seconds)
        else:
            record, problem = faults.run(name, seed, new_stack, seconds)
    append(record)
    sys.stdout.write(f"{json.dumps(dataclasses.asdict(record))}\n")
    if problem is not None:
        sys.stdout.write(f"{problem}\nmake chaos F={name} SEED={seed}\n")
    sys.stdout.flush()
    return problem is None


def main() -> int:
    """Return 0 if every row was correct and every job recovered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=[*ALL, "all"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=faults.STORM_S, help="how long a storm, or the overload of serving, lasts"
    )
    arguments = parser.parse_args()
    if reason := missing():
        sys.stderr.write(f"{reason}\n")
        return 2
    names = list(ALL) if arguments.fault == "all" else [arguments.fault]
    left_out = {name: reason for name in names if (reason := ALL[name].missing())}
    for name, reason in left_out.items():
        sys.stderr.write(f"left out: {name}: {reason}\n")
    with tempfile.TemporaryDirectory(prefix="persia-bundles-") as shared:
        wanted = [name for name in names if name not in left_out]
        results = [one(name, arguments.seed, arguments.seconds, Path(shared)) for name in wanted]
    if not results:
        return 2
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
