"""Batches that fail: each failure is written down, and a batch that always fails may be left out of the run."""

import contextlib
import dis
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from persia.distributed import run
from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
from persia.runtime import files, settings
from persia.runtime.errors import DataError, PersiaError, UsageError
from persia.runtime.logging import get_logger

if TYPE_CHECKING:
    from persia.backend.base import Backend
    from persia_core.data import Batch

_logger = get_logger("poison")

FOLDER = "poison"
"""The folder beside the saves of a run; no checkpoint."""
TRIES = 3
"""Failures after which a batch counts as one that always fails."""
APART = 100
"""Steps: where two that always fail are closer than this, it is hardly the data, and none of them is left out."""
_TOLD = 4096
"""Characters of an error that are kept."""


@dataclass(frozen=True)
class Work:
    """A batch that was fed to the engine, or is in work.

    Attributes:
        step: Its step.
        position: Where the data set stands behind it, as the data loader says it.
        batch: As the data set gave it; the engine has it, too, or another one in its place.
        spared: It always fails, and all ranks leave theirs out with it.
    """

    step: int
    position: str
    batch: "Batch"
    spared: bool = False


@dataclass(frozen=True)
class Record:
    """What is written down of a step that failed on a rank.

    Attributes:
        step: The step.
        rank: The rank.
        times: How often this batch has failed there.
        position: Where the data set stands behind the batch: a data loader's cursor.
        error: The class of the last error.
        text: What it says.
        meta: The first 200 of the bytes that travel with the batch, as text; None where there are none.
        checksum: Of the batch; None in a record of an older version.
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
        """Whether it is this batch that failed; the same place may have another one now."""
        return _place(self.position) == _place(position) and self.checksum == zlib.crc32(content)


class Poison:
    """What has failed on this rank, and which steps all ranks leave out.

    Args:
        skip: Leave batches out that always fail.

    Attributes:
        skipped: Steps that were left out, in this process; the same on all ranks.
        work: The batch that is in work.
    """

    def __init__(self, *, skip: bool) -> None:
        self.skipped = 0
        self.work: Work | None = None
        self._fed: Sequence[Work] = ()
        self._left_at: list[tuple[CodeType, int]] | None = None
        self._skip = skip
        self._folder: Path | None = None
        self._began = 0
        self._saved = 0  # the newest save, as far as is known
        self._mine: dict[int, Record] = {}
        self._always: set[int] = set()  # on any rank, however close
        self._out: set[int] = set()

    def forget(self) -> None:
        """Forget what was in work, at the start of a context."""
        self.at_work(None)
        self._fed = ()

    def begin(self, common: "Backend", folder: Path | None, fed: Sequence[Work]) -> None:
        """Learn what has failed so far, at the start of a training loop; every rank calls this.

        Args:
            common: Knows the other ranks, and how far training is.
            folder: Where it is written; None where this rank knows no such place.
            fed: The batches behind the one in work that the engine has; it changes as training goes on.
        """
        self.at_work(None)
        self._fed, self._folder = fed, folder
        self._began = self._saved = common.engine.step
        self._mine = self._read()
        always = [step for step, each in self._mine.items() if each.times >= TRIES] if self._skip else []
        self._always = {step for steps in common.gather("batches that always fail", always) for step in steps}
        ahead = {step for step in self._always if step > self._began}
        close = {step for step in ahead if self._beside(step)}
        self._out = ahead - close
        if close and common.writes:
            _logger.error("no batch of the steps %s is left out: %s", _listed(close), self._hardly_the_data())

    def _read(self) -> dict[int, Record]:
        """Return what is written down of this rank, by step."""
        found = {}
        with contextlib.suppress(OSError):  # nothing is there, or nothing can be read: nothing is left out
            for path in sorted(self._folder.glob(f"step-*.rank-{settings.get_rank()}.json")) if self._folder else []:
                try:
                    record = Record(**json.loads(path.read_bytes()))
                    _place(record.position)
                    found[int(record.step)] = replace(record, times=int(record.times))
                except (LookupError, TypeError, ValueError) as error:
                    _logger.warning("%s is no record of a batch that failed: %r", path, error)
        return found

    def _beside(self, step: int) -> set[int]:
        """Return the other steps close to this one that always fail, and are ahead of the newest save or next to it.

        Those that were left out before that save are behind for good, and steps between them and this one were trained.
        """
        near = {other for other in self._always if other != step and abs(other - step) < APART}
        return {other for other in near if other > self._saved or other == step - 1}

    def _hardly_the_data(self) -> str:
        return (
            f"where more than one of {APART} steps always fails it is hardly the data; correct what fails, and remove "
            f"{self._folder}, or from it the steps whose batches are to be tried again or are trained"
        )

    def spares(self, work: Work) -> bool:
        """Whether this batch of this rank is one that always fails, and is left out at its step."""
        record = self._mine.get(work.step) if work.step in self._out else None
        if record is None or record.times < TRIES:
            return False
        if record.is_of(json.loads(work.position), work.batch.to_bytes()):
            return True
        _logger.warning("step %d is trained: its batch is another one than that which failed", work.step)
        return False

    def leaves_out(self, common: "Backend", step: int, *, spared: bool) -> bool:
        """Whether all ranks leave this step out, because one has ``spared`` its batch; every rank calls this."""
        if not spared and step not in self._out:
            return False
        given = common.gather(f"step {step}, which always fails", spared)
        if not any(given):
            self._out.discard(step)
            return False
        self.skipped += 1
        ranks = _listed(rank for rank, spares in enumerate(given) if spares)
        _logger.warning(
            "step %d skipped, model and rows unchanged: its batch on rank %s always fails; %d skipped so far",
            step,
            ranks,
            self.skipped,
        )
        return True

    def at_work(self, work: Work | None) -> None:
        """Note which batch is in work."""
        self.work, self._left_at = work, None

    def loop_left(self, frame: FrameType | None) -> None:
        """Note where the callers of the loop are as its body ends before the data: by an error, or by ``break``.

        Args:
            frame: The innermost of them.
        """
        self._left_at = []
        while frame is not None:
            self._left_at.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back

    def _ended_the_body(self, error: BaseException | None) -> bool:
        """Whether the loop was left by this error, or by one that it was raised from, and not before it.

        Python closes the loop in either case before it tells the context of an error, but in the first the caller that
        has the loop stands where the error came from, or where it is raised again.
        """
        if self._left_at is None:
            return True
        while error is not None:
            came_from, trace = set(), error.__traceback__
            while trace is not None:
                came_from.add((trace.tb_frame.f_code, trace.tb_lasti))
                trace = trace.tb_next
            codes = {code for code, _ in came_from}
            at = next((each for each in self._left_at if each[0] in codes), None)
            if at is not None and (at in came_from or _raises_again(*at)):
                return True
            error = error.__cause__
        return False

    def failed(self, error: Exception) -> None:
        """Write down that a batch failed, if that is what ended training; this never raises."""
        work, others = self._blamed(error), run.peers()
        if work is None or (others is not None and others.gone(error)):
            return
        try:
            self._write(work, error)
        except Exception as problem:  # whatever it is, the error of the batch is the one to be told
            _logger.warning("step %d failed, but that cannot be written down: %s", work.step, problem)

    def _blamed(self, error: Exception) -> Work | None:
        """Return the batch whose failure this is: the one in work, or one behind it whose look-up was refused."""
        if isinstance(error, PersiaError):
            if not isinstance(error, DataError):
                return None
            step, fed = _step_of(error), self._fed
            if step is not None and fed and 0 <= step - fed[0].step < len(fed):
                return fed[step - fed[0].step]
            if self.work is not None and step not in {None, self.work.step}:
                return None
        return self.work if self._ended_the_body(error) else None

    def _write(self, work: Work, error: Exception) -> None:
        if self._folder is None:
            raise UsageError("this rank knows no folder of checkpoints; set PERSIA_CKPT_DIR")
        rank, position, meta = settings.get_rank(), json.loads(work.position), work.batch.meta
        content = work.batch.to_bytes()
        before = self._mine.get(work.step)
        same = before is not None and before.is_of(position, content)
        record = Record(
            work.step,
            rank,
            before.times + 1 if before is not None and same else 1,
            position,
            type(error).__name__,
            str(error)[:_TOLD],
            None if meta is None else meta[:200].decode(errors="backslashreplace"),
            zlib.crc32(content),
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(work.step)
        if not same:
            files.write_whole(path.with_suffix(".batch"), content)
        files.write_whole(path, json.dumps(asdict(record), indent=1).encode() + b"\n")
        _logger.error(
            "step %d failed on rank %d for the %s time: %s: %s; see %s, and the batch beside it; %s",
            work.step,
            rank,
            _nth(record.times),
            record.error,
            record.text.partition("\n")[0],
            path,
            self._what_next(record),
        )

    def _what_next(self, record: Record) -> str:
        if record.times < TRIES:
            left = f"the batch is tried again when the run is started again; after {TRIES} times "
            return left + ("it is left out" if self._skip else "it counts as one that always fails")
        if not self._skip:
            return "it always fails: look at the batch, or go on without it by Checkpoints(failing_batches='skip')"
        if beside := self._beside(record.step):
            return f"it always fails, and so do the steps {_listed(beside)}: {self._hardly_the_data()}"
        return "it always fails, and is left out when the run is started again"

    def saved(self, step: int) -> None:
        """Forget the failures of steps that this process has trained, up to that of a save that is written."""
        self._saved = max(self._saved, step)
        for each in [each for each in self._mine if self._began < each <= step and each not in self._out]:
            del self._mine[each]
            for suffix in (".json", ".batch"):
                with contextlib.suppress(OSError):
                    self._path(each).with_suffix(suffix).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return Path(self._folder or "", f"step-{step}.rank-{settings.get_rank()}.json")


def blank(slots: list[str]) -> "Batch":
    """Return a batch without an id, to be looked up in place of one that may be refused; it is never trained on."""
    none = [np.empty(0, np.uint64)]
    return PersiaBatch([IDTypeFeature(slot, none) for slot in slots], labels=[Label(np.zeros((1, 1), np.float32))]).data


def _step_of(error: Exception) -> int | None:
    """Return the step that the engine names in an error, if it names one: look-ups are ahead of training."""
    found = re.search(r"\bstep ([0-9]+)", str(error))
    return None if found is None else int(found[1])


def _raises_again(code: CodeType, instruction: int) -> bool:
    """Whether this is where Python goes on with an error: a ``raise`` of nothing new, the end of a ``with``."""
    name, argument = dis.opname[code.co_code[instruction]], code.co_code[instruction + 1]
    return name == "RERAISE" or (name == "RAISE_VARARGS" and argument == 0)


def _place(position: dict[str, Any]) -> Any:
    """Return what of a position is the same in every run; batches are counted anew where the data set is told."""
    return position["batches"] if position["source"] is None else position["source"]


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _nth(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")
