"""Tests a configuration: runs one batch through all parts of training, in folders that are removed afterwards."""

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from persia.checkpoint.foreign import open_checkpoint
from persia.config import Config
from persia.config.blocks import CheckpointBlock, RunBlock, SplitBlock
from persia.data import IterableDataset
from persia.runtime import signals
from persia.runtime.errors import CheckpointError, PersiaError, UsageError
from persia.runtime.settings import settings, variable
from persia.trainer import fitting
from persia.trainer.batches import TrainingBatches
from persia.trainer.parts import Parts
from persia.trainer.run_folder import RunFolder
from persia.trainer.trainer import Trainer

VARIABLE = "PERSIA_TEST_RUN"
"""The variable that marks ranks of a test. ``stream``: data-compose sends the batch. ``own``: the rank reads the
batch."""

STEPS = {
    "build": "read rows, make the model and open the tables",
    "batch": "train on one batch",
    "evaluate": "evaluate the model",
    "checkpoint": "write a checkpoint, and verify it",
}
"""The steps of a test, in order."""

_NEXT = {
    "build": "python -m persia.testing {file}",
    "batch": "python -m persia.testing {file}",
    "evaluate": "persia config show {file}",
    "checkpoint": "persia doctor {file} --only disk",
}
"""The next command after a failed step, if the error has no hint of its own."""


class Ticks:
    """Prints a line for each step of a test: a tick or, if the step fails, a cross; the error is then raised.

    Args:
        file: The ``persia.yml``, for the next command.
        who: The prefix of each line, such as ``rank 1: ``.
        say: Prints a line.
    """

    def __init__(self, file: str, who: str = "", say: Callable[[str], None] | None = None) -> None:
        self._file, self._who = file, who
        self._say = say or _print

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Enclose a step.

        Args:
            name: One of :data:`STEPS`.
        """
        try:
            yield
        except Exception as error:
            self._say(f"{self._who}✗ {name}: could not {STEPS[name]}")
            if isinstance(error, PersiaError) and _lacks_hint(error, name):
                error.hint = _NEXT[name].format(file=shlex.quote(self._file))
            raise
        self._say(f"{self._who}✓ {name}")


def _lacks_hint(error: PersiaError, step: str) -> bool:
    """Whether an error of a step has no hint, or its hint is wrong because the checkpoint of a test is removed."""
    if "hint" in vars(error):  # "" if the message includes the next step
        return False
    return not error.hint or (step == "checkpoint" and isinstance(error, CheckpointError))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def check_storage(config: Config) -> None:
    """Check the storage that the run itself would use. This call creates no folder.

    Raises:
        StorageError: The storage cannot be written.
    """
    RunFolder(Path(config.run.dir).expanduser() / (config.run.name or "test")).check_storage(config)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder for the duration of the block. SIGTERM and SIGHUP end the block, and the folder is removed."""
    with signals.cleaned_up(), tempfile.TemporaryDirectory(prefix="persia-test-") as name:
        yield Path(name)


def shortened(config: Config, folder: Path) -> Config:
    """Return a configuration that trains on one batch, and writes only into a folder.

    The first training, validation and test rows are copied into the folder. Without a validation set, training rows are
    used.

    Args:
        config: The configuration.
        folder: The folder for the rows and the run.

    Raises:
        UsageError: A file does not exist.
        DataError: A part has no rows, or a file is damaged.
    """
    parts = Parts(config)
    parts.check_not_empty()
    files: dict[str, str] = {}
    for part in (parts.train, parts.valid, parts.test):
        if part is not None:
            path = folder / f"{part.name}.parquet"
            rows = next(iter(part.reader(config.step_rows)))
            pyarrow.parquet.write_table(pa.Table.from_batches([rows]), path)
            files[part.name] = str(path)
    data = config.data.model_copy(
        update={
            "valid": files["train"],
            "test": None,
            "format": None,
            "preset": None,
            "columns": {},
            "header": None,
            "split": SplitBlock(by="file"),
            "epochs": 1,
        }
        | files
    )
    train = config.train.model_copy(
        update={"lr_schedule": "constant", "warmup": 0, "evaluate_every": 1}
        # In a job, the test does not load start_from, which is a folder below PERSIA_CKPT_DIR.
        | ({} if settings.nats_url is None else {"start_from": None})
    )
    return config.with_blocks(
        data=data,
        train=train,
        checkpoint=CheckpointBlock(every=1, keep=1),
        profile=None,
        run=RunBlock(dir=str(folder / "runs"), name="test", log_every=1),
    )


def run_here(config: Config, file: str) -> None:
    """Test a configuration in this process, and print four ticks.

    Args:
        config: The configuration.
        file: The ``persia.yml``, for messages.

    Raises:
        PersiaError: A step failed; its name is printed, and the hint is the next command.
        Exception: The model raised it.
    """
    check_storage(config)
    with private_folder() as folder:
        train(lambda: Trainer(shortened(config, folder)), Ticks(file))


def train(make: Callable[[], Trainer], ticks: Ticks, source: Callable[[], IterableDataset] | None = None) -> None:
    """Train on the single batch of a trainer's configuration, and show each step.

    Args:
        make: Creates the trainer, from a configuration of :func:`shortened`.
        ticks: Shows the steps.
        source: Creates the data set of the batch; None means ``data.train``, or the stream of a job.
    """
    with contextlib.ExitStack() as opened:
        with ticks.step("build"):
            trainer = opened.enter_context(make())
            reports = trainer.fit(None if source is None else source())
        with ticks.step("batch"):
            if next(reports, None) is None:
                raise UsageError(
                    "no batch was trained on: the data ended before the first batch",
                    hint="check data.train, or the log of data-compose",
                )
        with ticks.step("evaluate"):
            next(reports, None)
        with ticks.step("checkpoint"):
            for _ in reports:
                pass
            _verify(trainer)


def _verify(trainer: Trainer) -> None:
    """Check every file of the checkpoint, on the rank that wrote it."""
    if trainer.folder is None or settings.rank != 0:
        return
    saved = trainer.folder.saves(trainer.config) / "step-1"
    checkpoint = open_checkpoint(saved)
    checkpoint.verify()
    if checkpoint.step != 1:
        raise CheckpointError(f"{saved}: the checkpoint is of step {checkpoint.step}, expected step 1")


def train_rank(config: Config, path: Path, how: str) -> None:
    """Test a configuration on this rank of a job.

    Args:
        config: A configuration of :func:`shortened`, which all processes of the job have.
        path: The file of the configuration, for messages.
        how: The value of :data:`VARIABLE`.
    """
    given = variable(f"{VARIABLE}_FILE") or os.fspath(path)
    ticks = Ticks(given, f"rank {settings.rank}: ")
    train(lambda: Trainer(config), ticks, None if how == "stream" else lambda: _own_batch(config))


def _own_batch(config: Config) -> IterableDataset:
    """Return a data set whose batches this rank reads itself."""
    parts = Parts(config)
    reader = parts.train.reader(config.step_rows)
    return TrainingBatches(parts.train, reader, fitting.fit(config, parts).transform, config.train.weight)
