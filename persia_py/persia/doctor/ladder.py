"""The steps of ``persia doctor --ladder``: ten, from the model alone to a complete run on several ranks.

Each step adds one part. If a step fails, the part that it adds is the probable cause.
"""

import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from persia.config import load_config
from persia.doctor import compose
from persia.doctor.gpu import visible_gpus, wanted
from persia.launch import foreground
from persia.launch.binaries import MIDDLEWARE, SERVER, resolve_binary_execute_path
from persia.runtime import signals
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import settings

_TAIL = 15
"""The number of lines of a failed step that are shown."""


@dataclass(frozen=True)
class Step:
    """One step of the ladder.

    Attributes:
        number: The number of the step, from 1.
        title: The subject of the test.
        words: The words of the command.
        skip: Why the step cannot run here; empty if it can.
    """

    number: int
    title: str
    words: tuple[str, ...]
    skip: str = ""

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return shlex.join(self.words)


@dataclass(frozen=True)
class Result:
    """The result of a step.

    Attributes:
        step: The step.
        code: The exit code; None if the step was skipped.
        seconds: The duration of the step, in seconds.
        output: The last lines of the output.
        log: The file with the full output.
    """

    step: Step
    code: int | None
    seconds: float = 0.0
    output: str = ""
    log: str = ""

    @property
    def failed(self) -> bool:
        """Whether the step ran and failed."""
        return self.code not in (None, 0)


def steps(path: Path, *, ranks: int | None = None) -> list[Step]:
    """Return the ten steps for a configuration.

    Args:
        path: The ``persia.yml``.
        ranks: The number of ranks in the last two steps; None means the number of usable GPUs, but at least 2.

    Raises:
        ConfigError: The configuration has errors.
    """
    config = load_config(path)
    file, folder = str(path), str(path.absolute().parent)
    count = ranks or max(2, wanted() and visible_gpus())
    in_image, on_servers, on_ranks = compose.unavailable() or "", _no_servers(), _no_ranks()
    # The runs of the ladder have a separate folder, because runs/LATEST must not point to them.
    whole = ("--set", f"run.dir={Path(config.run.dir) / 'ladder'}", "--set", f"run.name={_stamp()}")
    shell = ("persia", "debug", "shell", "--context", folder, "--")
    check, test = ("python", "-m", "persia.testing"), ("persia", "train")
    return [
        Step(1, "the model alone, with torch only", (*check, "--torch-only", file)),
        Step(2, "each method of the model, with embeddings in memory", (*check, file)),
        Step(3, "one batch, in one process", (*test, file, "--test", "--local")),
        Step(4, "the model alone, in the image", (*shell, *check, "--torch-only", path.name), in_image),
        Step(5, "each method of the model, in the image", (*shell, *check, path.name), in_image),
        Step(6, "one batch, in the image", (*shell, *test, path.name, "--test", "--local"), in_image),
        Step(7, "one batch, on the servers of the job", (*test, file, "--test"), on_servers),
        Step(8, "the whole run, in one process", (*test, file, "--local", *whole)),
        Step(9, f"one batch, on {count} ranks", (*test, file, "--test", "--nproc", str(count)), on_ranks),
        Step(
            10,
            f"the whole run, on {count} ranks",
            (*test, file, "--nproc", str(count), *whole[:-1], f"{whole[-1]}-ranks"),
            on_ranks,
        ),
    ]


def _no_servers() -> str:
    return "" if settings.nats_url is not None else "PERSIA_NATS_URL is not set: there is no job to join"


def _no_ranks() -> str:
    """Return why servers cannot be started here; empty if they can."""
    if shutil.which("nats-server") is None and shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin") is None:
        return "nats-server is not on PATH; install it, on Debian and Ubuntu: apt install nats-server"
    try:
        for binary in (SERVER, MIDDLEWARE):
            resolve_binary_execute_path(binary)
    except UsageError as error:
        return f"{error}; {error.hint}"
    return ""


def climb(
    found: list[Step], until: int = 10, started: Callable[[Step], None] | None = None
) -> Generator[Result, None, None]:
    """Run the steps in order, and yield their results. The iteration ends after the first failure.

    The log of a failed step is kept. Close the generator if the iteration ends early, because it holds the folder of
    the other logs.

    Args:
        found: The steps.
        until: The number of the last step to run.
        started: Called before each step.

    Raises:
        KeyboardInterrupt: A step was interrupted.
    """
    with signals.cleaned_up():
        folder, keeps = Path(tempfile.mkdtemp(prefix="persia-ladder-")), False
        try:
            for step in found[:until]:
                if started is not None:
                    started(step)
                result = Result(step, None) if step.skip else _run(step, folder / f"step-{step.number}.log")
                keeps = result.failed
                yield result
                if result.failed:
                    return
        finally:
            if not keeps:
                shutil.rmtree(folder)


def _run(step: Step, log: Path) -> Result:
    began = time.monotonic()
    with log.open("wb") as file:
        code = foreground.run(_real(step.words), env={**os.environ, "COLUMNS": "120"}, output=file)
    if code in (ExitCode.INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return Result(step, code, time.monotonic() - began, "\n".join(lines[-_TAIL:]), str(log))


def summary(found: list[Step], results: list[Result]) -> Iterator[str]:
    """Yield lines about the steps that passed, were skipped (with the reason), and did not run.

    Args:
        found: All steps.
        results: The results of the steps that were reached.
    """
    passed = [each.step.number for each in results if each.code == 0]
    skipped: dict[str, list[int]] = {}
    for each in results:
        if each.code is None:
            skipped.setdefault(each.step.skip, []).append(each.step.number)
    rest = [step.number for step in found[len(results) :]]
    yield f"passed: {_numbers(passed)}"
    for reason, numbers in skipped.items():
        yield f"skipped: {_numbers(numbers)}: {reason}"
    if rest:
        yield f"not run: {_numbers(rest)}"


def _numbers(steps: list[int]) -> str:
    return "none" if not steps else f"step{'' if len(steps) == 1 else 's'} {', '.join(map(str, steps))}"


def _stamp() -> str:
    return f"ladder-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def _real(words: tuple[str, ...]) -> list[str]:
    """Return a command with this Python interpreter instead of the names ``persia`` and ``python``."""
    program = {"persia": [sys.executable, "-m", "persia"], "python": [sys.executable]}
    return [*program[words[0]], *words[1:]]
