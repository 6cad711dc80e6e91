"""The progress display: a live line on a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typing_extensions import Self

from persia.trainer.batches import Unusual
from persia.trainer.pages import results_table
from persia.trainer.reports import EvaluationReport, StepReport, title
from persia.trainer.run_folder import Found

_KINDS = {
    "not_finite": "NaN or infinite",
    "wrong_type": "of a wrong type",
    "out_of_range": "beyond the range of training",
    "truncated": "cut to the last ids",
}
"""Display names for kinds of unusual values that need more than the word in the report."""


class Shown:
    """Shows reports as they arrive. A context manager around training.

    Args:
        metric: The metric of the validation set to show.
        console: The output; None means standard output.

    Attributes:
        reports: The number of reports that were shown.
    """

    def __init__(self, metric: str = "auc", console: Console | None = None) -> None:
        self._console = console or Console()
        self._metric = metric
        self.reports = 0
        self._live: Progress | None = None
        if self._console.is_terminal:
            columns = (
                BarColumn(bar_width=8),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]} · {task.fields[metric]} · {task.fields[speed]} samples/s"),
                TextColumn("· staleness {task.fields[staleness]} · {task.fields[limit]}"),
                TimeElapsedColumn(),
            )
            self._live = Progress(*columns, console=self._console)
            fields: dict[str, Any] = {"loss": "-", "speed": "-", "staleness": "-", "limit": ""}
            self._task = self._live.add_task("", total=None, metric=f"{title(metric)} -", **fields)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, line: str) -> None:
        """Show a line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def report(self, report: StepReport | EvaluationReport) -> None:
        """Show a report."""
        self.reports += 1
        if self._live is None:
            self._console.print(str(report), markup=False, highlight=False, soft_wrap=True)
        elif isinstance(report, StepReport):
            limit = max(report.shares, key=lambda name: report.shares[name])
            self._live.update(
                self._task,
                total=report.total_steps,
                completed=report.step,
                loss=f"{report.loss:.4f}",
                speed=f"{report.samples_per_s:,.0f}",
                staleness=report.staleness,
                limit=f"limit {limit} {report.shares[limit]:.0%}",
            )
        else:
            value = report.value(self._metric)
            if report.part == "valid" and value is not None:
                self._live.update(self._task, metric=f"{title(self._metric)} {value:.4f}")
            self._console.print(str(report), markup=False, highlight=False, soft_wrap=True)


def show_results(summary: dict[str, object], console: Console | None = None) -> None:
    """Show the table of results of a run."""
    heads, rows = results_table(summary)
    if not rows:
        return
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    (console or Console()).print(table)


def show_evaluation(report: EvaluationReport, found: Found, console: Console | None = None) -> None:
    """Show which rows were evaluated, the metrics, reasons for undefined ones, and unusual values.

    Args:
        report: The evaluation.
        found: The run and its checkpoint.
        console: The output; None means standard output.
    """
    console = console or Console()
    console.print(f"{found}: {rows_of(report)}", markup=False, highlight=False, soft_wrap=True)
    names = [*dict.fromkeys(name for metrics in report.labels.values() for name in metrics.values)]
    table = Table("", "rows", *(title(name) for name in names))
    for label, metrics in report.labels.items():
        values = [metrics.values.get(name) for name in names]
        table.add_row(label, f"{metrics.rows:,}", *("-" if value is None else f"{value:.4f}" for value in values))
    console.print(table)
    for label, metrics in report.labels.items():
        for name, why in metrics.notes.items():
            console.print(f"{label}: {title(name)} is not defined: {why}", markup=False, highlight=False)
    for line in unusual_lines(report.unusual, report.without_row):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def rows_of(report: EvaluationReport) -> str:
    """Return a description of the evaluated rows: the files, and the part of them if the user did not specify files."""
    shown = shown_paths(report.files)
    return shown if report.part == "given" else f"the {report.part} set of {shown}"


def shown_paths(paths: Sequence[str], most: int = 3) -> str:
    """Return paths for display; those below the working directory become relative."""
    here = Path.cwd()
    shown = [str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path for path in paths]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def unusual_lines(unusual: Unusual, without_row: float) -> list[str]:
    """Return lines about unusual values in rows, and about ids without a row."""
    listed = [
        f"{feature}: {', '.join(f'{count:,} {_KINDS.get(kind, kind)}' for kind, count in kinds.items())}"
        for feature, kinds in unusual.counts.items()
        if kinds
    ]
    head = f"unusual values in {unusual.rows:,} rows:"
    lines = [f"{head} none"] if not listed else [head, *(f"  {line}" for line in listed)]
    share = f"{without_row:.2%} of the looked-up ids have no row"
    return [*lines, f"{share}, for example because they did not occur in training"]
