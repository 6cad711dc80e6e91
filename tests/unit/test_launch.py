"""``persia-launcher``: ranks that start, fail and end together. Nothing here needs servers."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from waiting import is_running, wait_until

from persia.errors import AuthError, UnreachableError
from persia.launch import foreground
from persia.launch.data_loader import wait_for_new_trainers
from persia.launch.local_job import LocalJob, private_folder
from persia.launch.logs import Logs
from persia.launch.process import Process
from persia.launch.supervision import Events
from persia.runtime import tokens

PLACE = (
    'import os, sys\nprint("place", *(os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE")), *sys.argv[1:])\n'
)
WAIT = 'import os, time\nprint("up", os.environ["RANK"], os.getpid(), flush=True)\ntime.sleep(600)\n'
DEADLINE = 100.0  # far below the time that ranks sleep

Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launch(tmp_path: Path, forks: None) -> Iterator[Launch]:
    """Start ``persia-launcher`` in ``tmp_path``, without NATS: ``launch("nn-worker", "train.py")``."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, env: Mapping[str, str | None] | None = None) -> "subprocess.Popen[str]":
        variables = {**os.environ, "PERSIA_NATS_URL": "", **(env or {})}
        process = subprocess.Popen(
            [sys.executable, "-m", "persia.launch.cli", *map(str, arguments)],
            cwd=tmp_path,
            env={name: value for name, value in variables.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE)


def result(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE)
    return process.returncode, output


def up(process: "subprocess.Popen[str]", ranks: int) -> list[int]:
    """Wait until this many ranks are up and return their process ids."""
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < ranks:
        line = process.stdout.readline()
        assert line, f"ended with {process.poll()}"
        if "up " in line:
            pids.append(int(line.split()[-1]))
    return pids


def wait_gone(pids: list[int]) -> None:
    wait_until(f"processes {pids} to end", lambda: not any(map(is_running, pids)), DEADLINE)


@pytest.mark.parametrize("order", ["options first", "file first", "file last"])
def test_ranks_know_their_place(launch: Launch, tmp_path: Path, order: str) -> None:
    (tmp_path / "train.py").write_text(PLACE)
    options = ["--nproc-per-node", 2, "--node-rank", 1, "--nnodes", 2]
    words = {
        "options first": [*options, "train.py", "--"],
        "file first": ["train.py", *options, "--"],
        "file last": [*options, "--", "train.py"],
    }
    code, output = result(launch("nn-worker", *words[order], "--lr", "1"))
    assert code == 0, output
    assert "[rank 2] place 2 0 4 --lr 1" in output and "[rank 3] place 3 1 4 --lr 1" in output


@pytest.mark.parametrize(
    ("given", "seen"), [(None, "nats://persia_nats_service:4222"), ("", ""), ("nats://here:1", "nats://here:1")]
)
def test_nats_is_where_persiaml_has_it_unless_a_variable_says_so(
    launch: Launch, tmp_path: Path, given: str | None, seen: str
) -> None:
    """An empty PERSIA_NATS_URL selects the embedded mode."""
    (tmp_path / "train.py").write_text("import os\nprint(f\"url=<{os.environ['PERSIA_NATS_URL']}>\")\n")
    code, output = result(launch("nn-worker", "train.py", env={"PERSIA_NATS_URL": given}))
    assert code == 0 and f"url=<{seen}>" in output, output


@pytest.mark.row("S0-18")
@pytest.mark.parametrize(("gpus", "places"), [("0", ["1 0 3"]), ("1", ["1 0 3"]), ("2", ["2 0 6", "3 1 6"])])
def test_the_environment_says_what_options_do_not(launch: Launch, tmp_path: Path, gpus: str, places: list[str]) -> None:
    (tmp_path / "train.py").write_text(PLACE)
    env = {
        "PERSIA_NN_WORKER_ENTRY": "train.py --name 'a b'",
        "GPU_NUM": gpus,
        "REPLICA_INDEX": "1",
        "REPLICA_SIZE": "3",
    }
    code, output = result(launch("nn-worker", env=env))
    assert code == 0, output
    assert sorted(re.findall(r"place (.*) --name a b", output)) == places


@pytest.mark.parametrize(
    ("part", "variable", "text"),
    [
        ("embedding-parameter-server", "PERSIA_EMBEDDING_CONFIG", "slots_config: {a: {dim: 0}}"),
        ("embedding-worker", "PERSIA_GLOBAL_CONFIG", "embedding_parameter_server_config: {capacity: 0}"),
    ],
)
def test_a_path_in_a_variable_may_end_in_a_blank(
    launch: Launch, tmp_path: Path, part: str, variable: str, text: str
) -> None:
    """A path in PersiaML's env file ends with a space, which Docker keeps."""
    (tmp_path / "config.yml").write_text(text)
    code, output = result(launch(part, env={variable: "config.yml "}))
    assert code == 2, output
    assert "config.yml: line 1" in output and "found `0`" in output


@pytest.mark.parametrize(
    ("arguments", "env", "text"),
    [
        (["nn-worker"], {}, "set PERSIA_NN_WORKER_ENTRY"),
        (["data-loader"], {}, "set PERSIA_DATALOADER_ENTRY"),
        (["nn-worker", "no.py"], {}, "no.py: no such file"),
        (["nn-worker", "train.py", "--node-rank", "2", "--nnodes", "2"], {}, "--node-rank 2 --nnodes 2 --nproc-per-no"),
        (["nn-worker", "train.py"], {"GPU_NUM": "two"}, "GPU_NUM='two'"),
        (
            ["nn-worker", "train.py"],
            {"GPU_NUM": "2", "CUDA_VISIBLE_DEVICES": "0"},
            "lists too few devices: found 1, expected 2",
        ),
        (["data-loader", "train.py"], {}, "PERSIA_NATS_URL is empty"),
        (
            ["data-loader", "train.py", "--replica-index", "1"],
            {"PERSIA_NATS_URL": "nats://a:1"},
            "the replica index is 1, but the number of replicas is 1: indexes go from 0 to 0",
        ),
        (["data-loader", "train.py", "--replica-size", "0"], {}, "the number of replicas is 0; it must be at least 1"),
        (["embedding-parameter-server", "--replica-index", "2", "--replica-size", "2"], {}, "indexes go from 0 to 1"),
        (["embedding-worker", "--embedding-config", "no.yml"], {}, "--embedding-config no.yml: no such file"),
        (
            ["embedding-parameter-server"],
            {"PERSIA_GLOBAL_CONFIG": "no.yml"},
            "PERSIA_GLOBAL_CONFIG=no.yml: no such file",
        ),
    ],
)
def test_a_mistake_is_an_error_with_a_next_step_and_exit_code_2(
    launch: Launch, tmp_path: Path, arguments: list[str], env: dict[str, str], text: str
) -> None:
    (tmp_path / "train.py").write_text(PLACE)
    code, output = result(launch(*arguments, env=env))
    assert code == 2, output
    assert text in output
    assert [line.split(":")[0] for line in output.strip().splitlines()] in (["error"], ["error", "next"]), output


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("sys.exit(5)", 5),
        ("from persia.errors import ConfigError; raise ConfigError('no such thing')", 2),
        ("raise ValueError('mine')", 1),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", 75),
        ("sys.exit(70)", 70),
    ],
)
def test_one_rank_that_fails_ends_all(launch: Launch, tmp_path: Path, end: str, expected: int) -> None:
    (tmp_path / "train.py").write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(600)\n"
    )
    code, output = result(launch("nn-worker", "train.py", "--nproc-per-node", 3))
    assert code == expected, output
    assert "rank 1" in output and "ending the others" in output
    if "ValueError" in end:
        assert "train.py" in output and "persia/launch" not in output, "only the script's part of the traceback"
    if "ConfigError" in end:
        assert "error: no such thing" in output and "Traceback" not in output


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_before_the_end_stops_all_ranks(launch: Launch, tmp_path: Path, number: int, expected: int) -> None:
    (tmp_path / "train.py").write_text(WAIT)
    process = launch("nn-worker", "train.py", "--nproc-per-node", 2)
    pids = up(process, 2)
    process.send_signal(number)
    code, output = result(process)
    assert code == expected, output
    wait_gone(pids)


