"""Write the tables and plots of docs/performance.md from the records of a complete run.

A table is between ``<!-- table ID -->`` and ``<!-- end -->``, with the machine that was measured. The rest of the page
is written by hand. A table with a failed part, or without a valid case, is not changed.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from figures import Record, number, problem
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def write(records: list[Record], machine: str) -> list[str]:
    """Replace the tables of docs/performance.md that these records belong to, and the plots.

    Returns:
        The tables that have records but were not changed.
    """
    path = DOCS / "performance.md"
    text = path.read_text(encoding="utf-8")
    names = dict.fromkeys(str(record["id"]) for record in records)
    left = [name for name in names if not is_whole(of(records, name))]

    def table(match: re.Match[str]) -> str:
        name = match.group(1)
        if not of(records, name) or name in left:
            return match.group()
        return f"<!-- table {name} -->\n{markdown(of(records, name))}\n{machine}\n<!-- end -->"

    path.write_text(TABLE.sub(table, text), encoding="utf-8")
    draw_step([] if "B3" in left else results(of(records, "B3")))
    draw_scale([] if "B7" in left else results(of(records, "B7")))
    return left


def of(records: Iterable[Record], name: str) -> list[Record]:
    """Return the records of one id."""
    return [record for record in records if record["id"] == name]


def results(records: Iterable[Record]) -> list[Record]:
    """Return the records that are results."""
    return [record for record in records if problem(record) is None]


def is_whole(records: list[Record]) -> bool:
    """Whether the records of one id suffice for a table."""
    return bool(results(records)) and not any("failed" in record for record in records)


def markdown(records: list[Record]) -> str:
    """Return one table. A spread is half of the interquartile range over the median. An invalid case has no numbers."""
    lines = ["| case | value | unit | reference | ratio | target | spread |", "|---|---|---|---|---|---|---|"]
    for record in records:
        if problem(record) is not None:
            lines.append(f"| {record['case']} | | {record['unit']} | | invalid | {number(record, 'target'):g} | |")
            continue
        ratio, target = number(record, "ratio"), number(record, "target")
        mark = f"{ratio:.2f}" if ratio >= target else f"**{ratio:.2f}**"
        cells = [record["case"], show(record["value"]), record["unit"], show(record["peer"]), mark, f"{target:g}"]
        lines.append("| " + " | ".join(str(cell) for cell in (*cells, f"{number(record, 'spread'):.0%}")) + " |")
    return "\n".join(lines) + "\n"


def show(value: object) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    shown = float(str(value))
    return f"{shown:,.0f}" if abs(shown) >= 100 else f"{shown:.3g}"


def draw_step(records: list[Record]) -> None:
    """Draw B3: the ratio to FBGEMM's rate for each case, with the target as a mark."""
    fbgemm = [record for record in records if str(record["case"]).endswith("against fbgemm")]
    if not fbgemm:
        return
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    names = [str(record["case"]).removesuffix(", against fbgemm").replace(", ", "\n") for record in fbgemm]
    axes.bar(names, [number(record, "ratio") for record in fbgemm], color="tab:blue", width=0.7)
    axes.plot(names, [number(record, "target") for record in fbgemm], "_", color="black", markersize=22, label="target")
    axes.axhline(1, color="tab:orange", label="FBGEMM on the CPU")
    axes.set(ylabel="rows per CPU-second over FBGEMM")
    axes.tick_params(axis="x", labelsize=7)
    axes.legend()
    figure.savefig(DOCS / "bench-step.svg")


def draw_scale(records: list[Record]) -> None:
    """Draw B7: the cost of a look-up and of an insertion over the number of rows."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for verb in ("look-up", "insertion"):
        points = [
            (int(rows.group(1)), number(record, "value"))
            for record in records
            if str(record["case"]).startswith(verb) and (rows := re.search(r"(\d+) rows", str(record["case"])))
        ]
        if not points:
            return
        axes.plot(*zip(*points, strict=True), "o-", label=verb)
    axes.set(xlabel="rows of the table", ylabel="CPU ns a row", xscale="log", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(DOCS / "bench-scale.svg")
