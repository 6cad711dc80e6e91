"""Debian's Prometheus scrapes a running job: every panel has data, and planted causes raise their alerts."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from conftest import ROOT
from prometheus import Program, find, gateway, prometheus
from stack import missing
from up_jobs import StartUp, Up
from waiting import wait_until

from persia.data import synth

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from serving_process import serving, write_bundle
from trainer_files import write_clicks, write_config

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.clone,
    pytest.mark.timeout(900, func_only=True),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

MONITOR = ROOT / "services" / "monitor"
JOB = """\
data: {train: rows.parquet, batch_size: 100, epochs: 100000}
features:
  id0: {type: id, dim: 4}
  id1: {type: id, dim: 4}
  dense0: {type: dense, standardise: true}
labels: {label: {}}
train: {evaluate_every: 1000000}
checkpoint: {every: 200}
"""


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = find(tmp_path_factory.mktemp("prometheus"))
    if found is None:
        pytest.skip("no Prometheus here, and apt-get downloads none")
    return found


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def expressions(*dashboards: str) -> dict[str, str]:
    """Return the expressions of panels that have data in every job, with short windows."""
    content = yaml.safe_load((MONITOR / "panels.yml").read_text())
    panels = [
        panel
        for dashboard in content
        if dashboard["file"] in dashboards
        for row in dashboard["rows"]
        for panel in row["panels"]
        if "needs" not in panel
    ]
    return {
        f"{panel['title']} {number}": each["expr"].replace("[1m]", "[15s]")
        for panel in panels
        for number, each in enumerate(panel["exprs"])
    }


def quick_rules(folder: Path) -> str:
    """Write the alert rules with windows of seconds instead of minutes, and return the path."""
    text = (MONITOR / "alerts.yml").read_text()
    windows = {"[5m]": "[5s]", "[10m]": "[5s]", "[15m]": "[15s]", "[15m:]": "[15s:1s]", "[1h]": "[40s]"}
    windows |= {"[45m]": "[40s]", "offset 10m": "offset 5s"}
    for window, short in windows.items():
        assert window in text
        text = text.replace(window, short)
    text = re.sub(r"for: \w+", "for: 1s", text).replace("> 60 + 3 *", "> 1 + 3 *")
    path = folder / "alerts.yml"
    path.write_text(text)
    return str(path)


def config(folder: Path, jobs: list[dict[str, Any]]) -> str:
    quick = {"scrape_interval": "1s", "scrape_timeout": "900ms", "evaluation_interval": "1s"}
    return yaml.safe_dump({"global": quick, "rule_files": [quick_rules(folder)], "scrape_configs": jobs})


def files(path: Path) -> dict[str, Any]:
    return {"job_name": "persia", "file_sd_configs": [{"files": [str(path)], "refresh_interval": "1s"}]}


def persia(*arguments: str, env: dict[str, str], cwd: Path | None = None, code: int = 0) -> str:
    words = [sys.executable, "-m", "persia", *arguments]
    done = subprocess.run(words, env={**os.environ, **env}, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.row("S4-41", "S4-43")
def test_rules_are_valid_and_each_alert_has_a_cause(programs: Path) -> None:
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([programs / "promtool", *words], cwd=MONITOR, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        [programs / "promtool", "check", "config", "--syntax-only", "prometheus.yml"],
        cwd=MONITOR,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def job(up: StartUp, tmp_path: Path) -> tuple[Up, dict[str, str]]:
    """A job of two servers, a middleware, a data-compose and two ranks, and the variables of its environment."""
    synth.write(tmp_path / "rows.parquet", 3000, synth.Teacher((40, 30), 1))
    sizes = ("--servers", "2", "--middlewares", "1", "--data-compose", "1", "--ranks", "2", "--name", "seen")
    one = up(JOB, *sizes, PERSIA_RPC_TIMEOUT="120")
    one.says("step 500/")
    own = one.child("launch.rank_main", RANK="0").environ()
    return one, {name: value for name, value in own.items() if name.startswith("PERSIA_")}


def watched(job: dict[str, str], programs: Path, folder: Path, opened: contextlib.ExitStack) -> Program:
    """Return a Prometheus that scrapes a job."""
    targets = folder / "targets.json"
    targets.write_text(persia("status", "--targets", env=job))
    found = json.loads(targets.read_text())
    services = sorted((each["labels"]["service"], each["labels"]["replica"]) for each in found)
    ranks = [("persia-trainer", "0"), ("persia-trainer", "1")]
    servers = [("persia-server", "0"), ("persia-server", "1")]
    assert services == [("persia-data", "0"), ("persia-middleware", "0"), *servers, *ranks]
    made = prometheus(programs, folder, config(folder, [files(targets)]))
    opened.callback(made.close)
    return made


@pytest.mark.row("S4-41", "S4-43", "S4-45")
def test_every_panel_of_a_running_job_has_data_and_planted_causes_raise_alerts(
    job: tuple[Up, dict[str, str]], programs: Path, tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    one, variables = job
    seen = watched(variables, programs, tmp_path, opened)
    empty = dict(expressions("training"))

    def all_have_data() -> bool:
        for title in [title for title, expression in empty.items() if seen.has(expression)]:
            del empty[title]
        return not empty

    wait_until("data in every panel", all_have_data, 120, interval=2.0, evidence=lambda: str(empty))
    for rule in seen.get("rules")["groups"]:
        assert not [each for each in rule["rules"] if each["health"] == "err"], rule
    ok = persia("doctor", "--prometheus", seen.url, env=variables)
    assert ok.count("up, scraped") == 6, ok
    wait_until("the start to be over", lambda: not seen.firing(), 120, evidence=lambda: str(seen.firing()))

    server = one.child("sharded-server.*--replica-index 1")
    with stopped(server):
        (down,) = seen.waits_for_alert("PersiaTargetDown")
        out = persia("doctor", "--prometheus", seen.url, env=variables, code=3)
        assert re.search(rf"fail +persia-server {down} down: ", out), out
        seen.waits_for_alert("PersiaNoProgress")
    wait_until("the server to be up", lambda: not any(name == "PersiaTargetDown" for name, _ in seen.firing()), 60)

    middleware = one.child("sharded-middleware")
    with slowed(middleware):
        seen.waits_for_alert("PersiaSlowStep")

    saves = Path(variables["PERSIA_CKPT_DIR"])
    saves.rename(tmp_path / "away")
    saves.write_text("")
    seen.waits_for_alert("PersiaCheckpointStale")
    seen.waits_for_alert("PersiaCheckpointFailed")
    saves.unlink()
    (tmp_path / "away").rename(saves)

    def is_saved() -> bool:
        return all(name != "PersiaCheckpointStale" for name, _ in seen.firing())

    wait_until("a checkpoint again", is_saved, 90, interval=0.5)


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@contextlib.contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """Let a process run for a hundredth of its time."""
    over = threading.Event()

    def alternate() -> None:
        while not over.wait(0.005):
            with stopped(process):
                over.wait(0.5)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_every_panel_of_serving_has_data_and_a_process_that_stops_raises_an_alert(
    programs: Path, tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    bundle = write_bundle(tmp_path / "bundle", 2.0)
    process = opened.enter_context(serving(bundle, tmp_path / "serving.log", drain_s=600))
    target = {"targets": [f"127.0.0.1:{process.port}"]}
    seen = prometheus(
        programs, tmp_path, config(tmp_path, [{"job_name": "persia-serving", "static_configs": [target]}])
    )
    opened.callback(seen.close)
    client, over = process.client(), threading.Event()
    row = scoreable(client.score)

    def ask() -> None:
        while not over.wait(0.02):
            assert client.score(row)[0] == 200

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        empty = expressions("serving")

        def all_have_data() -> bool:
            for title in [title for title, expression in empty.items() if seen.has(expression)]:
                del empty[title]
            return not empty

        wait_until("data in every panel", all_have_data, 60, interval=1.0, evidence=lambda: str(empty))
        assert "persia-serving" in persia("doctor", "--prometheus", seen.url, env={})
        assert "PersiaServingNoBundle" not in {name for name, _ in seen.firing()}
        process.process.send_signal(signal.SIGTERM)  # the process still responds, but is not ready
        assert seen.waits_for_alert("PersiaServingNoBundle") == {f"127.0.0.1:{process.port}"}
        assert seen.query("up")[0]["value"][1] == "1"
    finally:
        over.set()
        asking.join()


def scoreable(score: Callable[[Any], tuple[int, dict[str, str], Any]]) -> Any:
    """Return a request that the small model answers."""
    row = [{"user": 3, "site": "a", "tags": [1, 2], "price": 0.5}]
    status, _, content = score(row)
    assert status == 200, content
    return row


@pytest.mark.row("S4-42", "S4-44", "S4-45")
def test_a_test_run_is_pushed_to_the_gateway(
    programs: Path, tmp_path: Path, opened: contextlib.ExitStack, no_job: None
) -> None:
    made = gateway(programs, tmp_path)
    opened.callback(made.close)
    write_clicks(tmp_path / "clicks.parquet", 1500)
    write_config(tmp_path, run={"name": None})
    env = {"PERSIA_METRICS_GATEWAY_ADDR": made.url}
    persia("train", "persia.yml", "--test", env=env, cwd=tmp_path)
    groups = {each["labels"]["job"]: each for each in made.get("metrics")}
    pushed = groups["persia"]
    assert pushed["labels"]["instance"] == "trainer-0"
    assert float(pushed["persia_trainer_steps_total"]["metrics"][0]["value"]) == 1
    persia("train", "persia.yml", "--test", "--nproc", "2", env=env, cwd=tmp_path)
    names = {(each["labels"]["job"], each["labels"]["instance"]) for each in made.get("metrics")}
    assert {instance for job, instance in names if job != "persia"} >= {"trainer-0", "trainer-1"}, names
    out = persia("doctor", "--gateway", made.url, env={})
    assert "pushed persia trainer-0" in out and "42 was pushed and read back" in out
    assert "persia_push_test" not in json.dumps(made.get("metrics"))
