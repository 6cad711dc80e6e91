"""Run cases of the generated test: ``make chaos-phases SEEDS=17``, ``SEEDS=1-300 SHARD=2/4``.

Each result is added to ``runs/chaos-phases.jsonl``. A range skips the seeds that are already recorded as good, which
continues an interrupted run. Single seeds always run. ``SEEDS=table`` prints the table of faults and phases.
"""

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from phase_cases import PHASES, case_of, table
from phase_faults import FAULTS
from phase_run import Result, run
from selection import Shard, shard
from stack import Stack, missing

RUNS = Path(__file__).resolve().parents[2] / "runs" / "chaos-phases.jsonl"
SHOWN = 60
"""The number of lines of a problem on the terminal; the file has all lines."""


def seeds_of(text: str, part: Shard) -> list[int]:
    """Return the seeds of ``17``, ``3,17`` or ``1-300`` that belong to a shard."""
    seeds: list[int] = []
    for each in text.split(","):
        first, _, last = each.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return [seed for seed in seeds if seed % part[1] == part[0] - 1]


def recorded() -> list[Result]:
    """Return the results so far, the last one of each seed."""
    if not RUNS.exists():
        return []
    lines = [Result(**json.loads(line)) for line in RUNS.read_text().splitlines()]
    return [*{result.seed: result for result in lines}.values()]


def one(seed: int) -> Result:
    """Run a case, and record it."""
    case = case_of(seed)
    sys.stdout.write(f"seed {seed}: {case.text}\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="persia-phases-") as folder:

        def new_stack(**options: Any) -> Stack:
            return Stack(Path(tempfile.mkdtemp(dir=folder)), **options)

        result = run(case, new_stack)
    RUNS.parent.mkdir(exist_ok=True)
    with RUNS.open("a") as file:
        file.write(f"{json.dumps(dataclasses.asdict(result))}\n")
    said = f"seed {seed}: {result.outcome}, {result.compared} compared, {result.restarts} restarts, {result.seconds} s"
    sys.stdout.write(f"{said}\n")
    if not result.good:
        lines = result.problem.splitlines()
        text = "\n".join(lines[:SHOWN])
        sys.stdout.write(f"{text}\n… {len(lines)} lines in {RUNS}\nmake chaos-phases SEEDS={seed}\n")
    sys.stdout.flush()
    return result


def print_table() -> None:
    """Print the seed or the reason for each cell."""
    cells = {(fault, phase): what for fault, phase, what in table()}
    reasons = sorted({what for what in cells.values() if not what.startswith("seed")})
    rows = [["fault", *PHASES]]
    for fault in FAULTS:
        whats = [cells[fault, phase] for phase in PHASES]
        words = [f"({reasons.index(what) + 1})" if what in reasons else what.split()[1] for what in whats]
        rows.append([fault, *words])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(f"{line.rstrip()}\n")
    for number, reason in enumerate(reasons, 1):
        sys.stdout.write(f"({number}) {reason}\n")


def main() -> int:
    """Return 0 if every case was exact, or stopped in an allowed way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", help="17, 3,17 or 1-300, or table")
    parser.add_argument("--shard", type=shard, default=(1, 1), metavar="K/N")
    arguments = parser.parse_args()
    if arguments.seeds == "table":
        print_table()
        return 0
    if reason := missing():
        sys.stderr.write(f"{reason}\n")
        return 2
    wanted = seeds_of(arguments.seeds, arguments.shard)
    done = {result.seed: result.text for result in recorded() if result.good} if "-" in arguments.seeds else {}
    for seed in wanted:
        if done.get(seed) == case_of(seed).text:
            continue
        if why := case_of(seed).what.missing():
            sys.stderr.write(f"left out: seed {seed}, {case_of(seed).fault}: {why}\n")
            continue
        one(seed)
    results = [result for result in recorded() if result.seed in wanted]
    counts = Counter(result.outcome for result in results)
    bad = [result.seed for result in results if not result.good]
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    sys.stdout.write(f"{len(results)} of {len(wanted)} seeds: {said or 'none'}\n")
    if bad:
        sys.stdout.write(f"not good: make chaos-phases SEEDS={','.join(map(str, sorted(bad)))}\n")
    return 1 if bad or not results else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # needed because shells make background jobs ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command continues\n")
        sys.exit(130)
