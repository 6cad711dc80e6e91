"""Long runs on several ranks, as a user starts them: a budget, the notice of a spot instance, compressed gradients."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from metadata_server import metadata
from stack import missing

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from trainer_files import write_clicks, write_config

from persia.runtime import job

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture
def table(tmp_path: Path, no_job: None) -> Path:
    write_clicks(tmp_path / "clicks.parquet", 4000)
    return tmp_path


def trained(folder: Path, *options: str, code: int = 0) -> str:
    """Train on two ranks, and return the output."""
    done = subprocess.run(
        [sys.executable, "-m", "persia", "train", "persia.yml", "--nproc", "2", *options],
        cwd=folder,
        env={**os.environ, "COLUMNS": "140", "PERSIA_LOG": "info"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def summary(folder: Path, name: str) -> dict[str, Any]:
    """Return the summary that the ranks wrote."""
    found: dict[str, Any] = json.loads((folder / "runs" / name / "summary.json").read_text())
    return found


@pytest.mark.row("S4-39")
def test_ranks_stop_at_one_step_when_their_run_has_cost_its_limit_and_continue_with_more(table: Path) -> None:
    rarely = {"every": 1000}
    write_config(table, data={"epochs": 400}, checkpoint=rarely, budget={"usd": 4, "usd_per_hour": 3600})
    output = trained(table)
    found = summary(table, "one")
    assert (found["status"], found["reason"]) == ("stopped", "budget") and found["cost_usd"] >= 4
    assert found["generation"] > 0 and job.stopped_summary(table / "runs" / "one", of=found["job"]) == found
    step = found["step"]
    assert f"the run is saved after step {step}, and stops" in output and 0 < step < found["total_steps"]
    assert "effective batch: 128 rows per step = 64 per rank x 1 accumulated x 2 ranks" in output
    refused = trained(table, "--resume", "runs/one", code=2)
    assert "budget.usd: the run has cost" in refused
    epochs = 1 + -(-400 * step // found["total_steps"])
    trained(table, "--resume", "runs/one", "--set", f"data.epochs={epochs}", "--set", "budget.usd=400")
    assert summary(table, "one")["status"] == "finished"


@pytest.mark.row("S4-36")
def test_a_notice_ends_the_job_with_75_and_no_attempt_trains_after_it(table: Path) -> None:
    with metadata() as service:
        write_config(
            table,
            data={"epochs": 100_000},
            spot={"url": service.url, "every_s": 0.2},
            run={"log_every": 1, "name": "a"},
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "persia", "train", "persia.yml", "--nproc", "2"],
            cwd=table,
            env={**os.environ, "PERSIA_LOG": "info"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        with process, process.stdout as stream:
            for line in stream:
                lines.append(line)
                if "step 20" in line:
                    service.announce(120)
        output = "".join(lines)
        assert process.returncode == 75, output
    steps = re.findall(r"exiting after step (\d+)", output)
    assert len(steps) == 2 and len({*steps}) == 1, output
    assert "training does not start" in output


@pytest.mark.row("S4-24")
def test_a_model_learns_as_well_with_powersgd(table: Path) -> None:
    found = {}
    for name, dist in (("flat", {}), ("powersgd", {"compression": {"name": "powersgd", "rank": 1, "start_iter": 20}})):
        write_config(
            table, data={"epochs": 12}, dist=dist, run={"name": name}, model={"name": "dcnv2", "deep_mlp": [32]}
        )
        output = trained(table)
        assert ("which is lossy" in output) == (name == "powersgd")
        found[name] = summary(table, name)["result"]["valid"]["labels"]["label"]["auc"]
    assert found["powersgd"] == pytest.approx(found["flat"], abs=0.03) and found["flat"] > 0.6
