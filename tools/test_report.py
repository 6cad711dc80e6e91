"""The report at the end of a test run, from the JUnit files that nextest and pytest write."""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

TAIL = 36
"""The number of last lines in which a failed run names every failing test; with the lines of make, it is 40."""
SLOWEST = 30
WIDTH = 160
_BACKTRACE = re.compile(r"^stack backtrace:\n(?:\s+.*\n)*(?:note: .*)?", re.MULTILINE)
"""The backtrace of a Rust panic, which follows its message."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Test:
    """The outcome of one test.

    Attributes:
        suite: The step that ran the test.
        name: The name by which its suite selects it.
        seconds: How long it took, fixtures included.
        outcome: ``passed``, ``failed`` or ``skipped``.
        output: The failure and the output of the test.
    """

    suite: str
    name: str
    seconds: float
    outcome: str
    output: str = ""


def read(suites: Mapping[str, Path]) -> dict[str, list[Test]]:
    """Return the tests of each suite; a suite without a readable file has none."""
    return {name: _tests(name, path) for name, path in suites.items()}


def _tests(suite: str, path: Path) -> list[Test]:
    try:
        cases = ElementTree.parse(path).iter("testcase")  # noqa: S314 (a file of our own runners)
    except (OSError, ElementTree.ParseError):
        return []
    found: dict[str, Test] = {}
    for case in cases:
        test = _test(suite, case)
        # pytest writes a test twice if the teardown of a fixture fails.
        if test.name not in found or test.outcome == "failed":
            found[test.name] = test
    return list(found.values())


def _test(suite: str, case: ElementTree.Element) -> Test:
    place = case.get("classname", "")
    name = f"{place if suite == 'rust' else place.replace('.', '/') + '.py'}::{case.get('name', '')}"
    failures = [child for child in case if child.tag in {"failure", "error"}]
    outcome = "failed" if failures else "skipped" if case.find("skipped") is not None else "passed"
    texts = [(child.text or "").strip() or child.get("message", "") for child in failures]
    if not any("\n" in text for text in texts):  # nextest: one line; the panic is in what the test wrote
        texts += [(child.text or "").strip() for child in case if child.tag in {"system-out", "system-err"}]
    output = _BACKTRACE.sub("", _COLOURS.sub("", "\n".join(filter(None, texts))))
    return Test(suite, name, float(case.get("time", 0)), outcome, output)


def slowest(results: Mapping[str, list[Test]]) -> list[str]:
    """Return a line for each of the slowest tests, the slowest first."""
    tests = sorted((test for suite in results.values() for test in suite), key=lambda test: -test.seconds)
    return [f"{test.seconds:7.1f} s  {test.suite:8} {test.name}" for test in tests[:SLOWEST]]


def summary(
    results: Mapping[str, list[Test]],
    codes: Mapping[str, int],
    logs: Mapping[str, Path],
    *,
    resumed: Mapping[str, int],
) -> tuple[str, int]:
    """Return the last lines of a run and its exit code.

    Args:
        results: The tests of each suite.
        codes: The exit code of each finished step.
        logs: The output of each step; its keys are the steps that should have run.
        resumed: The number of tests of each suite that passed before the run was resumed.

    Returns:
        At most :data:`TAIL` lines, the last of which is ``N passed, N failed``, and 0 or 1.
    """
    failed = [test for tests in results.values() for test in tests if test.outcome == "failed"]
    passed = sum(test.outcome == "passed" for tests in results.values() for test in tests) + sum(resumed.values())
    entries = [(f"FAILED {test.suite} {test.name}", test.output) for test in failed]
    for step in logs:
        if any(test.suite == step for test in failed):
            continue
        if problem := _problem(step, codes, results, resumed):
            entries.append((f"FAILED {step}: {problem}", _text(logs[step])))
    lines = [*_within(entries, TAIL - 1), f"{passed} passed, {len(failed)} failed"]
    return "".join(f"{line}\n" for line in lines), 1 if entries else 0


def _problem(
    step: str, codes: Mapping[str, int], results: Mapping[str, list[Test]], resumed: Mapping[str, int]
) -> str | None:
    """Return the problem of a step that failed without a failing test, or None."""
    if step not in codes:
        return "did not end"
    if codes[step] != 0:
        return f"exit code {codes[step]}, no failing test; see runs/tests/{step}.log"
    if step not in results or resumed.get(step):
        return None
    outcomes = {test.outcome for test in results[step]}
    # If no Docker engine answers, all tests in containers are skipped.
    return "no test ran" if not outcomes or (outcomes == {"skipped"} and step != "compose") else None


def _text(path: Path) -> str:
    return _COLOURS.sub("", path.read_text(errors="replace")) if path.exists() else ""


def _within(entries: list[tuple[str, str]], room: int) -> list[str]:
    """Return a heading for each entry, and as many of its last lines as fit."""
    if len(entries) > room:
        return textwrap.wrap(" ".join(heading for heading, _ in entries), WIDTH)
    each = room // max(1, len(entries)) - 1
    lines = []
    for heading, text in entries:
        end = [line.rstrip()[:WIDTH] for line in text.splitlines() if line.strip()][-each:] if each else []
        lines += [heading, *(f"    {line}" for line in end)]
    return lines
