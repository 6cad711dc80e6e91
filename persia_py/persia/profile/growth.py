"""The memory of this process while it trains: samples in a file and in the log, and a report of steady growth."""

import gc
import json
import os
import resource
import statistics
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from typing_extensions import Self

from persia.runtime import files, flight
from persia.runtime.errors import StorageError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

_logger = get_logger("memory")

FOLDER = "memory"
"""The folder for samples and reports, inside a run's folder."""
MB = 1e6
LINES = 10
"""The number of Python lines, and of kinds of tensors, in a report."""
SKIPPED = 2
"""The number of samples at the start that are ignored, because buffers, caches and the allocator's pool fill up."""
LEAST = 6
"""The number of further samples from which growth is reported."""
_ROW_OVERHEAD = 1.25
"""The resident memory of rows, as a multiple of the memory that the tables report. The factor is above 1, because the
allocator rounds up."""
_LINE = 65_536
"""The maximum length of a line of the record, in bytes."""
_MAXRSS = 1 if sys.platform == "darwin" else 1024
"""The unit in which the operating system reports the peak of resident memory, in bytes."""
_LONGEST = 20
"""The maximum number of samples that are compared. Older samples are dropped, because growth that begins late must be
found."""


@dataclass(frozen=True)
class Sample:
    """The memory of this process after a step. All sizes are bytes.

    Attributes:
        step: The step.
        rss: Resident memory of the process.
        peak: The peak of resident memory so far, as reported by the operating system.
        rows: Memory of embedding rows and their index, if they are in this process.
        row_count: The number of rows; 0 if they are on servers, or no context was given.
        python: Memory that Python and NumPy have allocated, if recorded.
        python_peak: The peak of ``python``.
        objects: The number of objects that the garbage collector tracks, if leaks are to be reported; otherwise 0.
        cuda: Memory that torch has allocated on the device.
        cuda_reserved: Memory that torch has reserved on the device.
        cuda_peak: The peak of ``cuda``.
    """

    step: int
    rss: int
    peak: int
    rows: int = 0
    row_count: int = 0
    python: int = 0
    python_peak: int = 0
    objects: int = 0
    cuda: int = 0
    cuda_reserved: int = 0
    cuda_peak: int = 0

    @property
    def grows(self) -> dict[str, int]:
        """The values that grow without bound if there is a leak, by name."""
        found = {"resident memory without embedding rows": self.rss - int(_ROW_OVERHEAD * self.rows)}
        if self.python:
            found["memory of Python"] = self.python
        if self.cuda:
            found["memory of the CUDA device"] = self.cuda
        return found


