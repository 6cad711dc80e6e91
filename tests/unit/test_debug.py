"""The parts of the debugger: records, the clock, commands, stacks, editors."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest
import typer
from conftest import ROOT
from forking import fork_server
from typer.core import TyperGroup
from typer.testing import CliRunner
from waiting import wait_until

from persia.cli.debug import app
from persia.debug import attach, gate, ranks
from persia.debug import breakpoint as breakpoints
from persia.distributed import handshake
from persia.errors import UnreachableError, UsageError, WaitTimeoutError
from persia.launch.debug_command import Script, script_of
from persia.logger import get_default_logger
from persia.runtime import clock, watchdog

LAUNCH = ROOT / "launch"


def test_no_limit_runs_while_the_clock_is_stopped() -> None:
    watchdog.progress()
    before = clock.now()
    clock.stop("a")
    clock.stop("b")
    threading.Event().wait(1.0)
    clock.go("a")
    assert clock.now() - before < 0.9 and watchdog.stalled(0.9) is None
    clock.go("b")
    clock.go("b")
    threading.Event().wait(0.05)
    assert clock.now() - before >= 0.05 and watchdog.stalled(0.04) is not None


def test_a_wait_is_repeated_only_if_the_clock_stood_still() -> None:
    calls: list[float] = []

    def wait() -> str:
        calls.append(clock.now())
        threading.Event().wait(0.05)
        if len(calls) < 3:
            raise WaitTimeoutError("late")
        return "there"

    clock.stop("test")
    try:
        assert clock.patiently(wait, 0.04) == "there"
    finally:
        clock.go("test")
    calls.clear()
    with pytest.raises(WaitTimeoutError):
        clock.patiently(wait, 0.04)
    assert len(calls) == 1


@pytest.mark.row("S2-14")
def test_rank_0_waits_for_one_that_is_stopped_before_its_start() -> None:
    me = handshake.Introduction("job", 0, 2, "1", "host", os.getpid(), "")
    failed: list[BaseException] = []

    def host() -> None:
        try:
            handshake.host(handshake.listen("127.0.0.1"), me, 0.1)
        except UnreachableError as error:
            failed.append(error)

    clock.stop("test")
    try:
        (thread := threading.Thread(target=host)).start()
        thread.join(1.5)
        assert thread.is_alive() and not failed
    finally:
        clock.go("test")
    thread.join(10)
    assert "rank 1 of 2 did not connect within 0.1 s" in str(failed)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gate.FileGate:
    """Breakpoint records in a folder of the test."""
    monkeypatch.setenv("BREAKPOINT_TMP_FILE_PATH", str(tmp_path))
    return gate.FileGate("run")


@pytest.mark.row("S2-10")
def test_records_of_other_runs_and_links_do_not_count(files: gate.FileGate, tmp_path: Path) -> None:
    files.put("0", {"site": "a.py:1"})
    assert files.get("0") == {"site": "a.py:1", "pid": os.getpid()}
    assert gate.FileGate("other").get("0") is None
    assert (tmp_path / "debug_counter_run_0.txt").stat().st_mode & 0o077 == 0
    (tmp_path / "debug_counter_run_1.txt").symlink_to(tmp_path / "debug_counter_run_0.txt")
    assert files.get("1") is None
    (tmp_path / "debug_counter_run_2.txt").write_text("half a rec")
    assert files.get("2") is None
    files.remove("0")
    assert files.get("0") is None


def test_the_ranks_of_one_launcher_share_a_name_and_those_of_another_do_not() -> None:
    ranks_of = {"WORLD_SIZE": "2"}
    assert gate.run_name(ranks_of) == gate.run_name({**ranks_of, "RANK": "1"})
    assert gate.run_name(ranks_of) != gate.run_name({**ranks_of, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert gate.run_name(ranks_of) != gate.run_name({})
    assert gate.run_name({gate.RUN: "given"}) == "given"


def test_persia_debug_clear_removes_open_breakpoints_only(files: gate.FileGate, tmp_path: Path) -> None:
    files.put("0", {})
    files.put("rank-1", {})
    done = CliRunner().invoke(app, ["clear"])
    assert "debug_counter_run_0.txt" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["debug_counter_run_rank-1.txt"]
    assert "no breakpoint is open" in CliRunner().invoke(app, ["clear"]).output


def test_files_of_runs_that_were_killed_are_removed_after_a_day(files: gate.FileGate, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name, pid, age in (("old", ended.pid, 90_000), ("young", ended.pid, 0), ("runs", os.getpid(), 90_000)):
        path = tmp_path / f"debug_counter_{name}_rank-0.txt"
        path.write_text(json.dumps({"pid": pid}))
        os.utime(path, (time.time() - age,) * 2)
    gate.sweep()
    assert {path.name.split("_")[2] for path in tmp_path.iterdir()} == {"young", "runs"}


@pytest.mark.clone
@pytest.mark.row("S2-21")
def test_the_page_has_the_states_and_commands_that_exist() -> None:
    page = (ROOT / "docs" / "debug-breakpoint.md").read_text()
    states = "".join(re.findall(r"```mermaid\n(.*?)```", page, re.DOTALL))
    for transition in ("breakpoint_(False), file N is created", "c, file N is removed", "waiting --> running: file N"):
        assert transition in states
    lines = [line.partition("#")[0].split() for line in page.splitlines() if line.startswith("persia debug ")]
    assert len(lines) > 5
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for _, _, name, *words in lines:
        command = group.commands[name]
        command.make_context(name, list(words), resilient_parsing=False)


@pytest.mark.row("S2-04")
@pytest.mark.parametrize("text", ["2", "-1", "one"])
def test_a_rank_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_TO_DEBUG", text)
    with pytest.raises(UsageError, match=r"RANK_TO_DEBUG.*expected a rank from 0 to 1"):
        breakpoints.rank_to_debug(2)


@pytest.mark.row("S2-04")
def test_the_option_wins_over_the_variable_and_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK_TO_DEBUG", "1")
    wrong = CliRunner().invoke(app, ["run", "--rank", "2", "--nproc", "2", "--", "train.py"])
    assert isinstance(wrong.exception, UsageError)
    assert str(wrong.exception) == "rank 2 does not exist: expected a rank from 0 to 1"
    assert wrong.exception.hint is not None and "--nproc 3" in wrong.exception.hint
    of_variable = CliRunner().invoke(app, ["run", "--nproc", "1", "--", "train.py"])
    assert isinstance(of_variable.exception, UsageError)
    assert str(of_variable.exception) == "rank 1 does not exist: expected a rank from 0 to 0"


@pytest.mark.parametrize(
    ("record", "warning"),
    [
        ({"passed": 1, "sites": {"0": "a.py:1"}}, None),
        (
            {"passed": 1, "sites": {"0": "c.py:9"}},
            "call 0 of breakpoint_, counted from 0, is at c.py:9 on rank 0 and at a.py:1 on rank 1",
        ),
        ({"passed": 0, "sites": {}, "pid": 0}, "rank 0 has ended without stopping there; rank 1 continues"),
    ],
    ids=["passed", "another call", "ended"],
)
def test_a_rank_that_waits_for_what_never_comes_runs_on_with_a_warning(
    files: gate.FileGate, tmp_path: Path, record: dict[str, Any], warning: str | None
) -> None:
    session = breakpoints.Session()
    session.rank, session.world_size, session.gate = 1, 2, files
    (tmp_path / "debug_counter_run_rank-0.txt").write_text(json.dumps({"stopped": "", "pid": os.getpid(), **record}))
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = get_default_logger()
    logger.addHandler(handler)
    try:
        session._wait(0, "a.py:1")
    finally:
        logger.removeHandler(handler)
    assert [warning in text for text in found] == [True] if warning else not found


def test_a_condition_as_text_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a condition"):
        breakpoints.breakpoint_(when="loss > 3")


@pytest.mark.row("S2-01", "S2-02")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py --rank 3", Script(["train.py", "--rank", "3"], 3)),
        ("python -u train.py a", Script(["train.py", "a"], 3)),
        ("-m train -m", Script(["-m", "train", "-m"], 3)),
        ("torchrun --nproc_per_node 4 train.py --nproc_per_node 7", Script(["train.py", "--nproc_per_node", "7"], 4)),
        ("python -m torch.distributed.run --nproc-per-node=2 -m train x", Script(["-m", "train", "x"], 2)),
        (
            "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr h --master-port 9 train.py",
            Script(["train.py"], 2, 1, 2, "h", 9),
        ),
    ],
)
def test_the_script_of_a_command(words: str, expected: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert script_of(words.split(), rank=2, ranks=None) == expected


@pytest.mark.parametrize("words", ["", "no.py", "-m", "torchrun --nproc-per-node auto train.py"])
def test_a_command_without_a_script_is_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        script_of(words.split(), rank=0, ranks=None)


@pytest.mark.clone
@pytest.mark.row("S2-01", "S2-02")
@pytest.mark.parametrize("file", ["dist_debug.sh", "dist_debug_pt.sh"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_two_lines_in_a_launch_script_start_the_debugger(tmp_path: Path, file: str, wrapped: bool) -> None:
    persia = tmp_path / "persia"
    persia.write_text('#!/bin/sh\nfor word; do printf "%s|" "$word"; done\nexit 7\n')
    persia.chmod(0o755)
    launch = "torchrun --nproc_per_node 2 train.py --name 'a b'"
    lines = ["NPUS_PER_NODE=2", "RANK_TO_DEBUG=1"]
    if wrapped:
        lines += ["run_pretrain() { python train.py --name 'a b'; }", f"source {LAUNCH / file}", "exit"]
    else:
        lines += [f"source {LAUNCH / file}"]
    script = tmp_path / "launch.sh"
    script.write_text("\n".join([*lines, launch]) + "\n")
    bash = shutil.which("bash")
    assert bash is not None
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([bash, str(script)], env={"PATH": path}, capture_output=True, text=True, check=False)
    expected = (
        "debug|run|--rank|1|--nproc|2|--|train.py|--name|a b|"
        if wrapped
        else "debug|run|--rank|1|--|torchrun|--nproc_per_node|2|train.py|--name|a b|"
    )
    assert (done.stdout, done.returncode) == (expected, 7), done.stderr


RANK = """
import sys, threading
from persia.debug import breakpoint_
breakpoint_()
sys.stdout.write("running\\n")
sys.stdout.flush()
def wait_here():
    threading.Event().wait()