def test_a_signal_after_the_end_does_not_change_the_code(tmp_path: Path) -> None:
    """Compose stops every trainer when the first one has ended."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "late.py").write_text(
        "import atexit, os, signal, sys\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
        "from persia.launch.cli import main\n"
        "main()\n"
    )
    words = [sys.executable, "late.py", "nn-worker", "train.py"]
    env = {**os.environ, "PERSIA_NATS_URL": ""}
    assert subprocess.run(words, cwd=tmp_path, env=env, check=False, timeout=DEADLINE).returncode == 0


NOTES = """
import os
import time

from persia.loop.preemption import Preemption
from persia.runtime import preemption

with preemption.saving_run():
    loop = Preemption()
    loop.on_start(None)
    loop.after_step(1)
    print("up", os.environ["RANK"], os.getpid(), flush=True)
    while not preemption.stop_asked():
        time.sleep(0.01)
    print("up to the save", os.getpid(), flush=True)
    time.sleep(5.0)
    print("saved", flush=True)
    preemption.exit_if_requested()
"""


@pytest.mark.parametrize(("gap", "saved"), [(0.1, True), (2.1, False)])
def test_a_signal_to_launcher_and_ranks_counts_once(launch: Launch, tmp_path: Path, gap: float, saved: bool) -> None:
    """Some senders signal all processes, and the launcher forwards the signal to the ranks. Ranks count one signal."""
    (tmp_path / "train.py").write_text(NOTES)
    process = launch("nn-worker", "train.py", "--nproc-per-node", 2)
    pids = up(process, 2)
    process.send_signal(signal.SIGTERM)
    up(process, 2)
    time.sleep(gap)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    code, output = result(process)
    assert (code, output.count("saved")) == (75, 2 * saved), output


def test_nothing_is_left_of_a_launcher_that_was_killed(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAIT)
    process = launch("nn-worker", "train.py", "--nproc-per-node", 2)
    pids = up(process, 2)
    process.kill()
    wait_gone(pids)


def test_a_finished_run_is_not_trained_again(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from persia import distributed\nprint('training')\ndistributed.report({'auc': 1})\n"
    )
    env = {"PERSIA_NATS_URL": "nats://127.0.0.1:1", "PERSIA_RUN_DIR": "run", "PERSIA_JOB": "once"}
    code, output = result(launch("nn-worker", "train.py", env=env))
    assert (code, "training" in output) == (0, True), output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["result"] == {"auc": 1} and summary["job"] == "once"
    code, output = result(launch("nn-worker", "train.py", env=env))
    assert (code, "training" in output) == (0, False)
    assert "this run is finished" in output and '"auc": 1' in output and "rm run/summary.json" in output
    code, output = result(launch("nn-worker", "train.py", env=env | {"PERSIA_JOB": "another"}))
    assert (code, "training" in output) == (0, True), "the folder holds the summary of another job"


def test_a_signal_after_the_summary_is_success(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import atexit, os, time\n"
        "def linger():\n    print('up', os.environ['RANK'], os.getpid(), flush=True)\n    time.sleep(600)\n"
        "atexit.register(linger)\n"
    )
    env = {"PERSIA_NATS_URL": "nats://127.0.0.1:1", "PERSIA_RUN_DIR": "run"}
    process = launch("nn-worker", "train.py", env=env)
    up(process, 1)
    process.send_signal(signal.SIGTERM)
    assert result(process)[0] == 0


def test_a_script_that_fails_leaves_no_summary(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    env = {"PERSIA_NATS_URL": "nats://127.0.0.1:1", "PERSIA_RUN_DIR": "run"}
    assert result(launch("nn-worker", "train.py", env=env))[0] == 3
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "ranks", "expected", "said"),
    [
        ("from persia import distributed\ndistributed.fail('ValueError: no')\n", 1, 75, "failed: ValueError: no"),
        ("pass\n", 2, 2, "of 2 ended without a TrainCtx"),
    ],
)
def test_a_script_that_ends_well_without_training_leaves_no_summary(
    launch: Launch, tmp_path: Path, script: str, ranks: int, expected: int, said: str
) -> None:
    """The script caught the error of its TrainCtx, or never had a TrainCtx, while other ranks depend on its rank."""
    (tmp_path / "train.py").write_text(script)
    env = {"PERSIA_NATS_URL": "nats://127.0.0.1:1", "PERSIA_RUN_DIR": "run"}
    code, output = result(launch("nn-worker", "train.py", "--nproc-per-node", ranks, env=env))
    assert (code, said in output) == (expected, True), output
    assert not (tmp_path / "run").exists()


def test_output_that_cannot_be_written_stops_no_program() -> None:
    """The disk may be full, or the pipe closed. The program continues, and the writes of later lines are tried."""
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            raise OSError(errno.ENOSPC, "no space")

    done = threading.Event()
    words = [sys.executable, "-u", "-c", "for n in range(50_000): print(n)"]
    process = Process("talker", words, env=os.environ, line=write, ended=lambda _: done.set())
    assert done.wait(60)
    assert process.code == 0 and lines[-1] == "49999"


@pytest.mark.parametrize("content", [None, "short", "x" * 4097])
def test_an_unusable_token_file_is_exit_code_5(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    """Servers exit with the same code if their token file is unusable."""
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("PERSIA_TOKEN_FILE", str(path))
    with pytest.raises(AuthError, match="token file .*token: .*; PERSIA_TOKEN_FILE sets its path") as caught:
        tokens.token("data")
    assert caught.value.exit_code == 5


def test_what_a_killed_up_left_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder that is left contains a secret. A folder in use is kept, regardless of its age."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, young, other = (tmp_path / name for name in ("persia-up-left", "persia-up-young", "persia-other"))
    for folder in (left, young, other):
        folder.mkdir()
        (folder / "token").touch()
    with private_folder() as used:
        for folder in (left, other, used):
            os.utime(folder, (0, 0))
        with private_folder() as second:
            assert sorted(tmp_path.iterdir()) == sorted([young, other, used, second])
    assert sorted(tmp_path.iterdir()) == [other, young]


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        ("print('cannot read nats.conf'); exit(3)", "; its last output:\n  cannot read nats.conf", "correct the cause"),
        ("exit(3)", "; it wrote no output", "check that the program runs: .*--version"),
    ],
)
def test_nats_that_does_not_start_is_reported_with_its_output(tmp_path: Path, code: str, said: str, hint: str) -> None:
    """The message has the output itself, because the folder with the log is removed after a test of one batch."""
    events = Events()
    process = Process("nats", [sys.executable, "-c", code], env=os.environ, line=lambda _: None, ended=events.ended)
    job = LocalJob("one", 1, 1, None, None, private_dir=tmp_path, state_dir=tmp_path)
    with pytest.raises(UnreachableError) as caught:
        job.nats_url(process)
    assert str(caught.value) == f"nats-server ended with exit code 3 before it listened{said}"
    assert re.match(hint, caught.value.hint) and "nats.log" not in caught.value.hint


def test_a_log_is_written_when_the_output_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with Logs(tmp_path) as logs, monkeypatch.context() as patch:
        broken = os.fdopen(writer, "w", buffering=1)  # both writing and closing fail
        patch.setattr(sys, "stdout", broken)
        write = logs.writer("part")
        write("one")
        write("two")
    with contextlib.suppress(BrokenPipeError):
        broken.close()
    assert (tmp_path / "part.log").read_text() == "one\ntwo\n"


def test_a_killed_launcher_of_data_compose_leaves_nothing(launch: Launch, tmp_path: Path) -> None:
    """The launcher records the rank 0 that it served in a file that is removed with it."""
    temporary, ran = tmp_path / "tmp", tmp_path / "ran"
    temporary.mkdir()
    (tmp_path / "send.py").write_text(
        "import os, pathlib, time\n"
        "note = pathlib.Path(os.environ['PERSIA_LAUNCHER_SERVED'])\n"
        "note.write_text('127.0.0.1:5')\n"
        "pathlib.Path('ran').write_text(note.read_text())\n"
        "time.sleep(600)\n"
    )
    variables = {"TMPDIR": str(temporary), "PERSIA_NATS_URL": "nats://127.0.0.1:1"}
    launcher = launch("data-loader", "send.py", env=variables)
    wait_until("the script", lambda: ran.exists() and ran.read_text() == "127.0.0.1:5", DEADLINE)
    launcher.kill()
    launcher.wait()
    assert not [*temporary.iterdir()]


SLOW = """import pathlib, time
pathlib.Path("importing").touch()
try:
    time.sleep(600)
