"""Dashboards, alert rules, the configuration of Prometheus, and the page that lists the series."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from prometheus_client.core import Metric

from persia.doctor.monitoring import EXPECTED
from persia.monitor.series import DATA, PROCESS, TRAINER
from persia.serving.metrics import Metrics

pytestmark = pytest.mark.clone
MONITOR = ROOT / "services" / "monitor"
PERSIAML = (
    *("staleness", "num_pending_batches", "batch_unique_indices_rate", "index_miss_ratio", "index_miss_count"),
    *("gradient_id_miss_count", "lookup_hashmap_time_cost_sec", "lookup_preprocess", "lookup_rpc"),
    *("update_gradient_time_cost_sec", "lookup_postprocess", "lookup_total_time_cost_sec"),
)
"""The series of the dashboard of PersiaML, resources/grafana/dashboards/perisa-training.json."""


def rust() -> dict[str, str]:
    """Return the names of the series of servers and middlewares, with their types."""
    source = (ROOT / "rust_core/server/src/metrics.rs").read_text()
    constants = dict(re.findall(r'^const (\w+): &str = "(\w+)";', source, re.MULTILINE))
    described = re.findall(r"describe_(histogram|counter|gauge)!\(\s*(\w+)", source)
    found = {constants[name]: kind for kind, name in described}
    assert found.keys() == set(constants.values()), "each series is described"
    return found


def serving() -> dict[str, str]:
    """Return the names of the series of ``persia serve``, with their types."""
    families: list[Metric] = [*Metrics().registry.collect()]
    names = {each.name + ("_total" if each.type == "counter" else ""): each.type for each in families}
    return {name: kind for name, kind in names.items() if name.startswith("persia_")}


def all_series() -> dict[str, str]:
    python = {each.name: each.kind for each in [*TRAINER.values(), *DATA.values()]}
    return {**rust(), **serving(), **python, **PROCESS}


def exposed() -> set[str]:
    """Return the names as they occur in expressions, in which names of histograms have a suffix."""
    found = {"up", "ALERTS"}
    for name, kind in all_series().items():
        found |= {f"{name}_{end}" for end in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


def panels() -> list[dict[str, Any]]:
    content = yaml.safe_load((MONITOR / "panels.yml").read_text())
    return [panel for dashboard in content for row in dashboard["rows"] for panel in row["panels"]]


def alerts() -> list[dict[str, Any]]:
    content = yaml.safe_load((MONITOR / "alerts.yml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def test_the_page_lists_every_series_with_its_type_and_labels() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|", page, re.MULTILINE))
    assert listed == all_series()
    for each in [*TRAINER.values(), *DATA.values()]:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{each.name}` |"))
        labels = ["rank" if each.name in {t.name for t in TRAINER.values()} else "replica", *each.labels]
        assert row.split("|")[3].strip() == ", ".join(labels), each.name


@pytest.mark.row("S4-38")
def test_the_page_says_how_a_region_becomes_a_label() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert {"global": {"external_labels": {"region": "eu-west"}}} in blocks
    assert "### Several regions" in page


def test_expressions_have_only_series_that_there_are() -> None:
    expressions = [each["expr"] for panel in panels() for each in panel["exprs"]] + [rule["expr"] for rule in alerts()]
    expressions += [name for names in EXPECTED.values() for name in names]
    used = {name for text in expressions for name in re.findall(r"\b(?:persia|process)_\w+", text)}
    assert len(used) > 40 and not used - exposed()


def test_every_series_is_on_a_dashboard_or_in_an_alert() -> None:
    text = (MONITOR / "panels.yml").read_text() + (MONITOR / "alerts.yml").read_text()
    elsewhere = {"process_cpu_seconds_total", "process_start_time_seconds", "persia_trainer_parameters"}
    elsewhere |= {"persia_payload_bytes", "persia_request_memory_waits_total", "persia_log_waits_total"}
    elsewhere |= {"persia_lookup_rows_total", "persia_data_batches_total", "persia_data_generation"}
    assert {name for name in all_series() if name not in text} == elsewhere


def test_the_dashboards_are_those_of_the_panels_and_show_what_persiaml_shows() -> None:
    done = subprocess.run([sys.executable, "tools/dashboards.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    helps = " ".join(panel.get("help", "") for panel in panels())
    assert not [name for name in PERSIAML if name not in helps]
    titles = [panel["title"] for panel in panels()]
    for title in ("Generation", "Age of the last checkpoint", "Recovery time", "Share of the time by stage", "Queue"):
        assert title in titles


def test_every_alert_is_tested_and_explained() -> None:
    names = [rule["alert"] for rule in alerts()]
    tested = yaml.safe_load((MONITOR / "alerts_test.yml").read_text())["tests"][1]["promql_expr_test"][1]["exp_samples"]
    assert sorted(re.findall(r'"(\w+)"', sample["labels"])[0] for sample in tested) == sorted(names)
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert sorted(re.findall(r"^\| `(Persia\w+)` \|", page, re.MULTILINE)) == sorted(names)
    for rule in alerts():
        assert {"summary", "description"} == rule["annotations"].keys(), rule["alert"]


@pytest.mark.row("S4-43")
def test_prometheus_finds_every_service_of_the_compose_files(tmp_path: Path) -> None:
    (tmp_path / "prometheus").write_text('#!/bin/sh\ncat "${1#--config.file=}"\n')
    (tmp_path / "prometheus").chmod(0o755)

    def rendered(**env: str) -> dict[str, Any]:
        config = {"PROMETHEUS_CONFIG": str(MONITOR / "prometheus.yml")}
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
        words = ["sh", "-eu", str(ROOT / "launch/launch_prometheus.sh")]
        done = subprocess.run(words, env={**config, **path, **env}, capture_output=True, text=True, check=True)
        return {each["job_name"]: each for each in yaml.safe_load(done.stdout)["scrape_configs"]}

    def found(job: dict[str, Any]) -> list[tuple[str, int]]:
        return [(*each["names"], each["port"]) for each in job["dns_sd_configs"]]

    jobs = rendered(GPU_NUM="3", PERSIA_TLS_CERT="/workspace/cert.pem", PERSIA_TLS_CA="/workspace/ca.pem")
    assert found(jobs["persia-trainer"]) == [("trainer", 9464), ("trainer", 9465), ("trainer", 9466)]
    assert jobs["persia-serving"]["scheme"] == "https"
    assert jobs["persia-serving"]["tls_config"] == {"server_name": "persia", "ca_file": "/workspace/ca.pem"}
    assert "scheme" not in jobs["persia-server"]
    assert (tmp_path / "prometheus.yml").exists(), "the file is in TMPDIR"
    named = rendered(PERSIA_TLS_CERT="/workspace/cert.pem", PERSIA_TLS_NAME="scores")
    assert named["persia-serving"]["tls_config"] == {"server_name": "scores"}
    assert jobs["pushgateway"]["relabel_configs"] == [{"target_label": "pushed", "replacement": "yes"}]
    plain = rendered()
    assert found(plain["persia-trainer"]) == [("trainer", 9464)] and "scheme" not in plain["persia-serving"]
    names = {name for job in plain.values() for name, _ in found(job)}
    services: set[str] = set()
    for file in ("docker-compose.yaml", "docker-compose.serving.yaml", "docker-compose.monitor.yaml"):
        services |= set(yaml.safe_load((ROOT / file).read_text())["services"])
    assert names == services - {"persia_nats_service", "prometheus"}


def test_the_container_of_prometheus_gets_every_variable_that_its_script_reads() -> None:
    script = (ROOT / "launch/launch_prometheus.sh").read_text()
    read = set(re.findall(r"\$\{(\w+):-", script)) - {"TMPDIR", "PROMETHEUS_CONFIG"}
    overlay = yaml.safe_load((ROOT / "docker-compose.monitor.yaml").read_text())
    assert read == set(overlay["services"]["prometheus"]["environment"])


def test_no_alert_is_about_what_was_pushed() -> None:
    expressions = " ".join(rule["expr"] for rule in alerts())
    selectors = re.findall(r"persia_trainer_\w+(?:\{.*?\})?", expressions)
    assert len(selectors) > 15
    assert not [each for each in selectors if 'pushed=""' not in each]
