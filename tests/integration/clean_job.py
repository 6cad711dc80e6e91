"""Train a job without a fault for a while, and list every alarm: ``make clean-hour MINUTES=60``.

The job has two servers, a middleware, a data-compose and two ranks, the watchdog with a short limit, the search for
leaks, and a Prometheus with the alert rules of ``services/monitor``. The ranks sleep in their forward pass, so the job
needs little processor time. An alarm therefore shows the effect of a busy machine on the rules.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prometheus
import psutil
import yaml
from stack import missing
from up_jobs import Up
from waiting import wait_until

from persia.data import synth
from persia.profile.growth import LEAST, SKIPPED

ROOT = Path(__file__).resolve().parents[2]
MONITOR = ROOT / "services" / "monitor"
RUN = "clean"
MODEL = """\
import time

import torch
from persia.models.dcnv2 import DCNv2

KEPT = []


class Slow(DCNv2):
    '''Sleeps in each step. It can keep memory, and return NaN in one step.'''

    def __init__(self, num_dense, embedding_dims, pause: float = 0.4, leak_mb: float = 0.0, nan_step: int = 0):
        super().__init__(num_dense, embedding_dims, cross_layers=1, deep_mlp=(8,))
        self.pause, self.leak_mb, self.nan_step, self.steps = pause, leak_mb, nan_step, 0

    def forward(self, *inputs):
        output = super().forward(*inputs)
        if not self.training:
            return output
        time.sleep(self.pause)
        self.steps += 1
        if self.leak_mb:
            KEPT.append(bytes(int(self.leak_mb * 1e6)))
        return output * float("nan") if self.steps == self.nan_step else output
"""
JOB: dict[str, Any] = {
    "data": {"train": "rows.parquet", "batch_size": 100, "epochs": 100_000},
    "features": {
        "id0": {"type": "id", "dim": 4},
        "id1": {"type": "id", "dim": 4},
        "dense0": {"type": "dense", "standardise": True},
    },
    "labels": {"label": {}},
    "model": {"class": "slow_model:Slow"},
    "train": {"nonfinite": "skip"},
    "checkpoint": {"every": 200},
    "memory": {"every": 20, "leaks": True},
    "run": {"log_every": 20},
}
ROWS = 60_000
"""Rows of the table: an epoch, with its evaluation, lasts some minutes."""
SIZES = ("--servers", "2", "--middlewares", "1", "--data-compose", "1", "--ranks", "2", "--name", RUN)
PROCESSES = 6
LIMITS = {"PERSIA_HANG_TIMEOUT": "120", "PERSIA_DATA_TIMEOUT": "120", "LOG_FORMAT": "json", "PERSIA_LOG": "info"}
"""Limits of the watchdog that are short for a job whose machine is busy."""
SCRAPED = 0.5
"""The smallest part of the due scrapes that each process must have answered for the result to count."""
SAMPLES = SKIPPED + LEAST
"""Samples of memory that a rank must have, of which the last ones are compared."""
LOUD = {"warn", "warning", "error", "critical"}
EXPECTED = re.compile(
    r"step \d+/\d+ |effective batch: "  # the progress of rank 0
    r"|.*\[WRN\] Plaintext passwords detected"  # a warning of NATS; the password gives access to NATS only
    r"|for commands such as `persia status` in another shell: "  # of persia up
)
"""Lines that every job writes."""


@dataclass(frozen=True)
class Result:
    """The observations of a job.

    Attributes:
        alarms: Warnings and errors of logs, reports of leaks, and alerts that fired.
        gaps: Missing observations, without which the absence of alarms means nothing.
        facts: Numbers of the run.
    """

    alarms: list[str]
    gaps: list[str]
    facts: dict[str, Any]


@contextlib.contextmanager
def job(folder: Path, **model: float) -> Iterator[tuple[Up, dict[str, str]]]:
    """Start the job, and yield it and the variables of its environment."""
    (folder / "slow_model.py").write_text(MODEL)
    synth.write(folder / "rows.parquet", ROWS, synth.Teacher((4000, 300), 1))
    content = yaml.safe_dump({**JOB, "model": {**JOB["model"], **model}})
    one = Up(folder, content, SIZES, LIMITS)
    try:
        one.says("training on|step")
        own = one.child("launch.rank_main", RANK="0").environ()
        yield one, {name: value for name, value in own.items() if name.startswith("PERSIA_")}
    finally:
        one.close()


def persia(*words: str, env: dict[str, str], folder: Path) -> str:
    """Run a command and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "persia", *words],
        env={**os.environ, **env},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def watched(programs: Path, folder: Path, env: dict[str, str]) -> prometheus.Program:
    """Return a Prometheus that scrapes the job, with the intervals and the rules of the stack."""
    targets = folder / "targets.json"

    def all_are_found() -> bool:
        targets.write_text(persia("status", "--targets", env=env, folder=folder))
        return len(json.loads(targets.read_text())) == PROCESSES

    wait_until("all processes of the job", all_are_found, 300, interval=5.0, evidence=targets.read_text)
    config = yaml.safe_load((MONITOR / "prometheus.yml").read_text())
    config["rule_files"] = [str(MONITOR / "alerts.yml")]
    config["scrape_configs"] = [{"job_name": "persia", "file_sd_configs": [{"files": [str(targets)]}]}]
    return prometheus.prometheus(programs, folder, yaml.safe_dump(config))


