"""``persia train --test`` and ``--nproc`` on ranks and servers, and the ladder over them: real processes of a job."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, Verb
from stack import missing
from waiting import is_running, wait_until

from persia.doctor import diagnosis, job_status, ladder

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from trainer_files import write_clicks, write_config

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.usefixtures("forks"),
]

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
    """A folder with rows, a user's model and a configuration."""
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
    """The AUC that the two ranks report equals that of one process that evaluates the run's checkpoint."""
    settings = (
        "run.name=two",
        "data.batch_size=64",
        "profile={wait: 1, warmup: 1, active: 3}",
        "train.micro_batch=999",
    )
    given = [word for each in settings for word in ("--set", each)]
    output = persia(table, "train", "persia.yml", "--nproc", "2", "--profile", *given)
    assert output.count("found 999, which has no effect, because data.batch_size is 64") == 1, output
    profile = output.partition("finished")[2] or output
    assert re.search(r"data wait .* %|forward", profile) and "trace: runs/two/profile/rank-0.pt.trace.json" in profile
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


def test_a_test_on_servers_that_is_stopped_leaves_nothing(table: Path, servers: dict[str, str]) -> None:
    """The rank of the test ends with the command. The checkpoint that the rank saves at its end is removed."""
    hold, model = table / "hold", (table / "mine.py").read_text()
    waits = (
        f"import os, time\n        while os.path.exists({str(hold)!r}):\n            time.sleep(0.05)\n        return"
    )
    (table / "mine.py").write_text(model.replace("        return", f"        {waits}"))

    def left() -> list[str]:
        return [name for name in files(table) if "/servers/" not in name and name != "hold"]

    before = left()
    hold.touch()
    words = [sys.executable, "-m", "persia", "train", "persia.yml", "--test"]
    with subprocess.Popen(words, cwd=table, env={**os.environ, **servers}, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        assert "rank 0: ✓ build" in next(line for line in test.stdout if "build" in line)
        ranks = psutil.Process(test.pid).children(recursive=True)
        folders = [Path(each.environ()["PERSIA_RUN_DIR"]) for each in ranks if "PERSIA_RUN_DIR" in each.environ()]
        assert ranks and folders and folders[0].is_dir()
        test.terminate()
        hold.unlink()
        assert test.wait(60) in (0, 75)
    assert not [each for each in ranks if is_running(each.pid)]
    assert left() == before and not folders[0].exists()


def passed(output: str) -> list[str]:
    """Return the steps of the ladder that were run, with how they ended."""
    return re.findall(r"^   (✓|✗|skipped)", output, re.MULTILINE)


@pytest.mark.row("S1-01")
def test_the_ladder_stops_at_the_first_step_that_fails(table: Path, verb: Verb) -> None:
    model = (table / "mine.py").read_text()
    (table / "clicks.parquet").rename(table / "gone.parquet")
    whole = ladder.steps(table / "persia.yml")
    assert [step.number for step in whole] == [*range(1, 11)] and all(
        step.title and any(diagnosis.of(step.number, 1, "")) for step in whole
    )
    output, _ = verb("doctor", "--ladder", "persia.yml", code=2)
    assert passed(output) == ["✓", "✓", "✗"] and "clicks.parquet" in output
    assert " 3 one batch, in one process: persia train persia.yml --test --local" in output
    assert "diagnosis: the model works: the fault is in the data" in output
    assert "next: persia train persia.yml --test --local" in output and "\n 4 " not in output
    assert output.endswith("passed: steps 1, 2\nnot run: steps 4, 5, 6, 7, 8, 9, 10\n")
    (table / "mine.py").write_text(model.replace("embeddings], 1))", "embeddings], 2))"))
    output, _ = verb("doctor", "--ladder", "persia.yml", code=1)
    assert passed(output) == ["✗"] and "✗ forward: IndexError" in output and "at mine.py:7 in forward" in output
    assert "diagnosis: the fault is in the model" in output


@pytest.mark.row("S1-01")
def test_the_whole_run_of_the_ladder_is_not_the_latest(table: Path, verb: Verb) -> None:
    """``runs/LATEST`` names the newest run that the user started."""
    verb("train", "persia.yml", "--set", "run.name=mine")
    whole = ladder.steps(Path("persia.yml"), ranks=2)[7]
    verb(*whole.words[1:])
    assert len([*table.glob("runs/ladder/ladder-*/summary.json")]) == 1
    assert (table / "runs" / "LATEST").read_text() == "mine\n"


@pytest.mark.row("S1-01")
def test_skipped_steps_are_summed_up(table: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    (table / "mine.py").write_text("import torch\nclass Mine(torch.nn.Module):\n    pass\n")
    first, *_, seventh = found = ladder.steps(Path("persia.yml"), ranks=2)[:7]
    skipped = [replace(step, skip=step.skip or "docker is not on PATH") for step in found[3:6]]
    results = [ladder.Result(first, 0), *(ladder.Result(step, None) for step in (*skipped, seventh))]
    assert [*ladder.summary(found, results)] == [
        "passed: step 1",
        f"skipped: steps 4, 5, 6: {skipped[0].skip}",
        "skipped: step 7: PERSIA_NATS_URL is not set: there is no job to join",
        "not run: steps 6, 7",
    ]


@pytest.mark.parametrize(
    ("code", "output", "texts"),
    [
        (3, "", ["a process of the job is missing", "nats: 127.0.0.1:1: refused", "next: docker compose up"]),
        (5, "", ["its version or the slots of its file differ from those of the servers", "PERSIA_TOKEN_FILE"]),
        (2, "error: job one: the servers hold 7 rows", ["was refused before it trained"]),
        (1, "rank 0: ✓ evaluate\nrank 0: ✗ checkpoint: could not", ["the same folder as PERSIA_CKPT_DIR"]),
    ],
)
def test_the_step_on_servers_has_a_diagnosis(
    code: int, output: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    lines = "\n".join(diagnosis.of(7, code, output))
    assert all(text in lines for text in texts), lines


@pytest.mark.nightly
@pytest.mark.row("S1-01")
def test_the_whole_ladder(table: Path, servers: dict[str, str]) -> None:
    output = persia(table, "doctor", "--ladder", "persia.yml", "--nproc", "2", env=servers)
    assert [int(number) for number in re.findall(r"^ ?(\d+) ", output, re.MULTILINE)] == [*range(1, 11)]
    assert len(passed(output)) == 10 and passed(output).count("✓") >= 7
    assert len([*table.glob("runs/ladder/ladder-*/summary.json")]) == 2, "the whole runs of steps 8 and 10"
