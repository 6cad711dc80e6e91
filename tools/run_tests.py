"""Run the tests: ``make test``, ``make test-all``, ``.ci/run``.

The steps run one after another, except builds of images and lints, which run beside other steps. A failing step does
not end the run. A step writes its output to ``runs/tests/STEP.log`` and its JUnit file to ``runs/junit/``.
``runs/tests/slowest.txt`` has the 30 slowest tests. The last lines list every failing test with the end of its output.

``--resume`` continues an interrupted run: tests that passed on the same sources are not repeated. After ``make
test``, ``make test-all`` with ``--resume`` runs only the remaining tests. ``--shard 2/4`` runs the second quarter of
each suite.

Only one run at a time uses a ``CARGO_TARGET_DIR``, because another clone that builds into it would replace the binaries
under test.
"""

import argparse
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

import test_report

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / "runs" / "tests"
JUNIT = ROOT / "runs" / "junit"

FUZZ_S = os.environ.get("FUZZ_SECONDS", "60")
STORM_S = os.environ.get("STORM_SECONDS", "120")


@dataclass(frozen=True)
class Step:
    """One command of a run.

    Attributes:
        name: Its name in the report.
        make: The target that runs it.
        suite: Whether it writes a JUnit file.
        grows: Whether the long run has more tests in this step.
        needs: The concurrent step that must end first.
        beside: Whether the next steps start while this one runs.
        nightly: Whether only the long run includes it.
        variables: The variables of make.
    """

    name: str
    make: str
    suite: bool = False
    grows: bool = False
    needs: str | None = None
    beside: bool = False
    nightly: bool = False
    variables: dict[str, str] = field(default_factory=dict)


STEPS = [
    Step("layers", "test-layers", beside=True),
    Step("build", "test-build"),
    Step("images", "test-images", needs="layers", beside=True, grows=True, variables={"BUILT": "1"}),
    Step("lint", "lint", beside=True),
    Step("rust", "test-rust", suite=True),
    Step("python", "test-python", suite=True, grows=True),
    Step("compose", "test-compose", suite=True, grows=True, needs="images"),
    Step("checklist", "test-checklist"),
    Step("cold", "test-cold", suite=True, nightly=True),
    Step("storms", "chaos-all", nightly=True, variables={"SECONDS": STORM_S}),
    Step("fuzz", "fuzz", nightly=True, variables={"SECONDS": FUZZ_S}),
]


