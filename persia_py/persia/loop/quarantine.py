"""Records batches that fail. Steps whose batches always fail may be skipped."""

import contextlib
import json
import zlib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from persia.checkpoint.policy import Checkpoints
from persia.distributed import run
from persia.distributed.link import names
from persia.loop.feeder import FedBatch
from persia.loop.hooks import Loop
from persia.runtime import files
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.places import Place
from persia.runtime.settings import settings

_logger = get_logger("quarantine")

FOLDER = "poison"
"""The folder next to the checkpoints of a run. Its name differs from ``quarantine`` for compatibility with earlier
versions."""
TRIES = 3
"""The number of failures after which a batch counts as always failing."""
MIN_STEP_DISTANCE = 100
"""The minimum distance between failing steps that are skipped, in steps.

Closer failures suggest a bug, and none of these steps is skipped.
"""
_KEPT = 4096
"""The maximum number of characters of an error that are stored."""


@dataclass(frozen=True)
class Record:
    """The record of a step that failed on a rank.

    Attributes:
        step: The step.
        rank: The rank.
        times: The number of failures of this batch at this step.
        position: The position of the data set after the batch, which is a cursor of the data loader.
        error: The class of the last error.
        text: The message of the last error.
        meta: The first 200 bytes of the batch's metadata, as text; None if it has none.
        checksum: The checksum of the batch; None in a record of an older version.
    """

    step: int
    rank: int
    times: int
    position: dict[str, Any]
    error: str
    text: str
    meta: str | None
    checksum: int | None = None

    def is_of(self, position: dict[str, Any], content: bytes) -> bool:
        """Whether this batch failed, and not another batch that had the same position in an earlier attempt."""
        return _place(self.position) == _place(position) and self.checksum == zlib.crc32(content)


def _folder_of(checkpoints: Place) -> Path | None:
    """Return the folder of records: next to the checkpoints or, if they are in an object store, in the run's folder.

    Return None if there is no such folder.
    """
    if isinstance(checkpoints, Path):
        return checkpoints / FOLDER
    return None if settings.run_dir is None else Path(settings.run_dir, FOLDER)


