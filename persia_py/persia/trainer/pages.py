"""The readable output of a run: an image of its curves, and a page with all results in one file."""

import base64
import html
import io
from typing import Any

from persia.config import Config
from persia.trainer.record import read_lines
from persia.trainer.reports import title
from persia.trainer.run_folder import CONFIG, FACTS, SUMMARY, RunFolder

_SHOWN = 5
"""The maximum number of training files that are listed."""
CURVES = "curves.png"
"""The file with the curves of the loss, and of the metrics of the validation set, by step."""
PAGE = "report.html"
"""The page with the results of a run; it needs no other files."""

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1a1a1a;background:#fff}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.2rem .9rem .2rem 0;text-align:left;
border-bottom:1px solid #ddd}td.n{text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%}
pre{background:#f5f5f5;padding:1rem;overflow:auto;font-size:13px}h1{font-size:1.5rem}h2{font-size:1.15rem;
margin-top:2rem}.note{color:#666}.wide{overflow-x:auto}th:not(:first-child){text-align:right}
"""


def write(folder: RunFolder, config: Config, *, status: str) -> None:
    """Draw the curves and write the page of a run.

    Args:
        folder: The run's folder.
        config: The configuration.
        status: The status to show. The summary of a job has its status only after all ranks have ended.

    Raises:
        StorageError: A file cannot be written.
    """
    lines, summary = read_lines(folder), {**folder.read_json(SUMMARY), "status": status}
    picture = draw(lines)
    folder.write(CURVES, picture)
    folder.write(PAGE, page(folder, summary, picture, config))


def draw(lines: list[dict[str, Any]]) -> bytes:
    """Return the curves of a run as a PNG image."""
    from matplotlib.figure import Figure

    trained = [line for line in lines if line.get("loss") is not None]
    judged = [line for line in lines if "valid" in line]
    names = _metrics(judged)
    figure = Figure(figsize=(8, 3 + 2.2 * len(names)), layout="constrained")
    axes = figure.subplots(1 + len(names), 1, sharex=True, squeeze=False)[:, 0]
    axes[0].plot([line["step"] for line in trained], [line["loss"] for line in trained], label="train")
    losses = [(line["step"], line["valid"]["loss"]) for line in judged if line["valid"]["loss"] is not None]
    if losses:
        axes[0].plot(*zip(*losses, strict=True), "o-", label="valid")
    axes[0].set(ylabel="loss")
    axes[0].legend()
    for axis, name in zip(axes[1:], names, strict=True):
        for label in [key for key in judged[0]["valid"] if key != "loss"]:
            points = [(line["step"], line["valid"][label].get(name)) for line in judged]
            known = [point for point in points if point[1] is not None]
            if known:
                axis.plot(*zip(*known, strict=True), "o-", label=label)
        axis.set(ylabel=f"valid {title(name)}")
        if axis.lines:
            axis.legend()
    axes[-1].set(xlabel="step")
    for axis in axes:
        axis.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png")
    return file.getvalue()


def _metrics(judged: list[dict[str, Any]]) -> list[str]:
    """Return the metrics that were evaluated on the validation set, in order."""
    names: dict[str, None] = {}
    for line in judged:
        for label, values in line["valid"].items():
            if label != "loss":
                names.update(dict.fromkeys(name for name in values if name not in ("rows", "notes")))
    return [*names]


def page(folder: RunFolder, summary: dict[str, Any], picture: bytes, config: Config) -> str:
    """Return the page of a run."""
    source = base64.b64encode(picture).decode()
    overview = _overview(summary, folder.read_json(FACTS))
    body = [f"<h1>Run {html.escape(folder.path.name)}</h1>", overview, "<h2>Metrics</h2>", _results(summary)]
    body += ["<h2>Curves</h2>", f'<img alt="curves" src="data:image/png;base64,{source}">']
    body += ["<h2>Unusual values</h2>", _unusual(summary), "<h2>Ids without a row</h2>", _without_row(summary)]
    text = (folder.path / CONFIG).read_text(encoding="utf-8")
    body += ["<h2>Configuration</h2>", f"<pre>{html.escape(text)}</pre>"]
    types = [[name, kind] for name, kind in config.compiled.types]
    body += ["<h2>Features</h2>", _table(["feature", "type"], types)]
    title_ = html.escape(f"persia: {folder.path.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title_}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _overview(summary: dict[str, Any], facts: dict[str, Any]) -> str:
    best = summary.get("best")
    counts = summary.get("rows", {})
    paths = facts.get("train_paths") or []
    files = ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
    rows: list[list[Any]] = [
        ["status", summary.get("status")],
        ["started", summary.get("started")],
        ["model", facts.get("model")],
        ["files of train", files or None],
        ["--set", ", ".join(facts.get("set") or []) or None],
        ["steps", summary.get("step")],
        *([f"rows of {part}", f"{counts[part]:,}"] for part in ("train", "valid", "test") if part in counts),
        ["samples/s", f"{summary['samples_per_s']:,}" if summary.get("samples_per_s") else None],
        ["rows of all tables", f"{summary['embedding_rows']:,}" if "embedding_rows" in summary else None],
        ["best step", None if best is None else f"{best['step']} ({title(best['metric'])} {best['value']:.4f})"],
        ["skipped steps", summary.get("skipped_steps")],
    ]
    return _table(["", ""], [row for row in rows if row[1] is not None])


def results_table(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of results: one row for each part and label, and those of the baseline.

    The step is that of the evaluated model; a baseline has no step.
    """
    rows: list[tuple[str, str, dict[str, Any]]] = []
    for part in ("valid", "test"):
        found = summary.get(part) or {}
        for label, values in (found.get("labels") or {}).items():
            rows.append((f"{part}, {label}", str(found["step"]), values))
        baseline = summary.get("baseline") or {}
        for label, values in (baseline.get(part) or {}).items():
            rows.append((f"{part}, {label}, {baseline['name']}", "-", values))
    names = [*dict.fromkeys(name for _, _, values in rows for name in values if name != "notes")]
    heads = ["", "step", *(title(name) for name in names)]
    return heads, [[place, step, *(_shown(name, values) for name in names)] for place, step, values in rows]


def _results(summary: dict[str, Any]) -> str:
    heads, rows = results_table(summary)
    if not rows:
        return '<p class="note">No part was evaluated.</p>'
    notes = []
    for part in ("valid", "test"):
        for label, values in ((summary.get(part) or {}).get("labels") or {}).items():
            notes += [
                f"{part}, {label}: {title(name)} is not defined: {why}" for name, why in values.get("notes", {}).items()
            ]
    return _table(heads, rows) + "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)


def _shown(name: str, values: dict[str, Any]) -> str:
    value = values.get(name)
    if value is None:
        return "-"
    return f"{value:,}" if name == "rows" else f"{value:.4f}"


def _unusual(summary: dict[str, Any]) -> str:
    if (unusual := summary.get("unusual", {"rows": 0, "counts": {}})) is None:
        return '<p class="note">Data-compose counts unusual values; its log has the numbers.</p>'
    rows = [
        [feature, kind, f"{count:,}", f"{count / unusual['rows']:.2%}" if unusual["rows"] else ""]
        for feature, kinds in sorted(unusual["counts"].items())
        for kind, count in kinds.items()
    ]
    if not rows:
        return f'<p class="note">None in {unusual["rows"]:,} rows.</p>'
    head = f'<p class="note">Of {unusual["rows"]:,} rows that were trained on.</p>'
    return head + _table(["feature", "what", "values", "of the rows"], rows)


def _without_row(summary: dict[str, Any]) -> str:
    rows = []
    for part in ("valid", "test"):
        found = summary.get(part)
        if found:
            rows.append([part, "all", f"{found['ids_without_row']:.2%}"])
            rows += [[part, slot, f"{share:.2%}"] for slot, share in [*found["slots_without_row"].items()][:20]]
    return _table(["part", "slot", "share of looked-up ids"], rows) if rows else '<p class="note">Not evaluated.</p>'


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads) if any(heads) else ""
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{'' if place == 0 else ' class=n'}>{html.escape(str(cell))}</td>" for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<div class=wide><table>{f'<tr>{head}</tr>' if head else ''}{body}</table></div>"
