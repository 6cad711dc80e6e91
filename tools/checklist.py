"""Print which rows of tests/checklist.md no test has shown: ``tools/checklist.py [SOURCE ...]``, for example ``S0``.

Reads runs/checklist.json, which a run of all tests writes. Exits with 1 if a row of the requested sources (default:
all) has no test, or a test that failed. A row that was skipped with a reason counts as shown. Tests of ``S3-32/G`` show
the part of a row that needs a GPU. Without a device, these tests are skipped, and the skip is printed.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (S\d-\d\d) \|.*\| ([^|]*) \|[^|]*\|$", re.MULTILINE)
"""A row of a table of the page: its id and its tier."""


def report(rows: dict[str, str], outcomes: dict[str, str]) -> tuple[list[str], bool]:
    """Return the lines to print for ``rows``, and whether each was shown or skipped with a reason.

    Args:
        rows: The tier of each row, by its id.
        outcomes: The outcome of each row, and of ``ROW/G``.
    """
    on_gpu = {row: outcomes.get(f"{row}/G", "no test") for row, tier in rows.items() if "G" in tier}
    missing = [row for row in rows if not outcomes.get(row, "").startswith(("passed", "skipped"))]
    skipped = [row for row in rows if outcomes.get(row, "").startswith("skipped")]
    lines = [f"{row}: {outcomes.get(row, 'no test')}" for row in missing]
    lines += [f"{row}: {outcomes[row]}" for row in skipped]
    lines += [f"{row}, on a GPU: {outcome}" for row, outcome in on_gpu.items()]
    lines.append(f"{len(rows) - len(missing) - len(skipped)} passed, {len(skipped)} skipped, of {len(rows)} rows")
    return lines, not missing and "failed" not in on_gpu.values()


def main(sources: list[str]) -> int:
    """Print the report and return the exit code."""
    rows = ROW.findall((ROOT / "tests" / "checklist.md").read_text(encoding="utf-8"))
    wanted = {row: tier for row, tier in rows if not sources or row.split("-")[0] in sources}
    found = ROOT / "runs" / "checklist.json"
    if not wanted or not found.exists():
        problem = f"{found} is missing: run the tests (make test-all)" if wanted else f"no rows of {', '.join(sources)}"
        print(problem, file=sys.stderr)
        return 1
    lines, complete = report(wanted, json.loads(found.read_text(encoding="utf-8")))
    print("\n".join(lines))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
