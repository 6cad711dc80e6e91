"""The ladder of a new model: ten steps, from the model alone to a whole run on several ranks.

Each step adds one part. The first step that fails names the part.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from persia.config import load_config
from persia.doctor import compose
from persia.doctor.gpu import visible_gpus, wanted
from persia.launch.binaries import MIDDLEWARE, SERVER, resolve_binary_execute_path
from persia.runtime.errors import UsageError
from persia.runtime.settings import settings

_TAIL = 15
"""Lines of a failed step that are shown."""


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        number: From 1.
        title: What is tested.
        words: The command.
        diagnosis: What the fault probably is, if this step fails and those before it passed.
        skip: Why the step cannot be run here; empty if it can.
    """

    number: int
    title: str
    words: tuple[str, ...]
    diagnosis: str
    skip: str = ""

    @property
    def command(self) -> str:
        """The command as a user types it."""
        return " ".join(self.words)


@dataclass(frozen=True)
class Result:
    """The result of a step.

    Attributes:
        step: The step.
        code: Its exit code; None if it was skipped.
        seconds: How long it took.
        output: The last lines of its output.
        log: The file with all of it.
    """

    step: Step
    code: int | None
    seconds: float = 0.0
    output: str = ""
    log: str = ""


def steps(path: Path, *, ranks: int | None = None) -> list[Step]:
    """Return the ten steps for a configuration.

    Args:
        path: The ``persia.yml``.
        ranks: The ranks of the last two steps; None is the number of GPUs that are used, but at least 2.

    Raises:
        ConfigError: The configuration has mistakes.
    """
    config = load_config(path)
    file, folder = str(path), str(path.absolute().parent)
    count = ranks or max(2, wanted() and visible_gpus())
    in_image, on_servers, on_ranks = compose.unavailable() or "", _no_servers(), _no_ranks()
    stamp = f"ladder-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    shell = ("persia", "debug", "shell", "--context", folder, "--")
    check, test = ("python", "-m", "persia.testing"), ("persia", "train")
    whole = f"--set run.name={stamp}".split()
    del config
    return [
        Step(1, "the model alone, with torch only", (*check, "--torch-only", file), ALONE),
        Step(2, "each method of the model, with embeddings in memory", (*check, file), METHODS),
        Step(3, "one batch, in one process", (*test, file, "--test", "--local"), BATCH),
        Step(4, "the model alone, in the image", (*shell, *check, "--torch-only", path.name), IMAGE, in_image),
        Step(5, "each method of the model, in the image", (*shell, *check, path.name), IMAGE, in_image),
        Step(6, "one batch, in the image", (*shell, *test, path.name, "--test", "--local"), FILES, in_image),
        Step(7, "one batch, on the servers of the job", (*test, file, "--test"), SERVERS, on_servers),
        Step(8, "the whole run, in one process", (*test, file, "--local", *whole), WHOLE),
        Step(9, f"one batch, on {count} ranks", (*test, file, "--test", "--nproc", str(count)), RANKS, on_ranks),
        Step(
            10,
            f"the whole run, on {count} ranks",
            (*test, file, "--nproc", str(count), *whole[:1], f"{whole[1]}-ranks"),
            MANY,
            on_ranks,
        ),
    ]


ALONE = "the fault is in the model, or in the keys of `model`: persia is not involved. Correct the named line"
METHODS = "the model runs with torch alone, but not with embeddings of persia: their number, shapes or gradients"
BATCH = "the model is sound: the fault is in the data, the features, the optimizers or the storage"
IMAGE = "it runs here, but not in the image: a package, a version or a file is missing there (persia doctor --diff-env)"
FILES = "the model runs in the image, but the data is not there: persia doctor CONFIG names the files to mount"
SERVERS = "it runs in one process, but not on the servers: persia doctor --only services,network"
WHOLE = "one batch passed: a later row, the memory or the disk is at fault; the message names file and row"
RANKS = "it runs on one rank, but not on several: the network, the devices, or a model whose ranks differ"
MANY = "one batch passed on all ranks: see the log of the rank that failed first"


def _no_servers() -> str:
    return "" if settings.nats_url is not None else "PERSIA_NATS_URL is not set: there is no job to join"


def _no_ranks() -> str:
    """Return why no servers can be started here; empty if they can."""
    if shutil.which("nats-server") is None and shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin") is None:
        return "nats-server is not on PATH"
    try:
        for binary in (SERVER, MIDDLEWARE):
            resolve_binary_execute_path(binary)
    except UsageError as error:
        return str(error)
    return ""


def climb(found: list[Step], until: int = 10, started: Callable[[Step], None] | None = None) -> Iterator[Result]:
    """Run the steps in order, and yield their results. The first one that fails is the last one.

    Args:
        found: The steps.
        until: The number of the last step to run.
        started: Called before each step.
    """
    folder = Path(tempfile.mkdtemp(prefix="persia-ladder-"))
    for step in found[:until]:
        if started is not None:
            started(step)
        if step.skip:
            yield Result(step, None)
            continue
        result = _run(step, folder / f"step-{step.number}.log")
        yield result
        if result.code != 0:
            return
    shutil.rmtree(folder)


def _run(step: Step, log: Path) -> Result:
    began = time.monotonic()
    with log.open("wb") as file:
        words = _real(step.words)
        environment = {**os.environ, "COLUMNS": "120"}
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return Result(step, code, time.monotonic() - began, "\n".join(lines[-_TAIL:]), str(log))


def _real(words: tuple[str, ...]) -> list[str]:
    """Return a command with this Python in place of the names ``persia`` and ``python``."""
    program = {"persia": [sys.executable, "-m", "persia"], "python": [sys.executable]}
    return [*program[words[0]], *words[1:]]