class Run:
    """The steps of one run, and their results."""

    def __init__(self, steps: Sequence[Step], *, everything: bool, shard: str, resume: bool) -> None:
        self.steps = steps
        self.everything = everything
        self.shard = shard
        self.resume = resume
        self.started = time.monotonic()
        self.codes: dict[str, int] = {}
        self.before: dict[str, int] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def prepare(self) -> None:
        """Discard the results of the last run, or check that it had the same sources."""
        tree = fingerprint()
        mark = STATE / "sources"
        said = f"{tree} {self.shard}"
        if self.resume and (not tree or not mark.exists() or mark.read_text() != said):
            tell("nothing to resume: there is no earlier run of these sources and this shard; all tests run")
            self.resume = False
        STATE.mkdir(parents=True, exist_ok=True)
        for folder in (STATE, JUNIT):
            folder.mkdir(parents=True, exist_ok=True)
            for path in () if self.resume else folder.glob("*.*"):
                path.unlink()
        for path in JUNIT.glob("*.xml"):  # the report must not count results of an earlier run
            path.unlink()
        if not self.resume:
            (ROOT / "runs" / "checklist.json").unlink(missing_ok=True)
        mark.write_text(said)

    def all(self) -> None:
        """Do every step."""
        waiting: dict[str, threading.Thread] = {}
        for step in self.steps:
            if step.needs in waiting:
                waiting.pop(step.needs).join()
            if step.beside:
                waiting[step.name] = threading.Thread(target=self.one, args=(step,))
                waiting[step.name].start()
            else:
                self.one(step)
        for thread in waiting.values():
            thread.join()

    def one(self, step: Step) -> None:
        """Run one step, or skip it if it has passed before."""
        done = STATE / f"{step.name}.done"
        passed = STATE / f"{step.name}.passed"
        self.before[step.name] = len(passed.read_text().splitlines()) if passed.exists() else 0
        if done.exists() and (done.read_text() == "all" or not (self.everything and step.grows)):
            tell(f"{step.name}: passed before")
            self.codes[step.name] = 0
            return
        started = time.monotonic()
        code = self.command(step, passed)
        self.codes[step.name] = code
        if code == 0:
            done.write_text("all" if self.everything else "test")
            if step.suite and not passed.exists():  # the test runner of the step does not record passed tests
                tests = test_report.read({step.name: JUNIT / f"{step.name}.xml"})[step.name]
                passed.write_text("".join(f"{test.name}\n" for test in tests if test.outcome == "passed"))
        how = "passed" if code == 0 else f"FAILED with exit code {code}"
        seconds = time.monotonic() - started
        tell(f"{step.name}: {how} after {minutes(seconds)}; {minutes(time.monotonic() - self.started)} since the start")

    def command(self, step: Step, passed: Path) -> int:
        """Run a step's command. The output goes to the log, and to the terminal unless the step runs beside others."""
        variables = dict(step.variables)
        if step.suite:
            variables |= {"JUNIT": str(JUNIT / f"{step.name}.xml"), "SHARD": self.shard, "PASSED": str(passed)}
        if step.suite or step.grows:
            variables["ALL"] = "1" if self.everything else ""
        words = ["make", "--no-print-directory", "--keep-going", step.make, *(f"{k}={v}" for k, v in variables.items())]
        with (STATE / f"{step.name}.log").open("wb") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
            self.running[step.name] = process
            for line in process.stdout or ():
                log.write(line)
                log.flush()
                if not step.beside:
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
            code = process.wait()
        self.running.pop(step.name, None)
        return code

    def interrupt(self, number: int, _: object) -> NoReturn:
        """End the processes of the steps and report the results until now."""
        for process in self.running.values():
            os.killpg(process.pid, signal.SIGTERM)
        tell(f"interrupted by {signal.Signals(number).name}; make test RESUME=1 continues")
        self.report()
        os._exit(128 + number)

    def report(self) -> int:
        """Print the end of the run and return its exit code."""
        suites = {step.name: JUNIT / f"{step.name}.xml" for step in self.steps if step.suite}
        logs = {step.name: STATE / f"{step.name}.log" for step in self.steps}
        results = test_report.read(suites)
        (STATE / "slowest.txt").write_text("".join(f"{line}\n" for line in test_report.slowest(results)))
        found = test_report.failures(results, self.codes, logs, resumed=self.before)
        (STATE / "failures.txt").write_text(test_report.details(found))
        text = test_report.summary(results, found, before=sum(self.before.values()))
        (STATE / "summary.txt").write_text(text)
        sys.stdout.write(text)
        sys.stdout.flush()
        return 1 if found else 0


def fingerprint() -> str:
    """Return git's hash of the current sources, or an empty string outside a clone."""
    index = STATE / "index"
    STATE.mkdir(parents=True, exist_ok=True)
    index.unlink(missing_ok=True)
    environment = {**os.environ, "GIT_INDEX_FILE": str(index)}
    for words in (["add", "--all"], ["write-tree"]):
        done = subprocess.run(["git", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return ""
    index.unlink()
    return done.stdout.strip()


def claim(target: Path) -> IO[bytes]:
    """Acquire the lock of a target directory and return it. Wait while another run holds it."""
    target.mkdir(parents=True, exist_ok=True)
    lock = (target / ".test-run.lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        tell(f"another test run uses {target}; waiting for its end")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def minutes(seconds: float) -> str:
    """Return a duration as ``3 min 20 s``."""
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def tell(line: str) -> None:
    """Print a line of this script."""
    sys.stdout.write(f"== {line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the requested steps and return 0 if all of them passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run the long tests too")
    parser.add_argument("--lint", action="store_true", help="run the lints too")
    parser.add_argument("--resume", action="store_true", help="skip the tests that passed on the same sources")
    parser.add_argument("--shard", default="", metavar="K/N", help="run the K-th of N parts of each suite")
    arguments = parser.parse_args()
    if arguments.shard and not re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", arguments.shard):
        parser.error(f"--shard {arguments.shard}: expected K/N, for example 2/4")
    steps = [s for s in STEPS if (arguments.all or not s.nightly) and (arguments.lint or s.name != "lint")]
    if arguments.shard:
        part, parts = map(int, arguments.shard.split("/"))
        if part > parts:
            parser.error(f"--shard {arguments.shard}: there is no shard {part} of {parts}")
        alone = [s.name for s in steps if s.nightly and not s.suite]  # steps that cannot be divided
        steps = [s for s in steps if s.name not in alone or alone.index(s.name) % parts == part - 1]
        steps = [s for s in steps if s.name != "checklist"]  # no shard shows every row
    run = Run(steps, everything=arguments.all, shard=arguments.shard, resume=arguments.resume)
    with claim(Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "rust_core" / "target")):
        run.prepare()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, run.interrupt)
        run.all()
        return run.report()


if __name__ == "__main__":
    sys.exit(main())
