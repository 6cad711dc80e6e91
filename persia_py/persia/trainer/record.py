"""The files that a run writes during training: lines of metrics, the summary, curves and a report."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.util import find_spec
from typing import Any

import persia
from persia.runtime.errors import ConfigError, StorageError
from persia.trainer.reports import EvaluationReport, StepReport
from persia.trainer.run_folder import METRICS, SUMMARY, RunFolder

RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"
STOPPED = "stopped"
"""The status of a run that has reached its budget; the summary has the ``reason``."""


class Record:
    """Writes the files of a run.

    Args:
        folder: The run's folder.
        tensorboard: Whether to also write event files for TensorBoard.
        resumed_step: The step after which the run resumes; lines of later steps are dropped. None for a new run.
    """

    def __init__(self, folder: RunFolder, *, tensorboard: bool, resumed_step: int | None) -> None:
        self._folder = folder
        before = folder.read_json(SUMMARY) if resumed_step is not None else {}
        self.started = before.get("started") or _now()
        self.summary: dict[str, Any] = {"status": RUNNING, "name": folder.path.name, "persia": persia.__version__}
        self.summary["process"] = {"host": socket.gethostname(), "pid": os.getpid()}
        self.summary["started"] = self.started
        self.summary["rows"] = {**(before.get("rows") or {})}
        if "baseline" in before:
            self.summary["baseline"] = before["baseline"]
        if resumed_step is not None:
            self.summary["resumed_after_step"] = resumed_step
            lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines() if _stays(line, resumed_step)]
            folder.write(METRICS, "".join(lines))
        self._board = _Board(folder, resumed_step) if tensorboard else None
        self.write({})

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``, see :func:`read_lines`."""
        return read_lines(self._folder)

    def add(self, report: StepReport | EvaluationReport) -> None:
        """Append a line.

        Raises:
            StorageError: The line cannot be written.
        """
        if isinstance(report, EvaluationReport):
            self.summary["rows"][report.part] = report.unusual.rows
        path = self._folder.path / METRICS
        line = report.as_dict()
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
        if self._board is not None:
            self._board.add(line)

    def write(self, more: dict[str, Any]) -> None:
        """Write the summary, with additional values."""
        self.summary.update(more)
        self.summary["updated"] = _now()
        self._folder.write_json(SUMMARY, self.summary)

    def end(self, error: BaseException | None, results: dict[str, Any]) -> None:
        """Record how the run ended, unless it is finished or stopped.

        Args:
            error: The exception that ended it, if any. The status is ``interrupted`` after a signal or an exit of the
                script, otherwise ``failed``.
            results: Additional values for the summary.
        """
        try:
            if self.summary["status"] not in (FINISHED, STOPPED):
                stopped = error is None or isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
                why = {} if stopped else {"error": f"{type(error).__name__}: {error}"}
                self.write({**results, "status": INTERRUPTED if stopped else FAILED, **why})
        finally:
            self._close()

    def _close(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None


def check_tensorboard() -> None:
    """Check that event files can be written.

    Raises:
        ConfigError: The package ``tensorboard`` is not installed.
    """
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "run.tensorboard: the package tensorboard is not installed",
            hint="pip install tensorboard; or train without event files: --set run.tensorboard=false",
        )


class _Board:
    """Writes event files for TensorBoard."""

    def __init__(self, folder: RunFolder, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder.path / "tensorboard"
        purge = None if resumed_step is None else resumed_step + 1
        make: Any = SummaryWriter
        with self._naming():
            self._writer = make(os.fspath(self._folder), purge_step=purge)

    def add(self, line: dict[str, Any]) -> None:
        step = line["step"]
        with self._naming():
            for name, value in _flat("", line):
                if name not in ("step", "best"):
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()  # the curves of a killed and resumed run then have no gap

    def close(self) -> None:
        with self._naming():
            self._writer.close()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot write to {self._folder}: {error.strerror or error}") from error


def read_lines(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` before the first incomplete one; none if the file cannot be read."""
    try:
        text = (folder.path / METRICS).read_text(encoding="utf-8")
    except OSError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _flat(prefix: str, values: dict[str, Any]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        place = f"{prefix}/{name}" if prefix else name
        if isinstance(value, dict):
            found += _flat(place, value)
        elif isinstance(value, int | float):
            found.append((place, float(value)))
    return found


def _stays(line: dict[str, Any], step: int) -> bool:
    return int(line.get("step", 0)) <= step and "test" not in line


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
