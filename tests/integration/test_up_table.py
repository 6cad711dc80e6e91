"""``persia up`` with a table: the model that it trains, and how it is observed."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from states import assert_same_form
from up_jobs import StartUp
from waiting import wait_until

from persia import Trainer
from persia.config import load_config
from persia.data import synth
from persia.profile import report

pytestmark = pytest.mark.usefixtures("forks")

TABLE = """\
data: {train: rows.parquet, batch_size: 100, epochs: %d}
features:
  id0: {type: id, dim: 4}
  id1: {type: id, dim: 4}
  dense0: {type: dense, standardise: true}
labels: {label: {}}
train: {reproducible: true}
checkpoint: {every: 40}
"""


@pytest.mark.usefixtures("binaries")
def test_a_table_trains_as_in_one_process(up: StartUp, tmp_path: Path) -> None:
    synth.write(tmp_path / "rows.parquet", 3000, synth.Teacher((40, 30), 1))
    one = up(TABLE % 1, "--servers", "2", "--name", "one")
    assert one.wait() == 0, one.output
    job = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())
    config = load_config(tmp_path / "job.yml", [f"run.dir={tmp_path}", "run.name=alone"])
    with Trainer(config) as trainer:
        list(trainer.fit())
    alone = json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert job["status"] == alone["status"] == "finished"
    for part in ("valid", "test"):
        assert job["result"][part]["labels"] == alone[part]["labels"], part
    assert job["result"]["test"]["labels"]["label"]["auc"] > 0.6
    with Trainer(config).resume(tmp_path / "runs" / "one") as trained:
        assert trained.evaluate().labels["label"].as_dict() == alone["test"]["labels"]["label"], "by the run's folder"
    assert up(TABLE % 1, "--name", "one").wait() == 2, "the run of this name is finished"


@pytest.mark.usefixtures("binaries")
def test_keys_of_a_table_are_changed_on_the_command_line(up: StartUp, tmp_path: Path) -> None:
    synth.write(tmp_path / "rows.parquet", 1000, synth.Teacher((40, 30), 1))
    changes = ("--set", "data.epochs=2", "--set", "run.name=changed", "--set", "run.log_every=4")
    one = up(TABLE % 30, *changes)
    one.says("step 4/")
    one.child("launch.rank_main").terminate()
    one.says("trainer ended with exit code 75")
    assert one.wait() == 0, one.output
    summary = json.loads((tmp_path / "runs" / "changed" / "summary.json").read_text())
    assert summary["steps"] == 2 * -(-summary["result"]["rows"]["train"] // 100)
    assert (tmp_path / "job.yml").read_text() == TABLE % 30
    again = up(TABLE % 30, *changes)
    assert again.wait() == 2
    again.says("persia up job.yml --set data.epochs=2 --set run.log_every=4 --name NAME")


@pytest.mark.usefixtures("binaries")
def test_a_table_on_two_ranks_outlives_a_rank_and_a_server(up: StartUp, tmp_path: Path) -> None:
    synth.write(tmp_path / "rows.parquet", 3000, synth.Teacher((40, 30), 1))
    sizes = ("--servers", "2", "--ranks", "2", "--data-compose", "2", "--name", "two")
    one = up((TABLE % 18).replace("checkpoint:", "run: {log_every: 20}\ncheckpoint:"), *sizes)
    one.says("step 60/")
    saves = tmp_path / "runs" / "two" / "checkpoints"
    wait_until("a checkpoint", lambda: any(saves.glob("*/step-*/MANIFEST.json")), 60, evidence=lambda: one.output)
    one.child("launch.rank_main", RANK="1").kill()
    one.says("training resumes after step")
    one.says("step 100/")
    one.child("sharded-server.*--replica-index 1").kill()
    one.says("server-1 was killed by SIGKILL")
    assert one.wait() == 0, one.output
    assert one.output.count("training resumes after step") >= 2, "the kill came before the end"
    summary = json.loads((tmp_path / "runs" / "two" / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["result"]["test"]["labels"]["label"]["auc"] > 0.6
    # Each of the two replicas ends an epoch with a small batch.
    assert 0 <= summary["steps"] - 18 * -(-summary["result"]["rows"]["train"] // 100) <= 18
    assert not re.search("differ from those that rank|skipping the first batches", one.output)
    assert one.output.count("continuing in epoch") >= 2, "data-compose begins where the ranks are"


@pytest.mark.nightly
@pytest.mark.usefixtures("binaries")
def test_a_table_that_stopped_early_on_two_ranks_ends_after_a_restart(up: StartUp, tmp_path: Path) -> None:
    synth.write(tmp_path / "rows.parquet", 1500, synth.Teacher((40, 30), 1))
    synth.write(tmp_path / "test.parquet", 300, synth.Teacher((40, 30), 1))
    whole = pyarrow.parquet.read_table(tmp_path / "test.parquet")
    labels = [*whole["label"].to_pylist()[:-1], 2]
    broken = whole.set_column(whole.column_names.index("label"), "label", pyarrow.array(labels))
    pyarrow.parquet.write_table(broken, tmp_path / "test.parquet")
    train = "reproducible: true, evaluate_every: 4, early_stop: {patience: 1}, dense_optimizer: {name: adam, lr: 0.3}"
    table = (
        (TABLE % 20).replace("reproducible: true", train).replace("rows.parquet,", "rows.parquet, test: test.parquet,")
    )
    sizes = ("--servers", "1", "--ranks", "2", "--name", "early")
    one = up(table, *sizes)
    assert one.wait() == 2, one.output
    assert "training stops" in one.output and "row 300:" in one.output, "it failed after its last save"
    pyarrow.parquet.write_table(whole, tmp_path / "test.parquet")
    again = up(table, *sizes)
    assert again.wait() == 0, again.output
    assert "training resumes after" in again.output and "epoch" not in again.output, "it does not train again"
    result = json.loads((tmp_path / "runs" / "early" / "summary.json").read_text())["result"]
    assert result["early_stopped"] and result["test"]["step"] == result["valid"]["step"] == result["best"]["step"]
    assert "<td class=n>finished</td>" in (tmp_path / "runs" / "early" / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.row("S3-05", "S3-27")
@pytest.mark.usefixtures("binaries")
def test_shards_of_a_table_s_model_learn_what_whole_copies_learn(up: StartUp, tmp_path: Path) -> None:
    """Evaluations and the best checkpoint are equal too. A step has two batches instead of one of twice the size."""
    synth.write(tmp_path / "rows.parquet", 1500, synth.Teacher((40, 30), 1))
    train = "reproducible: true, evaluate_every: 4, early_stop: {patience: 9}, clip_norm: 0.1"
    table = (TABLE % 1).replace("reproducible: true", train) + "run: {log_every: 4}\n"
    halves = table.replace("batch_size: 100", "batch_size: 50").replace("clip_norm", "accumulate: 2, clip_norm")
    lines, states = [], []
    for name, content in (("ddp", table), ("fsdp", f"{halves}parallel: fsdp\n")):
        one = up(content, "--ranks", "2", "--name", name)
        assert one.wait() == 0, one.output
        assert ("the model is sharded over 2 ranks (FSDP): rank 0 holds" in one.output) == (name == "fsdp")
        folder = tmp_path / "runs" / name
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines.append([[each.get("loss"), each.get("grad_norm"), each.get("valid", {}).get("loss")] for each in found])
        last = max((folder / "checkpoints").glob("*/step-*"), key=lambda path: int(path.name[5:]))
        states.append([torch.load(last / file, weights_only=True) for file in ("dense.pt", "opt.pt")])
    assert len(lines[0]) >= 7  # a report and an evaluation of every fourth step, and the test set
    for one_line, other in zip(*lines, strict=True):
        assert one_line == pytest.approx(other, abs=2e-6)
    assert_same_form(*states)


@pytest.mark.nightly
@pytest.mark.usefixtures("binaries")
def test_shards_that_are_stopped_continue_as_if_they_were_not(up: StartUp, tmp_path: Path) -> None:
    """The checkpoint that is written after a signal has the weights of its own step, not of the step before."""
    synth.write(tmp_path / "rows.parquet", 3000, synth.Teacher((40, 30), 1))
    states = []
    for name in ("whole", "stopped"):
        table = TABLE.replace("checkpoint: {every: 40}", "run: {log_every: 20}\ncheckpoint: {every: 1000}") % 8
        one = up(f"{table}parallel: fsdp\n", "--ranks", "2", "--name", name)
        if name == "stopped":
            one.says("step 20/")
            one.child("launch.rank_main", RANK="1").terminate()
            one.says("trainer ended with exit code 75")
        assert one.wait() == 0, one.output
        last = max((tmp_path / "runs" / name / "checkpoints").glob("*/step-*"), key=lambda path: int(path.name[5:]))
        states.append([torch.load(last / file, weights_only=True) for file in ("dense.pt", "opt.pt")])
    assert_same_form(*states)


OBSERVED = """
dist: {timeout_s: 100}
nccl: {debug: WARN}
profile: {wait: 2, warmup: 1, active: 6}
run: {log_every: 5}
"""


@pytest.mark.row("S3-37", "S3-19", "S3-10")
@pytest.mark.usefixtures("binaries")
def test_a_job_is_watched_and_profiled_and_says_what_it_needs(up: StartUp, tmp_path: Path) -> None:
    synth.write(tmp_path / "rows.parquet", 3000, synth.Teacher((40, 30), 1))
    one = up(TABLE % 48 + OBSERVED, "--ranks", "2", "--name", "one")
    one.says("dense gradients are averaged over gloo \\(no GPU\\)")
    one.says("memory: server .* rows\\), trainer .* fits in the")
    one.says("step 10/")
    environment = tmp_path / "runs" / "one" / "job.env"
    one.says(f"in another shell: \\. {environment}")
    command = f". {environment}; {sys.executable} -m persia status --watch --csv -l 1 -n 0.5"
    seen = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert seen.returncode == 0, seen.stderr
    rows = {row["process"]: row for row in csv.DictReader(io.StringIO(seen.stdout))}
    kinds = ("server 0", "middleware 0", "data 0", "trainer 0", "trainer 1")
    assert {*rows} == {f"persia-{kind}" for kind in kinds}
    assert all(int(row["rss_bytes"]) > 1 << 20 and row["cpu_percent"] for row in rows.values())
    first, second = rows["persia-trainer 0"], rows["persia-trainer 1"]
    assert int(first["step"]) >= 10 and first["data_wait"] and not second["step"]
    assert one.wait() == 0, one.output
    assert not environment.exists()
    profiles = report.read(tmp_path / "runs" / "one")
    assert [each.rank for each in profiles] == [0, 1]
    assert all(each.content["steps"] == [4, 9] and "all-reduce" in each.content["calls"] for each in profiles)
    assert (tmp_path / "runs" / "one" / "profile" / "rank-1.pt.trace.json").exists()
    wrong = up(TABLE % 1 + "dist: {interface: eth9}\n", "--name", "wrong")
    assert wrong.wait() == 2, wrong.output
    wrong.says("PERSIA_SOCKET_IFNAME=eth9: interface eth9 does not exist; this host has ")
    wrong.says("next:  correct the variable, or dist.interface")


def test_mistakes_of_a_table_are_listed_before_anything_starts(up: StartUp) -> None:
    broken = up((TABLE % 1).replace("type: id, dim: 4", "type: idd, dim: 0"))
    assert broken.wait() == 2 and "nats" not in broken.output
    assert "job.yml:3:15: features.id0.type: found `idd`" in broken.output, broken.output
    wrong = up("embedding_config: slots.yml\nservers: 2\n", "--servers", "3")
    assert wrong.wait() == 2 and "--servers: job.yml is not a persia.yml" in wrong.output
    wrong = up("embedding_config: slots.yml\nservers: 2\n", "--set", "servers=3")
    assert wrong.wait() == 2 and "--set: job.yml is not a persia.yml" in wrong.output
    unknown = up(TABLE % 1, "--set", "train.sed=3")
    assert unknown.wait() == 2 and "did you mean" in unknown.output and "nats" not in unknown.output
