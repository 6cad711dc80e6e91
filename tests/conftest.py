"""Shared fixtures: a small configuration, small batches, and a record of the checklist rows that passed."""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import forking
import numpy as np
import pytest
import torch
from stack import LIVE, LiveStack, MakeStack, Stack, missing
from torch.utils.dlpack import from_dlpack

from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.logger import get_default_logger
from persia.runtime.settings import settings

torch.set_num_threads(1)  # the models of tests are too small to divide among threads
# A shell makes its background jobs ignore SIGINT, but the processes that tests start must not ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
IN_IMAGE = not (ROOT / "Makefile").exists()
"""Whether the tests are in an image, which has no sources of the engine."""
CHOSEN = "live or stack"
"""The tests that `pytest` runs in an image by default."""
REQUIREMENTS = ("flask", "flask_cors", "moto", "mypy", "xdist")
"""Packages that `--all` needs in addition to the runtime image."""

pytest_plugins = ["selection", "meeting", "object_server", "up_jobs"]

Configure = Callable[..., Path]
ReplayWarnings = Callable[[], list[str]]
Verb = Callable[..., tuple[str, str]]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Write configuration files and point the environment at them: ``configure("a: {dim: 4}", capacity=1000)``."""

    def write(slots: str, *, groups: str = "", capacity: int = 1_000_000) -> Path:
        body = f"slots_config:\n{textwrap.indent(textwrap.dedent(slots).strip(), '  ')}\n"
        if groups:
            body += f"feature_groups:\n{textwrap.indent(textwrap.dedent(groups).strip(), '  ')}\n"
        embedding = tmp_path / "embedding_config.yml"
        embedding.write_text(body)
        general = tmp_path / "global_config.yml"
        general.write_text(f"embedding_parameter_server_config:\n  capacity: {capacity}\n")
        monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(embedding))
        monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(general))
        return embedding

    return write


@pytest.fixture
def run_folder(configure: Configure, tmp_path: Path) -> Path:
    """Return the folder of a run's checkpoints. The slots of :class:`Batches` are configured."""
    configure("a: {dim: 4}\nb: {dim: 4}")
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def persia_yml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a file in the working directory, which is ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    return Path("persia.yml")


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Return the messages that Persia has logged so far, each after its level."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname} {record.getMessage()}")

    handler = Handler()
    get_default_logger().addHandler(handler)
    yield messages
    get_default_logger().removeHandler(handler)


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Restore the log levels that a verb has changed."""
    levels = {name: logging.getLogger(name).level for name in ("persia", "persia.evaluation")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test outside of any job, even in a container of a job."""
    places = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "GPU_NUM"}
    for name in [*os.environ]:
        if name.startswith("PERSIA_") or name in {*places, "REPRODUCIBLE", "EMBEDDING_STALENESS"}:
            monkeypatch.delenv(name)
    settings.reload_place()  # an earlier test may have changed the rank and the world size


@pytest.fixture
def replay_warnings() -> Iterator[ReplayWarnings]:
    """Return the warnings so far about scripts that send other batches than before."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "differ from those that rank" in record.getMessage():
                found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    get_default_logger().addHandler(handler)
    yield lambda: found
    get_default_logger().removeHandler(handler)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment after each test, because forks need an unchanged environment."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the Python processes of a test as forks of a process that has imported torch: see ``forking.py``."""
    if forking.WANTED:
        forking.fork_server()  # in the main thread: the kernel kills the server when its thread ends
    monkeypatch.setattr(subprocess, "Popen", forking.Popen)


@pytest.fixture
def commands(forks: None) -> Iterator[str]:
    """Return a ``PATH`` with Python commands that run as forks even in shell scripts."""
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if not forking.WANTED:
        yield here
        return
    with tempfile.TemporaryDirectory(prefix="persia-") as folder:
        made = forking.Commands(Path(folder))
        yield os.pathsep.join([folder, here])
        made.close()


@pytest.fixture
def make_stack(no_job: None, tmp_path: Path) -> Iterator[MakeStack]:
    """Start servers and middlewares as real processes, which end with the test: ``make_stack(servers=2)``.

    With ``start=False``, nothing is started. With ``nats_only=True``, only NATS is started.
    """
    made: list[Stack] = []

    def make(*, start: bool = True, nats_only: bool = False, job: str = "test", **options: Any) -> Stack:
        if reason := missing(nats_only=nats_only):
            pytest.skip(reason)
        stack = Stack(tmp_path / f"{job}-{len(made)}", job=job, **options)
        made.append(stack)
        if nats_only:
            stack.start_nats()
        elif start:
            stack.start()
        return stack

    yield make
    for stack in made:
        stack.close()
        sys.stdout.write(f"=== job {stack.job.name}\n{stack.logs()}\n")  # shown if the test failed


