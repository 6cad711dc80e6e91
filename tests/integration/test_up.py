"""``persia up``: a whole job on this host.

Everything starts as it does for a user: launchers and ranks are new processes, never forks of ``forking.py``.
"""

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest
import torch
from stack import missing
from waiting import is_running, wait_until

from persia import Trainer
from persia.config import load_config
from persia.data import synth
from persia.errors import UsageError
from persia.launch.up import up as start_up
from persia.profile import report

DEADLINE = 180.0
TRAIN = """\
import os
from pathlib import Path
import torch
from conftest import Batches, TinyModel
from waiting import wait_until
from persia import distributed, env
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD

torch.manual_seed(0)
model = TinyModel()
with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model) as ctx:
    for step, batch in enumerate(DataLoader(Batches(int(os.environ["STEPS"]), seed=env.get_rank()))):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
        print("step", step, "rank", env.get_rank(), flush=True)
        if step == 2 and "HOLD" in os.environ:
            wait_until("the test", Path(os.environ["HOLD"]).exists, 60)
    rows = sum(ctx.get_embedding_size())
distributed.report({"rows": rows})
"""


class Up:
    """A running ``persia up``, and its output."""

    def __init__(self, folder: Path, config: str, options: Sequence[str], env: Mapping[str, str]) -> None:
        (folder / "job.yml").write_text(config)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "persia", "up", "job.yml", *options],
            cwd=folder,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def child(self, program: str, **variables: str) -> psutil.Process:
        """Return the only child process whose command line has ``program``, with these environment variables."""

        def matches(child: psutil.Process) -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end in the meantime
                return (
                    bool(re.search(program, " ".join(child.cmdline()))) and variables.items() <= child.environ().items()
                )
            return False

        found = [child for child in self.children() if matches(child)]
        assert len(found) == 1, found
        return found[0]

    def says(self, pattern: str) -> str:
        """Wait for a line that matches, and return it."""

        def said() -> str | None:
            ended = not self._reader.is_alive()
            line = next((line for line in list(self.lines) if re.search(pattern, line)), None)
            assert line or not ended, f"no line matches {pattern!r}\n{self.output}"
            return line

        return wait_until(f"a line that matches {pattern!r}", said, DEADLINE, evidence=lambda: self.output)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        sys.stdout.write(self.output + "\n")  # shown if the test failed


StartUp = Callable[..., Up]


@pytest.fixture
def up(no_job: None, tmp_path: Path) -> Iterator[StartUp]:
    """Run ``persia up`` on a configuration, in a folder with slots and a small training script."""
    (tmp_path / "slots.yml").write_text("slots_config: {a: {dim: 4}, b: {dim: 4}}\n")
    (tmp_path / "train.py").write_text(TRAIN)
    started: list[Up] = []

    def start(config: str, *options: str, **env: str) -> Up:
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {"STEPS": "3", "PERSIA_RPC_TIMEOUT": "15", "PYTHONPATH": path, **env}
        started.append(Up(tmp_path, config, options, environment))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def binaries() -> None:
    if reason := missing():
        pytest.skip(reason)


def ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE)
    return not [process for process in alive if is_running(process.pid)]


TWO = """\
job: two
servers: 2
middlewares: 2
embedding_config: slots.yml
trainer: {entry: train.py, ranks: 2}
"""


def test_every_mistake_is_listed(up: StartUp) -> None:
    one = up("servers: 0\nmiddlewars: 1\ntrainer: {entry: train.py, ranks: two}\nenv: {a: [1]}\nzzz: 1\n")
    assert one.wait() == 2
    assert one.lines[0].endswith("job.yml: 6 errors")
    for text in (
        "servers: found `0`, allowed: greater than or equal to 1",
        "middlewars: unknown key, did you mean `middlewares`?",
        "trainer.ranks: found `two`, allowed: a valid integer",
        "env.a: found `[1]`, allowed: a string or a number",
        "embedding_config: missing",
        "zzz: unknown key, known: job, servers",
    ):
        assert text in one.output, one.output


