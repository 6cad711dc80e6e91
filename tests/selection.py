"""The selection of tests, and the record of an interrupted run.

``--shard 2/4`` runs the second quarter. ``--resume-from FILE`` skips the tests that an interrupted run has passed.
``--repeat 20`` runs each test twenty times. A failing test is named immediately.
"""

import re
import zlib
from pathlib import Path
from typing import Any

import pytest

Shard = tuple[int, int]


def shard(text: str) -> Shard:
    """Parse ``2/4``, the second of four shards.

    Raises:
        pytest.UsageError: The text does not have this form, or there is no such shard.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--shard {text}: want K/N with 1 <= K <= N, for example 2/4")
    return int(found[1]), int(found[2])


def belongs(name: str, part: Shard) -> bool:
    """Whether the test of this name is in the shard. Each test is in exactly one of the N shards."""
    return zlib.crc32(name.encode()) % part[1] == part[0] - 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("selection")
    group.addoption("--shard", type=shard, metavar="K/N", help="run only shard K of N")
    group.addoption("--resume-from", type=Path, metavar="FILE", help="skip what FILE lists; append what passes")
    group.addoption("--repeat", type=int, default=1, metavar="N", help="run each test N times")


def pytest_configure(config: pytest.Config) -> None:
    """Record the tests that pass."""
    config.pluginmanager.register(Progress(config), "persia-progress")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test N times."""
    if (count := metafunc.config.getoption("repeat")) > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(1, count + 1))


def passed_before(config: pytest.Config) -> set[str]:
    """Return the tests that an interrupted run has passed."""
    path: Path | None = config.getoption("resume_from")
    return set(path.read_text().splitlines()) if path is not None and path.exists() else set()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that belong to another shard or have passed before."""
    part: Shard | None = config.getoption("shard")
    passed = passed_before(config)
    chosen = [item for item in items if item.nodeid not in passed and (part is None or belongs(item.nodeid, part))]
    if len(chosen) < len(items):
        kept = set(map(id, chosen))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = chosen


class Progress:
    """Reports each test as it ends: failures on the terminal, passed tests in the file to resume from."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.controller = not hasattr(config, "workerinput")
        self.path: Path | None = config.getoption("resume_from")
        self.not_passed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Let a run without remaining tests pass."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.path is not None and self.path.exists():
            session.exitstatus = pytest.ExitCode.OK

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the name of a failed test. Record a passed one after its fixtures have ended."""
        if not self.controller:
            return
        if report.failed:
            self.not_passed.add(report.nodeid)
            reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(f"FAILED {report.nodeid} ({report.when}, {report.duration:.1f} s)", red=True)
        elif report.skipped:
            self.not_passed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self.not_passed and self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{report.nodeid}\n")
