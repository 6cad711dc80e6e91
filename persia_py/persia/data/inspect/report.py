"""Prints the statistics of a table and the proposal for it."""

from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from persia.data.inspect.columns import Column
from persia.data.inspect.proposal import Proposal
from persia.data.inspect.scan import Table

_HEAD = ("column", "type", "missing", "values", "most frequent, or range", "alone", "feature")


def show(table: Table, proposal: Proposal, console: Console | None = None) -> None:
    """Print the columns: a table on a terminal, otherwise plain lines."""
    console = console or Console(highlight=False)
    rows = [_row(column, proposal) for column in table.columns.values()]
    console.print(_head(table), markup=False, soft_wrap=True)
    if console.is_terminal:
        shown = RichTable(*_HEAD, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            shown.add_row(*map(_escaped, row))
        console.print(shown)
    else:
        widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
        for row in (_HEAD, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            console.print("  ".join(cells).rstrip(), markup=False, soft_wrap=True)
    share = float(proposal.label.positive.mean())
    console.print(
        f"label: {proposal.label.column} ({proposal.label.reason}); {share:.2%} are 1", markup=False, soft_wrap=True
    )
    for warning in proposal.warnings:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")


def _head(table: Table) -> str:
    first = table.files.paths[0]
    many = f" and {len(table.files.paths) - 1} more" if len(table.files.paths) > 1 else ""
    of = "" if table.whole else f" of {table.total:,}" if table.total is not None else " of more"
    limit = "" if table.whole else "; counts are those of the rows that were read (--rows)"
    return (
        f"{first}{many}: {table.rows:,} rows{of}, {len(table.columns)} columns{limit}; shares of values are those of a "
        f"sample of {table.sample.num_rows:,} rows"
    )


def _row(column: Column, proposal: Proposal) -> tuple[str, ...]:
    distinct = f"{column.distinct:,}" if column.exact else f"~{column.distinct:,}"
    alone = proposal.alone.get(column.name)
    return (
        column.name,
        column.stored,
        f"{column.missing:.1%}" if column.missing else "",
        distinct,
        _values(column),
        "" if alone is None else f"{alone:.3f}",
        _feature(column, proposal),
    )


def _values(column: Column) -> str:
    if column.numbers is not None and column.distinct > 10 and column.quantiles:
        return f"{column.numbers.low:g} … {column.quantiles[3]:g} … {column.numbers.high:g}"
    return ", ".join(f"{value[:24]} {share:.0%}" for value, share in column.top[:3])


def _feature(column: Column, proposal: Proposal) -> str:
    if column.name == proposal.label.column:
        return "label"
    made = [
        feature.keys["type"] for feature in proposal.features if feature.keys.get("column", feature.name) == column.name
    ]
    return " + ".join(made) or "left out"


def as_dict(table: Table, proposal: Proposal) -> dict[str, Any]:
    """Return columns and proposal, JSON-serializable."""
    columns = {}
    for column in table.columns.values():
        numbers = column.numbers
        columns[column.name] = {
            "type": column.stored,
            "missing": column.missing,
            "nulls": column.nulls,
            "not_finite": column.not_finite,
            "empty": column.empty,
            "distinct": column.distinct,
            "distinct_is_exact": column.exact,
            "top": [{"value": value, "share": share} for value, share in column.top],
            "range": None if numbers is None else [numbers.low, numbers.high],
            "quantiles": dict(zip(("0", "1", "25", "50", "75", "99", "100"), column.quantiles, strict=False)),
            "skew": column.skew,
            "times": column.span,
            "separator": column.separator,
            "lengths": column.lengths,
            "auc_alone": proposal.alone.get(column.name),
        }
    return {
        "files": table.files.paths,
        "rows_read": table.rows,
        "rows": table.total,
        "sample": table.sample.num_rows,
        "repeated_rows": table.repeats.within,
        "test_rows_in_training": table.repeats.across,
        "columns": columns,
        "label": {"column": proposal.label.column, **proposal.label.keys, "reason": proposal.label.reason},
        "features": {feature.name: {**feature.keys, "reason": feature.reason} for feature in proposal.features},
        "left_out": {column.column: column.reason for column in proposal.left_out},
        "warnings": proposal.warnings,
    }
