"""Print which rows of tests/checklist.md no test has shown: ``tools/checklist.py [SOURCE ...]``, for example ``S0``.

Reads runs/checklist.json, which a run of all tests writes. Exits with 1 when a row of the requested sources (all, if
none is given) has no test, or one that failed. A row that was skipped counts, with its reason.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (S\d-\d\d) \|", re.MULTILINE)


def report(rows: list[str], outcomes: dict[str, str]) -> tuple[list[str], bool]:
    """Return the lines to print for ``rows``, and whether each was shown or skipped with a reason."""
    missing = [row for row in rows if not outcomes.get(row, "").startswith(("passed", "skipped"))]
    skipped = [row for row in rows if outcomes.get(row, "").startswith("skipped")]
    lines = [f"{row}: {outcomes.get(row, 'no test')}" for row in missing]
    lines += [f"{row}: {outcomes[row]}" for row in skipped]
    lines.append(f"{len(rows) - len(missing) - len(skipped)} passed, {len(skipped)} skipped, of {len(rows)} rows")
    return lines, not missing


def main(sources: list[str]) -> int:
    """Print the report and return the exit code."""
    rows = ROW.findall((ROOT / "tests" / "checklist.md").read_text(encoding="utf-8"))
    wanted = [row for row in rows if not sources or row.split("-")[0] in sources]
    found = ROOT / "runs" / "checklist.json"
    if not wanted or not found.exists():
        print(f"no rows of {sources}" if not wanted else f"{found} is missing: run the tests", file=sys.stderr)
        return 1
    lines, complete = report(wanted, json.loads(found.read_text(encoding="utf-8")))
    print("\n".join(lines))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