def test_files_that_are_not_there(up: StartUp) -> None:
    one = up("embedding_config: no.yml\ntrainer: {entry: no.py --lr 1}\ntoken: secret\n")
    assert one.wait() == 2
    for text in ("embedding_config: found `no.yml`", "trainer.entry: found `no.py`", "token: found `secret`"):
        assert text in one.output
    assert len(one.lines) == 4 + 1, one.output  # the title, three mistakes, and the next step


def test_no_nats_server(no_job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slots.yml").write_text("slots_config: {a: {dim: 4}}\n")
    (tmp_path / "job.yml").write_text(f"embedding_config: slots.yml\nrun_dir: {tmp_path}\n")
    monkeypatch.setattr("persia.launch.local_job.shutil.which", lambda *_, **__: None)
    with pytest.raises(UsageError, match="apt install nats-server"):
        start_up(tmp_path / "job.yml")


@pytest.mark.usefixtures("binaries")
def test_two_ranks_train_and_a_second_start_says_so(up: StartUp, tmp_path: Path) -> None:
    one = up(TWO)
    assert one.wait() == 0, one.output
    assert "[rank 0] step 2 rank 0" in one.output and "[rank 1] step 2 rank 1" in one.output
    summary = json.loads((tmp_path / "runs" / "two" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["world_size"] == 2 and summary["steps"] == 3
    assert summary["result"]["rows"] > 0
    assert (tmp_path / "runs" / "two" / "logs" / "trainer.log").read_text()
    again = up(TWO)
    assert again.wait() == 0
    assert "this run is finished" in again.output and "step" not in again.output.split("this run is finished")[0]


@pytest.mark.usefixtures("binaries")
def test_a_killed_server_is_named_and_the_run_restarts(up: StartUp, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    one = up(TWO, STEPS="30", HOLD=str(hold))
    one.says("step 2 rank 0")
    one.child("sharded-server.*--replica-index 1").kill()
    one.says("server-1 was killed by SIGKILL")
    hold.touch()
    one.says(r"trainer ended with exit code 75")
    assert one.wait() == 0, one.output
    summary = json.loads((tmp_path / "runs" / "two" / "summary.json").read_text())
    assert summary["generation"] > 2 and summary["steps"] == 30, "every start and every loop begins a generation"


@pytest.mark.usefixtures("binaries")
def test_a_killed_server_without_restarts_never_looks_finished(up: StartUp, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    one = up(TWO + "restarts: 0\n", STEPS="100", HOLD=str(hold))
    one.says("step 2 rank 0")
    one.child("sharded-server.*--replica-index 0").kill()
    one.says("server-0 was killed by SIGKILL")
    hold.touch()
    assert one.wait() == 75, one.output
    assert not (tmp_path / "runs" / "two" / "summary.json").exists()


@pytest.mark.usefixtures("binaries")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_a_signal_ends_everything(up: StartUp, tmp_path: Path, number: int, expected: int) -> None:
    one = up(TWO, STEPS="1000", HOLD=str(tmp_path / "never"))
    one.says("step 2 rank 0")
    processes = one.children()
    one.send(number)
    assert one.wait() == expected, one.output
    assert ended(processes)
    assert not (tmp_path / "runs" / "two" / "summary.json").exists()


@pytest.mark.usefixtures("binaries")
def test_nothing_is_left_when_it_is_killed(up: StartUp, tmp_path: Path) -> None:
    one = up(TWO, STEPS="1000", HOLD=str(tmp_path / "never"))
    one.says("step 2 rank 0")
    processes = one.children()
    assert len(processes) >= 7
    one.send(signal.SIGKILL)
    assert ended(processes)


@pytest.mark.usefixtures("binaries")
def test_a_script_with_an_error_is_not_restarted(up: StartUp, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('once')\nraise ValueError('mine')\n")
    one = up("embedding_config: slots.yml\ntrainer: {entry: train.py}\n")
    assert one.wait() == 1
    assert one.output.count("once") == 1 and "ValueError: mine" in one.output


@pytest.mark.usefixtures("binaries")
def test_servers_alone_serve_trainers_started_by_hand(up: StartUp, tmp_path: Path) -> None:
    one = up("embedding_config: slots.yml\nservers: 2\n")
    one.says("export PERSIA_TOKEN_FILE=")
    exports = dict(line.split("export ", 1)[1].split("=", 1) for line in list(one.lines) if "export " in line)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "persia.launch.rank_main", "train.py"],
        cwd=tmp_path,
        env={**os.environ, **exports, "STEPS": "2", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one.send(signal.SIGINT)
    assert one.wait() == 0


STYLE = Path(__file__).parents[1] / "persiaml_style"
STYLE_JOB = f"""\
job: style
servers: 2
embedding_config: {STYLE}/config/embedding_config.yml
global_config: {STYLE}/config/global_config.yml
data_compose: {{entry: {STYLE}/data_loader.py, replicas: 2}}
trainer: {{entry: {STYLE}/train.py, ranks: 2}}
"""


@pytest.mark.usefixtures("binaries")
def test_scripts_in_persiaml_style(up: StartUp, tmp_path: Path) -> None:
    one = up(STYLE_JOB, BATCHES="40")
    assert one.wait() == 0, one.output
    summary = json.loads((tmp_path / "runs" / "style" / "summary.json").read_text())
    assert summary["steps"] == 40 and summary["world_size"] == 2, "two replicas send 40 batches each to two ranks"
    assert one.output.count("every batch is sent; waiting for the next generation") == 2


@pytest.mark.usefixtures("binaries")
def test_a_killed_rank_restarts_with_all_data(up: StartUp, tmp_path: Path) -> None:
    one = up(STYLE_JOB, BATCHES="400")
    one.says("generation .* of job style, rank 1 of 2")
    one.child("launch.rank.*train.py", RANK="1").kill()
    one.says("rank 1 was killed by SIGKILL")
    one.says("trainer ended with exit code 75")
    assert one.wait() == 0, one.output
    summary = json.loads((tmp_path / "runs" / "style" / "summary.json").read_text())
    assert summary["steps"] == 400, "the data scripts began again, too"


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
def test_a_table_on_two_ranks_outlives_a_rank_and_a_server(up: StartUp, tmp_path: Path) -> None:
    synth.write(tmp_path / "rows.parquet", 3000, synth.Teacher((40, 30), 1))
    sizes = ("--servers", "2", "--ranks", "2", "--data-compose", "2", "--name", "two")
    one = up((TABLE % 12).replace("checkpoint:", "run: {log_every: 20}\ncheckpoint:"), *sizes)
    one.says("step 60/")
    one.child("launch.rank_main", RANK="1").kill()
    one.says("training resumes after step")
    one.says("step 120/")
    one.child("sharded-server.*--replica-index 1").kill()
    assert one.wait() == 0, one.output
    summary = json.loads((tmp_path / "runs" / "two" / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["result"]["test"]["labels"]["label"]["auc"] > 0.6
    # Each of two replicas ends an epoch with a small batch.
    assert 0 <= summary["steps"] - 12 * -(-summary["result"]["rows"]["train"] // 100) <= 12
    assert not re.search("differ from those it received", one.output)


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


@pytest.mark.row("S3-05", "S3-27")
@pytest.mark.usefixtures("binaries")
def test_shards_of_a_table_s_model_learn_what_whole_copies_learn(up: StartUp, tmp_path: Path) -> None:
    """Evaluations and the best checkpoint included; a step of two batches is one of as many rows."""
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
    assert len(lines[0]) >= 7  # a report and an evaluation of every fourth step, and the test part
    for one_line, other in zip(*lines, strict=True):
        assert one_line == pytest.approx(other, abs=2e-6)
    assert_same_form(*states)


@pytest.mark.usefixtures("binaries")
def test_shards_that_are_stopped_continue_as_if_they_were_not(up: StartUp, tmp_path: Path) -> None:
    """The last checkpoint is written after a signal, with the weights of its step and not of the one before it."""
    synth.write(tmp_path / "rows.parquet", 3000, synth.Teacher((40, 30), 1))
    states = []
    for name in ("whole", "stopped"):
        table = TABLE.replace("checkpoint: {every: 40}", "run: {log_every: 20}\ncheckpoint: {every: 1000}") % 12
        one = up(f"{table}parallel: fsdp\n", "--ranks", "2", "--name", name)
        if name == "stopped":
            one.says("step 60/")
            one.child("launch.rank_main", RANK="1").terminate()
            one.says("trainer ended with exit code 75")
        assert one.wait() == 0, one.output
        last = max((tmp_path / "runs" / name / "checkpoints").glob("*/step-*"), key=lambda path: int(path.name[5:]))
        states.append([torch.load(last / file, weights_only=True) for file in ("dense.pt", "opt.pt")])
    assert_same_form(*states)


def assert_same_form(one: object, other: object) -> None:
    """Compare states: equal keys, and plain tensors that are equal to 1e-6."""
    assert type(one) is type(other)
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_form(one[key], other[key])
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for first, second in zip(one, other, strict=True):
            assert_same_form(first, second)
    elif isinstance(one, torch.Tensor):
        assert type(one) is torch.Tensor
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    else:
        assert one == other


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
    one = up(TABLE % 12 + OBSERVED, "--ranks", "2", "--name", "one")
    one.says("dense gradients are averaged over gloo \\(no GPU\\)")
    one.says("memory: server .* rows\\), trainer .* fits in the")
    one.says("step 10/")
    env = {name: value for name, value in one.child("launch.rank_main", RANK="0").environ().items() if "PERSIA" in name}
    command = [sys.executable, "-m", "persia", "status", "--watch", "--csv", "-l", "1", "-n", "0.5"]
    seen = subprocess.run(command, env={**os.environ, **env}, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert seen.returncode == 0, seen.stderr
    rows = {row["process"]: row for row in csv.DictReader(io.StringIO(seen.stdout))}
    kinds = ("server 0", "middleware 0", "data 0", "trainer 0", "trainer 1")
    assert {*rows} == {f"persia-{kind}" for kind in kinds}
    assert all(int(row["rss_bytes"]) > 1 << 20 and row["cpu_percent"] for row in rows.values())
    first, second = rows["persia-trainer 0"], rows["persia-trainer 1"]
    assert int(first["step"]) >= 10 and first["data_wait"] and not second["step"]
    assert one.wait() == 0, one.output
    profiles = report.read(tmp_path / "runs" / "one")
    assert [each.rank for each in profiles] == [0, 1]
    assert all(each.content["steps"] == [4, 9] and "all-reduce" in each.content["calls"] for each in profiles)
    assert (tmp_path / "runs" / "one" / "profile" / "rank-1.pt.trace.json").exists()
    wrong = up(TABLE % 1 + "dist: {interface: eth9}\n", "--name", "wrong")
    assert wrong.wait() == 2, wrong.output
    wrong.says("PERSIA_SOCKET_IFNAME=eth9: interface eth9 does not exist; have ")
    wrong.says("next:  correct the variable, or dist.interface")


def test_mistakes_of_a_table_are_listed_before_anything_starts(up: StartUp) -> None:
    broken = up((TABLE % 1).replace("type: id, dim: 4", "type: idd, dim: 0"))
    assert broken.wait() == 2 and "nats" not in broken.output
    assert "job.yml:3:15: features.id0.type: found `idd`" in broken.output, broken.output
    wrong = up("embedding_config: slots.yml\nservers: 2\n", "--servers", "3")
    assert wrong.wait() == 2 and "--servers: job.yml is not a persia.yml" in wrong.output