@dataclass(frozen=True)
class Growth:
    """Steady growth.

    Attributes:
        what: The value that grows.
        mb_per_1000: The growth, in MB per 1000 steps.
        first: The step of the first sample.
        last: The step of the last sample.
    """

    what: str
    mb_per_1000: float
    first: int
    last: int


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Return the growth in bytes per step: the median over all pairs of samples (Theil and Sen).

    A single outlier, such as a checkpoint in memory, does not affect the result.

    Args:
        points: Steps and bytes, at least two.
    """
    pairs = [
        (later - earlier) / (after - before)
        for index, (before, earlier) in enumerate(points)
        for after, later in points[index + 1 :]
    ]
    return statistics.median(pairs)


def steady_growth(samples: Sequence[Sample], limit_mb: float) -> Growth | None:
    """Return the fastest growth that is steady, or None.

    Growth is steady if the samples, and each half of them, grow by at least the limit. Memory that only fills up at the
    start, such as a cache, grows less in the second half.

    Args:
        samples: Equidistant samples, without the first :data:`SKIPPED`.
        limit_mb: The limit, in MB per 1000 steps.
    """
    if len(samples) < LEAST:
        return None
    found = []
    for what in samples[-1].grows:
        points = [(each.step, each.grows[what]) for each in samples if what in each.grows]
        if len(points) < LEAST:
            continue
        middle = len(points) // 2
        rates = [slope(part) * 1000 / MB for part in (points, points[: middle + 1], points[middle:])]
        if min(rates) >= limit_mb:
            found.append(Growth(what, rates[0], points[0][0], points[-1][0]))
    return max(found, key=lambda each: each.mb_per_1000, default=None)


@dataclass
class _Baseline:
    """The state at the first sample that counts."""

    lines: tracemalloc.Snapshot
    tensors: Counter[str] = field(default_factory=Counter)


class MemoryWatch:
    """Samples the memory of this process every ``every`` steps of the training loop in its ``with`` block.

    ::

        with TrainCtx(...) as ctx, MemoryWatch("memory", ctx, every=20, leaks=True):
            for batch in DataLoader(dataset):
                ...

    The class writes ``rank-N.jsonl`` with a line for each sample, and ``leak-rank-N.txt`` if memory grows. Lines are
    appended to those of an earlier attempt. If they cannot be written, a warning is logged once, and training
    continues.

    Args:
        folder: The folder for the files.
        ctx: The context of the loop. New rows of this context do not count as growth; with None, they count.
        every: The number of steps between two samples.
        leaks: Whether to report steady growth. Python allocations are then recorded, which makes Python code up to
            twice as slow.
        limit_mb: The minimum growth that is reported, in MB per 1000 steps.

    Attributes:
        found: The growth that was reported; None if there was none.

    Raises:
        StorageError: The folder cannot be created.
        UsageError: An argument is not above 0.
    """

    def __init__(
        self,
        folder: str | Path,
        ctx: Any = None,
        *,
        every: int = 100,
        leaks: bool = False,
        limit_mb: float = 100.0,
    ) -> None:
        if every < 1 or not limit_mb > 0:
            raise UsageError(
                f"MemoryWatch(every={every}, limit_mb={limit_mb}): every must be at least 1, and limit_mb above 0"
            )
        self._folder, self._ctx, self._every, self._leaks, self._limit = Path(folder), ctx, every, leaks, limit_mb
        self._process = psutil.Process()
        self._samples: list[Sample] = []
        self._steps = self._taken = self._peak = 0
        self._baseline: _Baseline | None = None
        self._own_trace = False
        self.found: Growth | None = None
        self._lines = self._folder / f"rank-{settings.rank}.jsonl"
        self._report = self._folder / f"leak-rank-{settings.rank}.txt"
        self._fails = False
        try:
            files.make_folders(self._folder.absolute())
        except OSError as error:
            raise StorageError(f"cannot write the memory record to {self._folder}: {error.strerror}") from error

    def _writing(self, path: Path, write: Callable[[], object]) -> bool:
        """Call ``write``, and return whether it succeeded. The first failure is logged."""
        try:
            write()
        except OSError as error:
            if not self._fails:
                text = "cannot write %s: %s; training continues, and the record of memory is incomplete"
                _logger.warning(text, path, error.strerror or error)
            self._fails = True
            return False
        return True

    def __enter__(self) -> Self:
        if self._leaks and not tracemalloc.is_tracing():
            tracemalloc.start()
            self._own_trace = True
        flight.observe(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        flight.unobserve(self)
        if self._own_trace:
            tracemalloc.stop()
        self._baseline = None

    def begun(self, call: flight.Call) -> None:
        """Do nothing."""

    def ended(self, call: flight.Call) -> None:
        """Do nothing."""

    def apart(self) -> None:
        """Do nothing."""

    def stepped(self, step: int) -> None:
        """Take a sample, if one is due."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._take(step)

    def _take(self, step: int) -> None:
        if self._leaks:
            gc.collect()  # garbage in cycles is not a leak
        sample = self._sample(step)
        self._taken += 1
        self._writing(self._lines, lambda: self._append(sample))
        _log(sample)
        if not self._leaks or self.found is not None or self._taken <= SKIPPED:
            return
        if self._baseline is None:
            self._baseline = _Baseline(tracemalloc.take_snapshot(), _tensors())
        self._samples = [*self._samples, sample][-_LONGEST:]
        self.found = steady_growth(self._samples, self._limit)
        if self.found is not None:
            self._tell(self.found, self._baseline)
            self._baseline = None

    def _append(self, sample: Sample) -> None:
        with self._lines.open("ab+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE))
            start, tail = file.tell(), file.read()
            if not tail.endswith(b"\n"):  # an incomplete line remains after a full disk or a crash
                file.truncate(start + tail.rfind(b"\n") + 1)
            file.write(json.dumps(asdict(sample)).encode() + b"\n")

    def _sample(self, step: int) -> Sample:
        rss = self._process.memory_info().rss
        self._peak = max(self._peak, rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS)
        rows = count = 0
        if self._ctx is not None and settings.nats_url is None:  # with servers, rows are in the memory of servers
            stats = self._ctx.engine.stats()
            rows, count = int(stats["memory_bytes"]), sum(stats["rows"].values())
        python = tracemalloc.get_traced_memory() if tracemalloc.is_tracing() else (0, 0)
        device = (0, 0, 0)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated())
        objects = len(gc.get_objects()) if self._leaks else 0
        return Sample(step, rss, self._peak, rows, count, *python, objects, *device)

    def _tell(self, growth: Growth, baseline: _Baseline) -> None:
        """Write the report and log it."""
        lines = [
            f"rank {settings.rank}: {growth.what} grows by {growth.mb_per_1000:,.0f} MB per 1000 steps, from step "
            f"{growth.first} to {growth.last} (limit {self._limit:g} MB)",
            *_grown_lines(baseline.lines),
            *_grown_tensors(baseline.tensors),
        ]
        content = ("\n".join(lines) + "\n").encode()
        written = self._writing(self._report, lambda: files.write_whole(self._report, content))
        causes = "a list that gets an item each step, or tensors kept with their graph (call .detach() or .item())"
        place = f"; the report is in {self._report}" if written else ""
        _logger.warning("memory: %s\nusual causes: %s%s", "\n".join(lines), causes, place)