class Quarantine:
    """A hook of the training loop that records failing batches of this rank, and makes all ranks skip steps together.

    Args:
        checkpoints: The options of checkpoints. They determine whether steps that always fail are skipped, and the
            folder of the records.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._skip = checkpoints.failing_batches == "skip"
        self._folder: Path | None = None
        self._began = 0
        self._saved = 0  # the step of the newest known checkpoint
        self._mine: dict[int, Record] = {}
        self._always: set[int] = set()  # steps whose batch on any rank always fails, at any distance
        self._to_skip: set[int] = set()  # steps to skip, unless their batches have changed

    @property
    def identity(self) -> str:
        """The settings that must be equal on all ranks."""
        return f"Quarantine({self._checkpoints.failing_batches})"

    def on_start(self, loop: Loop) -> None:
        """Load the recorded failures and share them. Collective: every rank must call it."""
        backend = loop.backend
        name = backend.all_gather("folder of the saves", self._checkpoints.name() if backend.is_rank_0 else None)[0]
        try:
            where = backend.checkpoint_dir(name)
        except UsageError:  # this rank has no folder, and needs none unless a batch fails
            self._folder = None
        else:
            self._folder = _folder_of(where)
        self._began = self._saved = backend.engine.step
        self._mine = self._read()
        always = [step for step, each in self._mine.items() if each.times >= TRIES] if self._skip else []
        self._always = {step for steps in backend.all_gather("batches that always fail", always) for step in steps}
        ahead = {step for step in self._always if step > self._began}
        close = {step for step in ahead if self._nearby_failures(step)}
        self._to_skip = ahead - close
        if close and backend.is_rank_0:
            _logger.error(
                "%s %s always fail%s: %s",
                _steps(close),
                "are not skipped, although their batches" if len(close) > 1 else "is not skipped, although its batch",
                "" if len(close) > 1 else "s",
                self._hardly_the_data(),
            )

    def _read(self) -> dict[int, Record]:
        """Return the records of this rank, by step."""
        found = {}
        for path in self._records():
            try:
                record = Record(**json.loads(path.read_bytes()))
                _place(record.position)
                found[int(record.step)] = replace(record, times=int(record.times))
            except (LookupError, TypeError, ValueError) as error:
                line = "ignoring %s, which is not a record of a failed batch: %s: %s"
                _logger.warning(line, path, type(error).__name__, error)
            except OSError as error:
                line = "cannot read %s, the record of a failed batch: %s; its failures are not counted"
                _logger.warning(line, path, error.strerror or error)
        return found

    def _records(self) -> list[Path]:
        """Return the files with records of this rank."""
        if self._folder is None:
            return []
        try:
            return sorted(self._folder.glob(f"step-*.rank-{settings.rank}.json"))
        except FileNotFoundError:  # no batch has failed yet
            return []
        except OSError as error:  # not raised, because the other ranks wait for this rank
            line = "cannot list the records of failed batches in %s: %s; earlier failures are not counted"
            _logger.warning(line, self._folder, error.strerror or error)
            return []

    def _nearby_failures(self, step: int) -> set[int]:
        """Return the nearby steps that always fail, and are after the newest checkpoint or directly before ``step``.

        Other steps that were skipped before the newest checkpoint do not count, because steps between them and ``step``
        were trained.
        """
        near = {other for other in self._always if other != step and abs(other - step) < MIN_STEP_DISTANCE}
        return {other for other in near if other > self._saved or other == step - 1}

    def _hardly_the_data(self) -> str:
        return (
            f"if more than one of {MIN_STEP_DISTANCE} consecutive steps always fails, the data is probably not the "
            f"cause; correct the error, and remove {self._folder}, or only the records of the steps to retry"
        )

    def before_lookup(self, fed_batch: FedBatch) -> bool:
        """Whether this batch always fails on this rank. In this case its step is skipped."""
        record = self._mine.get(fed_batch.step) if fed_batch.step in self._to_skip else None
        if record is None or record.times < TRIES:
            return False
        if record.is_of(json.loads(fed_batch.position), fed_batch.batch.to_bytes()):
            return True
        _logger.warning("step %d is trained, not skipped: its batch is not the one that failed before", fed_batch.step)
        return False

    def vote(self, fed_batch: FedBatch | None) -> bool:
        """Return whether the next step must be skipped, as far as this rank knows."""
        return fed_batch is not None and fed_batch.quarantined

    def decide(self, step: int, votes: list[bool]) -> bool:
        """Return whether all ranks skip this step, because the batch of one rank always fails."""
        if not any(votes):
            self._to_skip.discard(step)
            return False
        self._checkpoints.skipped += 1
        _logger.warning(
            "step %d skipped, model and rows unchanged: its batch on %s always fails; %d skipped so far",
            step,
            names([rank for rank, fails in enumerate(votes) if fails]),
            self._checkpoints.skipped,
        )
        return True

    def on_error(self, error: Exception, fed_batch: FedBatch | None) -> None:
        """Record that a batch failed, if it caused training to end. This never raises an exception."""
        others = run.peers()
        if fed_batch is None or (others is not None and others.gone(error)):
            return
        try:
            self._write(fed_batch, error)
        except Exception as problem:  # any exception, because the error of the batch must be reported
            _logger.warning("step %d failed, but the failure cannot be recorded: %s", fed_batch.step, problem)

    def _write(self, fed_batch: FedBatch, error: Exception) -> None:
        if self._folder is None:
            raise UsageError("this rank has no folder for the record; set PERSIA_CKPT_DIR or PERSIA_RUN_DIR")
        rank, position, meta = settings.rank, json.loads(fed_batch.position), fed_batch.batch.meta
        content = fed_batch.batch.to_bytes()
        before = self._mine.get(fed_batch.step)
        same = before is not None and before.is_of(position, content)
        record = Record(
            fed_batch.step,
            rank,
            before.times + 1 if before is not None and same else 1,
            position,
            type(error).__name__,
            str(error)[:_KEPT],
            None if meta is None else meta[:200].decode(errors="backslashreplace"),
            zlib.crc32(content),
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(fed_batch.step)
        if not same:
            files.write_whole(path.with_suffix(".batch"), content)
        files.write_whole(path, json.dumps(asdict(record), indent=1).encode() + b"\n")
        _logger.error(
            "step %d failed on rank %d for the %s time: %s: %s; see %s, and the .batch file next to it; %s",
            fed_batch.step,
            rank,
            _nth(record.times),
            record.error,
            record.text.partition("\n")[0],
            path,
            self._what_next(record),
        )

    def _what_next(self, record: Record) -> str:
        if record.times < TRIES:
            next_time = f"the batch is retried when the run is restarted; after {TRIES} failures "
            return next_time + ("its step is skipped" if self._skip else "the batch counts as one that always fails")
        if not self._skip:
            return (
                "the batch always fails: inspect it, or, in a script, skip its step with "
                "Checkpoints(failing_batches='skip')"
            )
        if nearby := self._nearby_failures(record.step):
            others = f"{'those' if len(nearby) > 1 else 'that'} of {_steps(nearby)}"
            return f"the batch always fails, like {others}: {self._hardly_the_data()}"
        return "the batch always fails, and its step is skipped when the run is restarted"

    def after_commit(self, step: int) -> None:
        """Delete the records of steps that this process has trained, up to the step of a written checkpoint."""
        self._saved = max(self._saved, step)
        for each in [each for each in self._mine if self._began < each <= step and each not in self._to_skip]:
            del self._mine[each]
            for suffix in (".json", ".batch"):
                with contextlib.suppress(OSError):
                    self._path(each).with_suffix(suffix).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return Path(self._folder or "", f"step-{step}.rank-{settings.rank}.json")


def _place(position: dict[str, Any]) -> Any:
    """Return the part of a position that identifies a batch across restarts: the source state, or else the count."""
    return position["batches"] if position["source"] is None else position["source"]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _steps(numbers: Collection[int]) -> str:
    return f"step{'s' * (len(numbers) > 1)} {_listed(numbers)}"


def _nth(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")
