"""Write the dashboards of Grafana, ``services/monitor/grafana/*.json``, from ``services/monitor/panels.yml``.

``--check`` writes nothing, and exits with 1 if a file is not current.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

MONITOR = Path(__file__).resolve().parents[1] / "services" / "monitor"
WIDTH, HEIGHT = 8, 7
"""The size of a panel; Grafana has 24 columns."""
SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboards() -> list[dict[str, Any]]:
    """Return the content of ``panels.yml``."""
    return list(yaml.safe_load((MONITOR / "panels.yml").read_text(encoding="utf-8")))


def render(dashboard: dict[str, Any]) -> str:
    """Return the JSON of a dashboard, a panel on each line."""
    panels: list[dict[str, Any]] = []
    line = 0
    for row in dashboard["rows"]:
        place = {"x": 0, "y": line, "w": 24, "h": 1}
        panels.append({"type": "row", "title": row["title"], "collapsed": False, "panels": [], "gridPos": place})
        line += 1
        for number, panel in enumerate(row["panels"]):
            across, down = number % (24 // WIDTH), number // (24 // WIDTH)
            place = {"x": across * WIDTH, "y": line + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({**_panel(panel), "gridPos": place})
        line += -(-len(row["panels"]) // (24 // WIDTH)) * HEIGHT
    for number, each in enumerate(panels, 1):
        each["id"] = number
    head = {
        "uid": f"persia-{dashboard['file']}",
        "title": dashboard["title"],
        "tags": ["persia"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}]},
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    body = ",\n".join(f"  {json.dumps(panel)}" for panel in panels)
    return "{\n" + ",\n".join(lines) + ',\n "panels": [\n' + body + "\n ]\n}\n"


def _panel(panel: dict[str, Any]) -> dict[str, Any]:
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.get("stack") else {"fillOpacity": 5}
    least = {} if panel["unit"] == "none" else {"min": 0}
    notes = [panel.get("help", ""), f"It has no data without {panel['needs']}" if "needs" in panel else ""]
    return {
        "type": "timeseries",
        "title": panel["title"],
        "description": ". ".join(note for note in notes if note),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel["unit"], "custom": custom, **least}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": "ABCDEFGH"[number],
                "datasource": SOURCE,
                "expr": each["expr"].replace("[1m]", "[$__rate_interval]"),
                "legendFormat": each["legend"],
            }
            for number, each in enumerate(panel["exprs"])
        ],
    }


def main() -> int:
    """Write the files, or compare them."""
    stale = []
    for dashboard in dashboards():
        path, text = MONITOR / "grafana" / f"{dashboard['file']}.json", render(dashboard)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
    state = "differs from panels.yml; run tools/dashboards.py" if "--check" in sys.argv[1:] else "written"
    for path in stale:
        sys.stdout.write(f"{path.name}: {state}\n")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