wait_here()
"""


@pytest.fixture
def rank(tmp_path: Path, no_job: None) -> Iterator[ranks.Rank]:
    """Start a rank that has passed a breakpoint."""
    yield from started(tmp_path, RANK)


def started(tmp_path: Path, script: str) -> Iterator[ranks.Rank]:
    """Start a rank, which writes ``running`` and waits."""
    (tmp_path / "rank.py").write_text(script)
    env = {**os.environ, "BREAKPOINT_TMP_FILE_PATH": str(tmp_path)}
    output = tmp_path / "output"
    with output.open("wb") as file, Path(os.devnull).open("rb") as nothing:
        fds = (nothing.fileno(), file.fileno(), file.fileno())
        process = fork_server().start(["rank.py"], env, str(tmp_path), fds)
    wait_until("the rank to run", lambda: "running\n" in output.read_text(), 60, evidence=output.read_text)
    yield next(entry for entry in ranks.running() if entry.pid == process.pid)
    assert process.poll() is None, "it runs on"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.row("S2-15")
def test_the_stacks_of_a_running_rank(rank: ranks.Rank) -> None:
    for _ in range(2):
        done = CliRunner().invoke(app, ["stacks", "--pid", str(rank.pid)])
        assert ", line 8 in wait_here\n" in done.output and rank.title in done.output
    with pytest.raises(UnreachableError, match="no rank with --rank 77 runs on this host"):
        raise_of(CliRunner().invoke(app, ["stacks", "--rank", "77"]))


HOLDS_THE_GIL = """\
import ctypes, sys
from persia.debug import ranks
ranks.register(0, 1)
def native():
    while True:
        ctypes.PyDLL(None).sleep(600)
