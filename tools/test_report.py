"""The report at the end of a test run, from the JUnit files that nextest and pytest write."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

TAIL = 36
"""The maximum number of lines in which a failed run lists its failing tests; with the lines of make, it is 40."""
SLOWEST = 30
EXAMPLE = 8
"""The number of lines for one failure if there are many, heading included."""
KEPT = 40
"""The maximum number of lines of each output in the file of failures."""
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


@dataclass(frozen=True)
class Failure:
    """A failing test, or a step that failed without one.

    Attributes:
        heading: Its first line, which contains its name.
        output: The output of the test or the step.
    """

    heading: str
    output: str

    def end(self, count: int) -> list[str]:
        """Return the last lines of the output, indented."""
        lines = [line.rstrip()[:WIDTH] for line in self.output.splitlines() if line.strip()]
        return [f"    {line}" for line in lines[-count:]]


def read(suites: Mapping[str, Path]) -> dict[str, list[Test]]:
    """Return the tests of each suite. A suite without a readable file has none."""
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
    if not any("\n" in text for text in texts):  # nextest reports one line; the panic message is in the test's output
        texts += [(child.text or "").strip() for child in case if child.tag in {"system-out", "system-err"}]
    output = _BACKTRACE.sub("", _COLOURS.sub("", "\n".join(filter(None, texts))))
    return Test(suite, name, float(case.get("time", 0)), outcome, output)


def slowest(results: Mapping[str, list[Test]]) -> list[str]:
    """Return a line for each of the slowest tests, the slowest first."""
    tests = sorted((test for suite in results.values() for test in suite), key=lambda test: -test.seconds)
    return [f"{test.seconds:7.1f} s  {test.suite:8} {test.name}" for test in tests[:SLOWEST]]


def failures(
    results: Mapping[str, list[Test]],
    codes: Mapping[str, int],
    logs: Mapping[str, Path],
    *,
    resumed: Mapping[str, int],
) -> list[Failure]:
    """Return each failing test, and each step that failed without one.

    Args:
        results: The tests of each suite.
        codes: The exit code of each finished step.
        logs: The output of each step. Its keys are the steps that should have run.
        resumed: The number of tests of each suite that passed before the run was resumed.
    """
    failed = [test for tests in results.values() for test in tests if test.outcome == "failed"]
    found = [Failure(f"FAILED {test.suite} {test.name}", test.output) for test in failed]
    for step in logs:
        if any(test.suite == step for test in failed):
            continue
        if problem := _problem(step, codes, results, resumed):
            found.append(Failure(f"FAILED {step}: {problem}", _text(logs[step])))
    return found


def summary(results: Mapping[str, list[Test]], found: Sequence[Failure], *, before: int) -> str:
    """Return the last lines of a run: at most :data:`TAIL`, the last of which is ``N passed, N failed``.

    Args:
        results: The tests of each suite.
        found: The result of :func:`failures`.
        before: The number of tests that passed before the run was resumed.
    """
    outcomes = Counter(test.outcome for tests in results.values() for test in tests)
    lines = [*_within(found, TAIL - 1), f"{outcomes['passed'] + before} passed, {outcomes['failed']} failed"]
    return "".join(f"{line}\n" for line in lines)


def details(found: Sequence[Failure]) -> str:
    """Return each failure with the end of its output."""
    return "".join(f"{line}\n" for failure in found for line in (failure.heading, *failure.end(KEPT)))


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
    # Without a Docker engine, all tests in containers are skipped.
    return "no test ran" if not outcomes or (outcomes == {"skipped"} and step != "compose") else None


def _text(path: Path) -> str:
    return _COLOURS.sub("", path.read_text(errors="replace")) if path.exists() else ""


def _within(found: Sequence[Failure], room: int) -> list[str]:
    """Return the failures in at most ``room`` lines.

    With few failures, each has a heading and the end of its output. With many, their names come first, by file. The
    output of the first ones follows if there is room, because many failures often have one cause. With very many, each
    file has the number of its failures.
    """
    each = room // max(1, len(found)) - 1
    if each > 0:
        return [line for failure in found for line in (failure.heading, *failure.end(each))]
    files: dict[str, list[str]] = {}
    for failure in found:
        file, _, name = failure.heading.rpartition("::")
        files.setdefault(file or name, []).append(name if file else "")
    room -= 1
    lines = _wrapped(f"{file}: {' '.join(names)}" if names[0] else file for file, names in files.items())
    if len(lines) > room:
        lines = _wrapped(f"{file}: {len(names)}" for file, names in files.items())[:room]
    for failure in found:
        if room - len(lines) < 2:
            break
        lines += [failure.heading, *failure.end(min(EXAMPLE, room - len(lines)) - 1)]
    return [*lines, "the end of each output: runs/tests/failures.txt"]


def _wrapped(texts: Iterable[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]
