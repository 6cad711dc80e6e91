"""``persia train --test`` and ``--nproc`` on ranks and servers, and the ladder over them: real processes of a job."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from conftest import ROOT, Verb
from stack import missing
from waiting import wait_until

from persia.doctor import job_status, ladder

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from trainer_files import write_clicks, write_config

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

CHECKED = ("build", "batch", "evaluate", "checkpoint")


def persia(folder: Path, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
    """Run a verb as a process, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "persia", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "140", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.fixture
def table(tmp_path: Path, no_job: None) -> Path:
    """A folder with rows, a model of one's own and a configuration."""
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Mine(torch.nn.Module):\n    def __init__(self, num_dense, embedding_dims):\n"
        "        super().__init__()\n        self.top = torch.nn.Linear(num_dense + sum(embedding_dims), 1)\n"
        "    def forward(self, dense, embeddings):\n        return self.top(torch.cat([*dense, *embeddings], 1))\n"
    )
    write_clicks(tmp_path / "clicks.parquet", 1500)
    write_config(tmp_path, model={"class": "mine:Mine"}, run={"name": None})
    return tmp_path


@pytest.mark.row("S1-22")
def test_both_ranks_tick_and_nothing_is_left(table: Path) -> None:
    before = files(table)
    output = persia(table, "train", "persia.yml", "--test", "--nproc", "2")
    for rank in (0, 1):
        ticks = re.findall(rf"rank {rank}: (.) (\w+)", output)
        assert ticks == [("✓", name) for name in CHECKED], output
    assert "ok: one batch passed on 2 ranks" in output
    assert files(table) == before


@pytest.mark.row("S1-22", "S1-25")
def test_a_whole_run_on_ranks_has_the_overrides(table: Path, verb: Verb) -> None:
    """Its AUC, computed while two ranks trained, is that of one process that evaluates its checkpoint."""
    persia(table, "train", "persia.yml", "--nproc", "2", "--set", "run.name=two", "--set", "data.batch_size=64")
    summary = json.loads((table / "runs" / "two" / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["steps"] >= 1500 * 0.8 / 64 - 1
    assert "batch_size: 64" in (table / "runs" / "two" / "persia.yml").read_text()
    alone = json.loads(verb("eval", "runs/two", "--json")[0])
    assert alone["labels"]["label"] == summary["result"]["test"]["labels"]["label"]


@pytest.fixture
def servers(table: Path) -> Iterator[dict[str, str]]:
    """The variables of a job whose servers have the slots of the configuration, and no trainer."""
    (table / "job.yml").write_text("job: served\nconfig: persia.yml\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "persia", "up", "job.yml"], cwd=table, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    variables: dict[str, str] = {}
    for line in process.stdout:
        found = re.search(r"export (\w+)=(\S+)", line)
        if found:
            variables[found[1]] = found[2].strip("'")
        if "PERSIA_TOKEN_FILE" in variables:
            break
    assert "PERSIA_TOKEN_FILE" in variables, "the job has ended"

    def is_served() -> bool:
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            return not job_status.status(variables["PERSIA_NATS_URL"], "served").problems

    wait_until("the servers", is_served, 60)
    yield variables
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.row("S1-15")
def test_one_batch_on_the_servers_of_a_job(
    table: Path, servers: dict[str, str], verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left() -> list[str]:
        return [name for name in files(table) if "/servers/" not in name]

    before = left()
    output = persia(table, "train", "persia.yml", "--test", env=servers)
    assert re.findall(r"rank 0: (.) (\w+)", output) == [("✓", name) for name in CHECKED], output
    assert "ok: one batch passed on the servers of the job" in output
    assert left() == before, "neither run nor checkpoint"
    for name, value in servers.items():
        monkeypatch.setenv(name, value)
    out, _ = verb("doctor", "persia.yml", "--only", "services")
    assert re.search(r"ok    persia-server  1 of 1, [1-9]\d* rows", out) and "ok    nats" in out
    _, errors = verb("train", "persia.yml", "--test", code=2)
    assert re.search(r"the servers hold [1-9]\d* rows, which a test replaces", errors)
    assert "--local" in errors and "--replace-rows" in errors
    _, errors = verb("train", "persia.yml", "--test", "--set", "data.epochs=often", code=2)
    assert "data.epochs: found `often`" in errors, "the configuration is checked whole"


def passed(output: str) -> list[str]:
    """Return the steps of the ladder that were run, with how they ended."""
    return re.findall(r"^   (✓|✗|skipped)", output, re.MULTILINE)


@pytest.mark.row("S1-01")
def test_the_ladder_stops_at_the_first_step_that_fails(table: Path, verb: Verb) -> None:
    model = (table / "mine.py").read_text()
    (table / "clicks.parquet").rename(table / "gone.parquet")
    whole = ladder.steps(table / "persia.yml")
    assert [step.number for step in whole] == [*range(1, 11)] and all(step.title and step.diagnosis for step in whole)
    output, _ = verb("doctor", "--ladder", "persia.yml", code=2)
    assert passed(output) == ["✓", "✓", "✗"] and "clicks.parquet" in output
    assert " 3 one batch, in one process: persia train persia.yml --test --local" in output
    assert "diagnosis: the model is sound: the fault is in the data" in output
    assert "next: persia train persia.yml --test --local" in output and "\n 4 " not in output
    (table / "mine.py").write_text(model.replace("embeddings], 1))", "embeddings], 2))"))
    output, _ = verb("doctor", "--ladder", "persia.yml", code=1)
    assert passed(output) == ["✗"] and "✗ forward: IndexError" in output and "at mine.py:7 in forward" in output
    assert "diagnosis: the fault is in the model" in output


@pytest.mark.nightly
@pytest.mark.row("S1-01")
def test_the_whole_ladder(table: Path, servers: dict[str, str]) -> None:
    output = persia(table, "doctor", "--ladder", "persia.yml", "--nproc", "2", env=servers)
    assert [int(number) for number in re.findall(r"^ ?(\d+) ", output, re.MULTILINE)] == [*range(1, 11)]
    assert len(passed(output)) == 10 and passed(output).count("✓") >= 7
    assert len([*table.glob("runs/ladder-*/summary.json")]) == 2, "the whole runs of steps 8 and 10"