except BaseException as error:
    raise ImportError("a C extension failed") from error
"""


@pytest.mark.parametrize(
    ("words", "number", "code", "said"),
    [
        (["persia.launch.rank_main", "train.py"], signal.SIGTERM, 75, "SIGTERM: leaving before the end of the run\n"),
        (["persia", "train", "persia.yml"], signal.SIGTERM, 75, "SIGTERM: ending; nothing has begun\n"),
        (["persia", "eval", "runs/one"], signal.SIGINT, 130, "Ctrl-C: ending; nothing has begun\n"),
    ],
)
def test_a_signal_in_an_import_is_one_line(
    tmp_path: Path, words: list[str], number: signal.Signals, code: int, said: str
) -> None:
    """PyTorch would turn an exception during its import into a long traceback and exit code 1."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SLOW)
    (tmp_path / "train.py").write_text("import torch\n")
    table = "data: {train: rows.parquet}\nfeatures: {user: {type: id, dim: 4}}\nlabels: {clicked: {}}\n"
    (tmp_path / "persia.yml").write_text(table)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_until("the import", lambda: (tmp_path / "importing").exists() or process.poll() is not None, DEADLINE)
        process.send_signal(number)
        _, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (code, said)


@pytest.mark.parametrize(
    ("finished", "options", "code"),
    [(False, [], 0), (False, ["--until-finished"], 75), (True, ["--until-finished"], 0)],
    ids=["service", "job", "finished job"],
)
def test_data_compose_of_a_kubernetes_job_ends_with_0_only_if_the_run_is_finished(
    launch: Launch, tmp_path: Path, finished: bool, options: list[str], code: int
) -> None:
    (tmp_path / "send.py").write_text("import pathlib, time\npathlib.Path('sends').touch()\ntime.sleep(600)\n")
    summary = tmp_path / "summary.json"
    summary.write_text('{"status": "finished", "job": "another"}')  # the summary of another job is ignored
    variables = {"PERSIA_NATS_URL": "nats://127.0.0.1:1", "PERSIA_RUN_DIR": str(tmp_path), "PERSIA_JOB": "one"}
    process = launch("data-loader", *options, "send.py", env=variables)
    wait_until("the script", (tmp_path / "sends").exists, DEADLINE)
    if finished:
        summary.write_text('{"status": "finished", "job": "one"}')
    process.terminate()
    assert result(process)[0] == code
    if finished:
        ended, output = result(launch("data-loader", "--until-finished", "send.py", env=variables))
        assert ended == 0 and f"this run is finished: {summary}" in output


def test_waiting_for_trainers_outlives_nats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.delenv("PERSIA_TOKEN_FILE", raising=False)
    events = Events()
    with events.signals():
        os.kill(os.getpid(), signal.SIGTERM)  # received after the first query, which fails
        assert wait_for_new_trainers(events, served="127.0.0.1:2") == signal.SIGTERM
    assert wait_for_new_trainers(events, served="127.0.0.1:2", over=lambda: True) is None


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    """``nohup persia doctor`` ignores the signal in this way."""
    code = "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert foreground.run([sys.executable, "-c", code], env=os.environ) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