print("running", flush=True)
native()
"""


@pytest.mark.row("S2-15")
def test_stacks_are_printed_without_a_signal_which_could_end_a_rank_whose_threads_run(
    rank: ranks.Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faulthandler reads the frames of running threads. About 1,000 signals crashed a process with two threads."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", lambda pid, number: pytest.fail(f"signal {number} was sent to {pid}"))
        assert ", line 8 in wait_here\n" in ranks.stacks_of(rank)


@pytest.mark.row("S2-15")
def test_the_stacks_of_a_rank_whose_native_code_holds_the_gil(
    tmp_path: Path, no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_ANSWER_S", 1.0)
    for entry in started(tmp_path, HOLDS_THE_GIL):
        assert "in native" in ranks.stacks_of(entry)
        os.kill(entry.pid, signal.SIGSTOP)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "py-spy is not installed" in ranks.stacks_of(entry), "a stopped rank gets no signal"
        os.kill(entry.pid, signal.SIGCONT)


@pytest.mark.row("S2-22")
def test_a_rank_without_a_debugger_accepts_no_editor(tmp_path: Path, no_job: None) -> None:
    breaks, registers = "import breakpoint_\nbreakpoint_()", "import ranks\nranks.register(0, 1)"
    script = RANK.replace(breaks, registers)
    assert script != RANK
    for entry in started(tmp_path, script):
        with pytest.raises(UsageError, match="cannot attach an editor, because no debugger runs in rank 0 of 1"):
            raise_of(CliRunner().invoke(app, ["attach", "--pid", str(entry.pid)]))
        assert "in wait_here" in ranks.stacks_of(entry)


@pytest.mark.row("S2-22")
def test_without_debugpy_the_command_says_what_to_install(rank: ranks.Rank, tmp_path: Path) -> None:
    (tmp_path / "debugpy.py").write_text("raise ImportError('as if it were not installed')")  # next to the script
    with pytest.raises(UsageError, match="debugpy is not installed") as caught:
        attach.ask(rank, 0, 10)
    assert caught.value.hint == "pip install 'persia[debug]'"


@pytest.mark.row("S2-22")
def test_an_editor_is_attached_to_a_running_rank(rank: ranks.Rank, tmp_path: Path) -> None:
    pytest.importorskip("debugpy")
    port = free_port()
    done = CliRunner().invoke(app, ["attach", "--pid", str(rank.pid), "--port", str(port), "--timeout", "1"])
    assert isinstance(done.exception, UnreachableError) and "no editor was attached" in str(done.exception)
    configuration = json.loads(done.stdout)["configurations"][0]
    assert configuration["connect"] == {"host": "127.0.0.1", "port": port}
    assert configuration["pathMappings"] == [{"localRoot": "${workspaceFolder}", "remoteRoot": str(tmp_path)}]
    assert listeners(port) == {"127.0.0.1"}
    assert attach.ask(rank, port, 30) == port
    with socket.create_connection(("127.0.0.1", port), timeout=30) as editor, editor.makefile("rb") as answers:
        for command, arguments in (("initialize", {"adapterID": "test"}), ("attach", configuration)):
            ask_adapter(editor, command, arguments)
        wait_until("the adapter to be ready", lambda: next_message(answers).get("event") == "initialized", 30)
        ask_adapter(editor, "configurationDone", {})
        attach.wait_for_client(rank, 30)
        path = next(tmp_path.glob("debug_counter_*_rank-0.txt"))
        wait_until("clocks to stand still", lambda: json.loads(path.read_text())["stopped"] == "an editor", 30)
    wait_until("clocks to run", lambda: not json.loads(path.read_text())["stopped"], 30)


def ask_adapter(editor: socket.socket, command: str, arguments: object) -> None:
    """Send a request of the debug adapter protocol."""
    body = json.dumps({"seq": 1, "type": "request", "command": command, "arguments": arguments}).encode()
    editor.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))


def next_message(answers: BinaryIO) -> dict[str, Any]:
    """Return the next message of the debug adapter."""
    length = int(answers.readline().partition(b":")[2])
    assert answers.readline() == b"\r\n"
    message: dict[str, Any] = json.loads(answers.read(length))
    return message


@pytest.mark.row("S2-15")
def test_the_stacks_of_a_rank_that_did_not_register_come_from_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import threading; threading.Event().wait()"],
        env={**os.environ, "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
    )
    try:
        found = lambda: next((entry for entry in ranks.running() if entry.pid == process.pid), None)  # noqa: E731
        entry = wait_until("the rank to be found", found, 30)
        assert (entry.rank, entry.world_size, entry.registered) == (3, 4, False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "py-spy is not installed" in ranks.stacks_of(entry)
        (program := tmp_path / "py-spy").write_text('#!/bin/sh\necho "stacks: $*"\n')
        program.chmod(0o755)
        assert ranks.stacks_of(entry) == f"stacks: dump --pid {process.pid}\n"
        assert process.poll() is None, "it runs on"
    finally:
        process.kill()
        process.wait()


def raise_of(result: object) -> None:
    """Raise the exception of a command."""
    error = getattr(result, "exception", None)
    assert error is not None
    raise error


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def listeners(port: int) -> set[str]:
    """Return the addresses at which a port listens."""
    listening = [each.laddr for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr]
    return {address.ip for address in listening if address.port == port}


def test_the_folder_of_running_ranks_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.debug.ranks.tempfile.gettempdir", lambda: str(tmp_path))
    path = ranks.folder()
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o755)
    with pytest.raises(Exception, match="register: expected a folder that only this user can access"):
        ranks.folder()


def test_the_command_line_needs_no_torch() -> None:
    code = "import sys; from persia.launch import debug_run, debug_command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
