"""Sum the results that cargo and pytest printed: ``tools/count_tests.py LOG``.

Prints ``N passed, N failed``. Exits with 1 when a test failed, or when one of the two ran none: a suite that
was not found must not look like one that passed.
"""

import re
import sys
from pathlib import Path

CARGO = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed;", re.MULTILINE)
PYTEST = re.compile(r"^=+ (?P<counts>(?:\d+ \w+(?:, )?)+) in [\d.]+s.*=+$", re.MULTILINE)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def cargo(log: str) -> tuple[int, int]:
    """Return how many Rust tests passed and failed."""
    found = CARGO.findall(log)
    return sum(int(passed) for passed, _ in found), sum(int(failed) for _, failed in found)


def pytest(log: str) -> tuple[int, int]:
    """Return how many Python tests passed and failed; an error in a fixture is a failure."""
    passed = failed = 0
    for summary in PYTEST.finditer(log):
        for count, outcome in re.findall(r"(\d+) (\w+)", summary["counts"]):
            passed += int(count) if outcome == "passed" else 0
            failed += int(count) if outcome in {"failed", "error", "errors"} else 0
    return passed, failed


def main(path: str) -> int:
    """Print the sum and return the exit code."""
    log = COLOURS.sub("", Path(path).read_text(errors="replace"))
    suites = {"cargo": cargo(log), "pytest": pytest(log)}
    none = [name for name, (passed, failed) in suites.items() if passed + failed == 0]
    for name in none:
        print(f"no result of {name} in {path}: its tests did not run", file=sys.stderr)
    failed = sum(failed for _, failed in suites.values())
    print(f"{sum(passed for passed, _ in suites.values())} passed, {failed} failed")
    return 1 if failed or none else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