@pytest.fixture
def any_stack(request: pytest.FixtureRequest) -> Stack | LiveStack:
    """For ``live`` tests: return the surrounding stack if ``PERSIA_TEST_LIVE=1``, or else a new stack."""
    if LIVE:
        stack = LiveStack()
        stack.wait_ready()
        if reason := stack.busy():
            pytest.skip(reason)
        return stack
    made: Stack = request.getfixturevalue("make_stack")()
    return made


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """Run a verb in this process: ``verb("eval", "runs/one", code=2)`` returns the output and the errors."""
    from persia.cli.main import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["persia", *arguments])
        sys.modules.pop("mine", None)  # the module of another test
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == code, captured.err
        return captured.out, captured.err

    return run


class Batches(IterableDataset):
    """Random batches over slots ``a`` (one id) and ``b`` (a list of ids), from a seed. A state dict continues them."""

    def __init__(self, count: int, *, seed: int = 0, batch_size: int = 32, ids: int = 200) -> None:
        super().__init__(buffer_size=4)
        self.count, self.seed, self.batch_size, self.ids = count, seed, batch_size, ids
        self.next = 0

    def batch(self, number: int, *, requires_grad: bool = True) -> PersiaBatch:
        """Return batch ``number``, which depends only on the number and the seed."""
        rng = np.random.default_rng([self.seed, number])
        single = rng.integers(0, self.ids, self.batch_size, dtype=np.uint64)
        lists = [rng.integers(0, self.ids, rng.integers(0, 4), dtype=np.uint64) for _ in range(self.batch_size)]
        dense = rng.standard_normal((self.batch_size, 3), dtype=np.float32)
        label = ((single % 3 == 0) | (dense[:, 0] > 1)).astype(np.float32)[:, None]
        return PersiaBatch(
            [IDTypeFeatureWithSingleID("a", single), IDTypeFeature("b", lists)],
            [NonIDTypeFeature(dense)],
            [Label(label, binary=True)],
            requires_grad=requires_grad,
        )

    def __iter__(self) -> Iterator[PersiaBatch]:
        while self.next < self.count:
            self.next += 1
            yield self.batch(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches yielded."""
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the batches that were yielded."""
        self.next = state_dict["next"]


class OneOfEach(IterableDataset):
    """A batch with one sample for each id, in each of some slots."""

    def __init__(self, slots: Sequence[str], ids: Sequence[int]) -> None:
        super().__init__()
        self.slots, self.ids = slots, np.array(ids, np.uint64)

    def __iter__(self) -> Iterator[PersiaBatch]:
        features = [IDTypeFeatureWithSingleID(slot, self.ids) for slot in self.slots]
        yield PersiaBatch(features, labels=[Label(np.zeros(len(self.ids), np.float32))])


def insert_rows(ctx: TrainCtx, slots: Sequence[str], ids: Sequence[int]) -> None:
    """Insert rows with their initial values, by a step whose push has gradients of 0 and a learning rate of 0."""
    for batch in DataLoader(OneOfEach(slots, ids), reproducible=True):
        batch.push([torch.zeros_like(from_dlpack(rows)) for rows in batch.embeddings()], 0.0)
    ctx.engine.drain()


class Given(IterableDataset):
    """Batches of the slot ``a`` with given ids, one batch for each array. Each pass begins with the first array."""

    def __init__(self, *ids: np.ndarray, buffer_size: int = 10) -> None:
        super().__init__(buffer_size=buffer_size)
        self.ids = ids

    def __iter__(self) -> Iterator[PersiaBatch]:
        for ids in self.ids:
            feature = IDTypeFeatureWithSingleID("a", ids.astype(np.uint64))
            yield PersiaBatch([feature], labels=[Label(np.zeros((len(ids), 1), np.float32))])


class Sum(torch.nn.Module):
    """Returns the sum of a sample's embedding, so every gradient is 1. The parameter is for the dense optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return ``[batch, 1]``."""
        return embedding_tensors[0].sum(1, keepdim=True) + self.bias


class TinyModel(torch.nn.Module):
    """A dense layer over dense inputs and all embeddings, which returns logits."""

    def __init__(self, dense: int = 3, embeddings: int = 8) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(dense + embeddings, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return ``[batch, 1]`` logits."""
        result: torch.Tensor = self.layers(torch.cat(non_id_tensors + embedding_tensors, 1))
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all``."""
    parser.addoption(
        "--all",
        action="store_true",
        help=f"in an image: run all tests that can run there; without it, a path, -k or -m only '{CHOSEN}'",
    )


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Refuse ``--all`` if the requirements of all tests are missing."""
    absent = [name for name in REQUIREMENTS if importlib.util.find_spec(name) is None]
    if not (IN_IMAGE and config.option.all and absent):
        return None
    sys.stderr.write(
        f"error: pytest --all needs {', '.join(absent)}, which the runtime image does not have\n"
        "  next: COMPOSE_FILE=docker-compose.yaml:docker-compose.test.yaml "
        "docker compose run --rm trainer pytest --all\n"
    )
    return 2


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers. In an image, select its tests unless the command line selects others."""
    option = config.option
    by_path = config.args_source == pytest.Config.ArgsSource.ARGS
    if IN_IMAGE and not (option.all or option.keyword or option.markexpr or by_path):
        option.markexpr = CHOSEN
    config.addinivalue_line("markers", "row(*ids): rows of tests/checklist.md that this test shows")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line(
        "markers", "integration: real processes on loopback; all of tests/integration and tests/chaos"
    )
    config.addinivalue_line("markers", "clone: reads what only a clone has; the images have no sources of the engine")
    config.addinivalue_line("markers", "live: also runs against the stack around it (PERSIA_TEST_LIVE=1)")
    config.addinivalue_line("markers", "stack: proves a part of the image; `pytest` in the trainer runs these and live")
    config.addinivalue_line("markers", "nightly: long by nature; `make test-all` runs it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests/integration and tests/chaos. Add to each report the checklist rows that its test claims."""
    for item in items:
        if {"integration", "chaos"} & {*item.path.parts}:
            item.add_marker("integration")
        item.user_properties += [("row", row) for marker in item.iter_markers("row") for row in marker.args]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """In an image, skip the tests that need a clone."""
    if item.get_closest_marker("clone") and IN_IMAGE:
        pytest.skip("no clone here")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests ran, and why the other tests did not run."""
    reports = terminalreporter.stats
    ran = len(reports.get("passed", ())) + len(reports.get("failed", ()))
    skipped = reports.get("skipped", ())
    reasons = Counter(why_skipped(report) for report in skipped)
    terminalreporter.write_line(f"{ran} ran, {len(skipped)} skipped" + (":" if reasons else ""))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} {reason}")


NIGHTLY = "skipped: nightly, make test-all shows it"
"""The outcome of a checklist row that has a test which only the long run includes."""
_rows: dict[str, set[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of every test that claims checklist rows."""
    if report.failed:
        outcome = "failed"
    elif report.skipped:
        outcome = f"skipped: {why_skipped(report)}"
    elif report.when == "call":
        outcome = "passed"
    else:
        return
    for name, row in report.user_properties:
        if name == "row":
            _rows.setdefault(str(row), set()).add(outcome)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Record the checklist rows of deselected tests: those that passed before, and those of the long run."""
    from selection import passed_before  # imported here, because pytest itself imports this plugin

    passed = passed_before(items[0].config) if items else set()
    for item in items:
        if item.nodeid not in passed and not item.get_closest_marker("nightly"):
            continue
        for row in (row for marker in item.iter_markers("row") for row in marker.args):
            _rows.setdefault(str(row), set()).add("passed" if item.nodeid in passed else NIGHTLY)


def why_skipped(report: pytest.TestReport) -> str:
    """Return the reason why a test was skipped or was expected to fail."""
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "expected to fail"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write ``runs/checklist.json``: a row passed if every test that claims it did.

    Rows that only another session ran are kept, because the tests in containers run separately. If tests run in several
    processes (``pytest -n 2``), this process gets all reports.
    """
    config: Any = session.config
    if hasattr(config, "workerinput"):
        config.workeroutput["rows"] = {row: sorted(outcomes) for row, outcomes in _rows.items()}
    elif _rows:
        write_rows(Path(config.rootpath) / "runs" / "checklist.json")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Get the information that only a worker has: the rows of the tests that it deselected."""
    for row, outcomes in getattr(node, "workeroutput", {}).get("rows", {}).items():
        _rows.setdefault(row, set()).update(outcomes)


def write_rows(path: Path) -> None:
    """Add the outcomes of this session's rows to the file."""
    state = json.loads(path.read_text()) if path.exists() else {}
    for row, outcomes in sorted(_rows.items()):
        skipped = sorted(outcome for outcome in outcomes if outcome.startswith("skipped"))
        state[row] = "failed" if "failed" in outcomes else skipped[0] if skipped else "passed"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dict(sorted(state.items())), indent=1) + "\n")
