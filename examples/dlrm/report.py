"""The report of a run: a progress bar, a table, a plot of its curves, and ``summary.json``."""

import json
import os
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torchmetrics.functional.classification import binary_auroc
from typing_extensions import Self

SMOOTHED_STEPS = 20
"""Steps over which the loss is averaged, on the bar and in the picture."""


@dataclass(frozen=True)
class Quality:
    """Metrics of scores and labels."""

    auc: float
    log_loss: float

    @classmethod
    def of(cls, logits: torch.Tensor, labels: torch.Tensor) -> Self:
        """Compute the metrics of logits and labels of the same shape."""
        logits, labels = logits.double().flatten(), labels.double().flatten()
        return cls(
            auc=binary_auroc(torch.sigmoid(logits), labels.int()).item(),
            log_loss=torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).item(),
        )


class Run:
    """One training run and its output folder; a context manager around the training.

    ``summary.json`` exists from the start, with the ``status`` ``running``. After :meth:`finish`, the status is
    ``finished``. If the block ends earlier, it is ``failed``, or ``interrupted`` after Ctrl-C or SIGTERM.

    Args:
        out: The folder in which the run's folder is created.
        name: The suffix of the folder's name.
        steps: The number of steps of the training.

    Attributes:
        folder: The run's folder.
    """

    def __init__(self, out: Path, name: str, steps: int) -> None:
        started = datetime.now(timezone.utc)
        self.folder = out / f"{started:%Y%m%d-%H%M%S-%f}-{name}"
        self._console = Console()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]} · AUC {task.fields[auc]} · {task.fields[speed]} samples/s"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("training", total=steps, loss="-", auc="-", speed="-")
        self._losses: list[float] = []
        self._validations: list[tuple[int, Quality]] = []
        self._samples = self._before = 0
        self._start = self._seconds = 0.0
        self._rows: int | None = None
        self._test: Quality | None = None
        self._finished = False

    def __enter__(self) -> Self:
        """Make the folder and start the clock."""
        self.folder.mkdir(parents=True)
        self._write("running")
        self._progress.start()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record how the training ended."""
        if not self._finished:
            self._progress.stop()
            interrupted = kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit))
            self._write("interrupted" if interrupted else "failed")

    def goes_on_behind(self, step: int) -> None:
        """Count from a step that an earlier process of this run has reached."""
        self._before = step
        self._progress.update(self._task, completed=step)

    def step(self, loss: float, samples: int) -> None:
        """Count a training step."""
        self._losses.append(loss)
        self._samples += samples
        self._seconds = time.perf_counter() - self._start
        smooth = float(np.mean(self._losses[-SMOOTHED_STEPS:]))
        self._progress.update(self._task, advance=1, loss=f"{smooth:.4f}", speed=f"{self._speed:,.0f}")

    def validated(self, quality: Quality) -> None:
        """Record the quality on the validation samples after the last step."""
        self._validations.append((self._before + len(self._losses), quality))
        self._seconds = time.perf_counter() - self._start
        self._progress.update(self._task, auc=f"{quality.auc:.4f}")

    def finish(self, test: Quality, rows: int) -> None:
        """Draw the curves, write the summary, show it, and print its path last."""
        self._test, self._rows = test, rows
        self._progress.stop()
        self._draw()
        path = self._write("finished")
        self._finished = True
        self._console.print(self._table())
        print(path)

    @property
    def _speed(self) -> float:
        return self._samples / self._seconds

    def _table(self) -> Table:
        table = Table("", "value", title="Census-Income, test split")
        for name, value in self._summary("finished").items():
            table.add_row(name, f"{value:.4f}" if name in ("auc", "log_loss") else f"{value}")
        table.add_row("curves", f"{self.folder / 'curves.png'}")
        return table

    def _summary(self, status: str) -> dict[str, str | float | None]:
        return {
            "status": status,
            "auc": None if self._test is None else self._test.auc,
            "log_loss": None if self._test is None else self._test.log_loss,
            "samples_per_s": round(self._speed) if self._samples else None,
            "steps": self._before + len(self._losses),
            "seconds": round(self._seconds, 2),
            "rows": self._rows,
        }

    def _write(self, status: str) -> Path:
        """Replace the summary atomically. No reader finds an incomplete file."""
        path = self.folder / "summary.json"
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(self._summary(status), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        return path

    def _draw(self) -> None:
        figure = Figure(figsize=(8, 6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)
        if self._losses:
            window = min(SMOOTHED_STEPS, len(self._losses))
            smooth = np.convolve(self._losses, np.ones(window) / window, mode="valid")
            trained = self._before + np.arange(window, len(self._losses) + 1)
            top.plot(trained, smooth, label=f"training, mean of {window} steps")
        steps = [step for step, _ in self._validations]
        top.plot(steps, [quality.log_loss for _, quality in self._validations], "o-", label="validation")
        top.set(ylabel="loss", yscale="log")
        top.legend()
        bottom.plot(steps, [quality.auc for _, quality in self._validations], "o-", color="tab:orange")
        bottom.set(xlabel="step", ylabel="validation AUC")
        for axes in (top, bottom):
            axes.grid(alpha=0.3)
        figure.savefig(self.folder / "curves.png", dpi=120)
