"""The logs of a job: lines of Rust and Python with the same keys, and the path of one batch through all parts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stack import MakeStack, missing

from persia.data import synth

TABLE = """\
data: {train: rows.parquet, batch_size: 200, epochs: 1}
features:
  id0: {type: id, dim: 4}
  id1: {type: id, dim: 4}
labels: {label: {}}
model: {name: dcnv2, cross_layers: 1, deep_mlp: [8]}
run: {log_every: 5}
"""
KEYS = {"ts", "level", "event", "run_id", "service", "replica", "node", "target"}
"""Keys of every line."""
LOGS = "persia.server=debug,persia.engine=debug,info"


def persia(folder: Path, *words: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "persia", *words],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished job ``runs/one``, whose processes have logged JSON."""
    if (why := missing()) is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("logs")
    synth.write(folder / "rows.parquet", 3000, synth.Teacher((40, 30), 1))
    (folder / "persia.yml").write_text(TABLE)
    own = {name: "" for name in os.environ if name.startswith("PERSIA_")}
    env = {**own, "LOG_FORMAT": "json", "PERSIA_LOG": LOGS}
    done = persia(folder, "up", "persia.yml", "--name", "one", "--servers", "2", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def lines(folder: Path, *options: str) -> list[dict[str, Any]]:
    done = persia(folder, "logs", "runs/one", "--json", *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.row("S4-47", "S4-49", "S4-46")
def test_all_parts_have_the_same_keys(job: Path) -> None:
    found = [line for line in lines(job) if "service" in line]
    services = {line["service"] for line in found}
    launchers = {"persia"}
    assert services - launchers == {"persia-server", "persia-middleware", "persia-data", "persia-trainer"}
    for line in found:
        assert {*line} >= KEYS, line
        assert line["run_id"] == "one" and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6,9}Z", line["ts"]), line
    # Two threads of one process may write lines in a different order from their times. The order of a log is kept.
    latest: dict[str, str] = {}
    for line in found:
        latest[line["source"]] = line["key"] = max(latest.get(line["source"], ""), line["ts"][:23])
    assert [line["key"] for line in found] == sorted(line["key"] for line in found)
    steps = [line for line in found if line["event"] == "step"]
    assert [line["step"] for line in steps][:2] == [5, 10] and all(line["rank"] == 0 and line["loss"] for line in steps)


@pytest.mark.row("S4-47")
def test_a_token_shows_the_way_of_a_batch(job: Path) -> None:
    generation = max(line["generation"] for line in lines(job, "--service", "server") if line["event"] == "run begun")
    found = lines(job, "--token", f"{generation}/0/3")
    assert {line["token"].split("/", 1)[1] for line in found} == {f"{generation}/0/3"}
    ways = [(line["service"], line["event"]) for line in found]
    once = {
        ("persia-trainer", "looked up"),
        ("persia-middleware", "look-up forwarded"),
        ("persia-trainer", "pushed"),
        ("persia-middleware", "push forwarded"),
    }
    assert all(ways.count(each) == 1 for each in once), ways
    assert all(ways.count(("persia-server", event)) == 2 for event in ("look-up served", "push applied")), ways
    assert ways.index(("persia-middleware", "look-up forwarded")) < ways.index(("persia-server", "push applied"))


@pytest.mark.row("S4-50")
def test_every_line_of_a_server_is_json(job: Path) -> None:
    """A log collector needs only one rule: each line is one JSON object."""
    for name in ("server-0", "server-1", "middleware-0"):
        text = (job / "runs" / "one" / "logs" / f"{name}.log").read_text()
        assert all(isinstance(json.loads(line), dict) for line in text.splitlines()) and text


@pytest.mark.row("S4-58")
def test_a_dump_of_the_job(job: Path) -> None:
    done = persia(job, "dump", "runs/one", "-o", "dump.tar.gz")
    assert done.returncode == 0, done.stderr
    names = subprocess.run(["tar", "tzf", "dump.tar.gz"], cwd=job, capture_output=True, text=True, check=True).stdout
    for name in ("logs/server-1.log", "logs/trainer.log", "logs/nats.log", "checkpoints.txt", "SUMMARY.md"):
        assert f"/{name}\n" in names, names
    assert (job / "dump.tar.gz").stat().st_size < 20_000_000


@pytest.mark.row("S4-48")
def test_a_server_that_is_killed_has_written_its_last_line(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.parts["server-0"].says("ready")
    stack.kill("server-0")
    assert "ready" in stack.parts["server-0"].lines[-1], stack.parts["server-0"].output


@pytest.mark.row("S4-58")
def test_a_dump_of_a_running_job_asks_its_processes(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack(env={"PERSIA_MY_SECRET": "s3cret-of-the-stack"})
    done = persia(tmp_path, "dump", "-o", "dump.tar.gz", env=dict(stack.settings))
    assert done.returncode == 0, done.stderr
    subprocess.run(["tar", "xzf", "dump.tar.gz"], cwd=tmp_path, check=True)
    (top,) = tmp_path.glob("persia-dump-*")
    status = json.loads((top / "status.json").read_text())
    assert {each["service"] for each in status["processes"]} == {"persia-server", "persia-middleware"}
    assert "persia_request" in (top / "metrics" / "persia-server-0.txt").read_text()
    assert "* Status: 2 processes; no problem" in (top / "SUMMARY.md").read_text()
    secret = stack.job.token_file.read_text()
    for path in top.rglob("*"):
        if path.is_file():
            assert secret not in path.read_text() and "s3cret-of-the-stack" not in path.read_text(), path
