"""``persia up`` with scripts: a whole job on this host."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forking import WANTED
from up_jobs import DEADLINE, TRAIN, StartUp, ended

from persia.errors import UsageError
from persia.launch.up import up as start_up
from persia.runtime import processors

pytestmark = pytest.mark.usefixtures("forks")

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
    with pytest.raises(UsageError, match="nats-server is not on PATH") as caught:
        start_up(tmp_path / "job.yml")
    assert caught.value.hint.endswith("apt install nats-server")


@pytest.mark.usefixtures("binaries")
def test_the_processes_of_a_job_share_the_processors(
    up: StartUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    note = "import os, signal\nfrom pathlib import Path\n"
    note += "Path('NAME-' + os.environ['INDEX'] + '.txt').write_text(os.environ['OMP_NUM_THREADS'])\n"
    data = note.replace("NAME", "data").replace("INDEX", "REPLICA_INDEX") + "signal.pause()\n"
    (tmp_path / "data.py").write_text(data)
    files = [f"data-{index}.txt" for index in (0, 1)]
    (tmp_path / "train.py").write_text(
        note.replace("NAME", "rank").replace("INDEX", "RANK")
        + f"from waiting import wait_until\nwait_until('data scripts', lambda: all(map(os.path.exists, {files})), 60)\n"
    )
    one = up(TWO + "data_compose: {entry: data.py, replicas: 2}\nrestarts: 0\n")
    one.wait()  # an error, because a rank trains nothing
    shares = {path.name: path.read_text() for path in tmp_path.glob("*-?.txt")}
    assert shares == dict.fromkeys([*files, "rank-0.txt", "rank-1.txt"], str(processors.share(2))), one.output
    for name in ("rank", "data script"):
        assert one.output.count(f"torch threads of each of 2 {name}s: {processors.share(2)}, of ") == 1, one.output


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
def test_a_job_of_new_processes_trains(up: StartUp, tmp_path: Path) -> None:
    """A variable of Python prevents forks, so the job runs as a user starts it: each rank has its own hash seed."""
    (tmp_path / "train.py").write_text(f"import sys\nprint('torch' in sys.modules)\n{TRAIN}")
    one = up("job: cold\nembedding_config: slots.yml\ntrainer: {entry: train.py, ranks: 2}\n", PYTHON_COLD="1")
    assert one.wait() == 0, one.output
    assert any(line.endswith("False") for line in one.lines), one.output
    assert json.loads((tmp_path / "runs" / "cold" / "summary.json").read_text())["steps"] == 3


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
    (tmp_path / "train.py").write_text("import sys\nprint('once', 'torch' in sys.modules)\nraise ValueError('mine')\n")
    one = up("embedding_config: slots.yml\ntrainer: {entry: train.py}\n")
    assert one.wait() == 1
    assert one.output.count("once") == 1 and "ValueError: mine" in one.output
    assert f"once {WANTED}" in one.output, "ranks are forks of one process, except in make test-cold"


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


@pytest.mark.nightly
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