def _log(sample: Sample) -> None:
    parts = [f"resident {sample.rss / MB:,.0f} MB", f"peak {sample.peak / MB:,.0f} MB"]
    if sample.row_count:
        parts.append(f"{sample.row_count:,} rows {sample.rows / MB:,.0f} MB")
    if sample.python:
        parts.append(f"Python {sample.python / MB:,.0f} MB, peak {sample.python_peak / MB:,.0f} MB")
    if sample.cuda_reserved:
        numbers = (sample.cuda / MB, sample.cuda_reserved / MB, sample.cuda_peak / MB)
        parts.append("CUDA {:,.0f} MB, reserved {:,.0f} MB, peak {:,.0f} MB".format(*numbers))
    _logger.info("memory at step %d: %s", sample.step, "; ".join(parts))


def _grown_lines(before: tracemalloc.Snapshot) -> list[str]:
    """Return the Python lines whose allocations grew most."""
    ignored = [tracemalloc.Filter(False, name) for name in (tracemalloc.__file__, __file__, "<frozen importlib*")]
    now = tracemalloc.take_snapshot().filter_traces(ignored)
    grown = [each for each in now.compare_to(before.filter_traces(ignored), "lineno") if each.size_diff > 0]
    grown.sort(key=lambda each: -each.size_diff)
    return [
        f"  {_shown(each.traceback[0].filename)}:{each.traceback[0].lineno}: {each.size_diff / MB:+,.2f} MB in "
        f"{each.count_diff:+,} blocks"
        for each in grown[:LINES]
    ]


def _tensors() -> "Counter[str]":
    """Return the bytes of the tensors of this process by shape, dtype and device."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    for each in gc.get_objects():
        if not issubclass(type(each), torch.Tensor):
            continue
        try:
            place = each.untyped_storage().data_ptr()
            size = each.numel() * each.element_size()
        except (RuntimeError, NotImplementedError):  # a tensor without storage, such as a fake one
            continue
        if place in seen:
            continue
        seen.add(place)
        found[f"{str(each.dtype).partition('.')[2]} {'x'.join(map(str, each.shape)) or 'scalar'} {each.device}"] += size
    return found


def _grown_tensors(before: "Counter[str]") -> list[str]:
    """Return the kinds of tensors that grew most."""
    grown = _tensors() - before
    return [f"  tensors {kind}: {size / MB:+,.2f} MB" for kind, size in grown.most_common(LINES)]


def _shown(path: str) -> str:
    """Return a path as a user would type it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