def loud_lines(folder: Path) -> list[str]:
    """Return the warnings and errors of all logs of the run, and unexpected lines that no logger has written."""
    found = []
    for line in persia("logs", f"runs/{RUN}", "--json", env={}, folder=folder).splitlines():
        content = json.loads(line)
        own = str(content["event"])
        nats = content["source"] == "nats"
        if EXPECTED.match(own):
            continue
        if content.get("level") in LOUD or (nats and ("[WRN]" in own or "[ERR]" in own)):
            found.append(f"{content['ts']} {content['source']}: {content.get('level', '')} {own}")
        elif "level" not in content and not nats:
            found.append(f"{content['ts']} {content['source']}: not of a logger: {own}")
    return found


def fired(seen: prometheus.Program, seconds: float) -> list[str]:
    """Return the alerts that have fired, with the seconds for which they fired."""
    interval = int(yaml.safe_load((MONITOR / "prometheus.yml").read_text())["global"]["evaluation_interval"][:-1])
    window = f"[{int(seconds) + 60}s]"
    series = seen.query(f'ALERTS{{alertstate="firing"}}{window}')
    return [
        f"alert {each['metric']['alertname']} of {each['metric'].get('instance', 'all')} fired for "
        f"{interval * len(each['values'])} s from {time.strftime('%H:%M:%S', time.gmtime(each['values'][0][0]))}"
        for each in series
    ]


def unobserved(seen: prometheus.Program, folder: Path, seconds: float) -> list[str]:
    """Return the gaps in the observation, about which an hour without alarms proves nothing."""
    due = seconds / int(seen.get("targets")["activeTargets"][0]["scrapeInterval"][:-1])
    counts = {
        f"{each['metric'].get('service')} {each['metric'].get('replica')}": float(each["value"][1])
        for each in seen.query(f"sum_over_time(up[{int(seconds) + 60}s])")
    }
    gaps = [f"{name} answered {n:.0f} of {due:.0f} scrapes" for name, n in counts.items() if n < SCRAPED * due]
    if len(counts) != PROCESSES:
        gaps.append(f"{len(counts)} of {PROCESSES} processes were scraped: {sorted(counts)}")
    for group in seen.get("rules")["groups"]:
        gaps += [f"rule {rule['name']}: {rule['health']}" for rule in group["rules"] if rule["health"] != "ok"]
    for rank in (0, 1):
        record = folder / "runs" / RUN / "memory" / f"rank-{rank}.jsonl"
        lines = len(record.read_text().splitlines()) if record.exists() else 0
        gaps += [f"rank {rank} has {lines} samples of memory"] if lines < SAMPLES else []
    return gaps


def used(one: Up) -> float:
    """Return the processor time of the job in seconds."""
    total = 0.0
    for child in one.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended
            total += sum(child.cpu_times()[:2])
    return total


def observe(folder: Path, programs: Path, seconds: float, **model: float) -> Result:
    """Train for some time, and return the observations. Of the end of the job, they have only a wrong exit code."""
    with job(folder, **model) as (one, env):
        seen = watched(programs, folder, env)
        try:
            began, before = time.monotonic(), used(one)
            while (left := began + seconds - time.monotonic()) > 0:
                assert one.is_running, one.output
                time.sleep(min(left, 5.0))
            passed = time.monotonic() - began
            steps = seen.query("max(persia_trainer_steps_total)")
            facts = {
                "seconds": round(passed),
                "steps": int(float(steps[0]["value"][1])) if steps else 0,
                "processor": f"{(used(one) - before) / passed:.1%} of a core",
                "load": os.getloadavg(),
            }
            alarms = [*fired(seen, passed), *loud_lines(folder)]
            alarms += [path.read_text() for path in (folder / "runs" / RUN / "memory").glob("leak-*")]
            gaps = unobserved(seen, folder, passed)
        finally:
            seen.close()
        one.send(signal.SIGTERM)
        code = one.wait()
    return Result(alarms + ([] if code == os.EX_TEMPFAIL else [f"SIGTERM: exit code {code}"]), gaps, facts)


def main() -> int:
    """Return 0 if the job was observed and caused no alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory(prefix="persia-clean-") as folder:
        programs = prometheus.find(Path(folder))
        if (reason := missing()) or programs is None:
            sys.stderr.write(f"{reason or 'no Prometheus here, and apt-get downloads none'}\n")
            return 2
        found = observe(Path(folder), programs, 60 * minutes)
    for kind, lines in (("alarm", found.alarms), ("not observed", found.gaps)):
        sys.stdout.writelines(f"{kind}: {line}\n" for line in lines)
    sys.stdout.write(f"{len(found.alarms)} alarms; {json.dumps(found.facts)}\n")
    return 1 if found.alarms or found.gaps else 0


if __name__ == "__main__":
    sys.exit(main())
