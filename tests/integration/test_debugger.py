"""The debugger of several ranks: real ranks, and a person who types on a pseudo-terminal."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from forking import fork_server
from stack import TESTS, MakeStack, Stack
from terminal import PROMPT, Terminal
from waiting import is_running, wait_until

from persia.debug import digest_files, ranks
from persia.runtime import job
from persia.utils import find_free_port

SCRIPT = ROOT / "tests" / "integration" / "debug_script.py"
SERVED = ROOT / "tests" / "integration" / "debug_served.py"
WAIT_S = 60.0
ENDS_S = 5.0
"""Seconds in which all ranks end after q."""
CREATED = r"\[\d+\.\d+\]counter_file created: (\S*/debug_counter_[0-9a-f]+_{}\.txt)"

Start = Callable[..., Terminal]


@pytest.fixture
def start(no_job: None, tmp_path: Path) -> Iterator[Start]:
    """Start a Python process on a terminal: ``start("-m", "persia", ...)``."""
    made: list[Terminal] = []

    def start_it(*argv: object, spares: int = 0, env: dict[str, str] | None = None) -> Terminal:
        path = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
        made.append(Terminal([*map(str, argv)], env=own, cwd=tmp_path, spares=spares))
        return made[-1]

    yield start_it
    for terminal in made:
        terminal.close()


def log_of(folder: Path, rank: int) -> str:
    """Return the output of a rank in the background."""
    path = folder / "logs" / f"rank-{rank}.log"
    return path.read_text() if path.exists() else ""


def says(folder: Path, rank: int, text: str) -> None:
    """Wait until a rank in the background has written a text."""
    wait_until(
        f"rank {rank} to say {text!r}",
        lambda: text in log_of(folder, rank),
        WAIT_S,
        evidence=lambda: log_of(folder, rank),
    )


def line_of(text: str, script: Path = SCRIPT) -> int:
    """Return the number of the line of the script that has this text."""
    return next(number for number, line in enumerate(script.read_text().splitlines(), 1) if text in line)


def pids_of(folder: Path) -> dict[int, int]:
    """Return the processes of the ranks that run in a folder."""
    return {entry.rank: entry.pid for entry in ranks.running() if entry.folder == str(folder)}


def stops(terminal: Terminal, number: int) -> Path:
    """Wait until the rank in the foreground stops at a breakpoint, and return the file of the breakpoint."""
    path = Path(terminal.expect(CREATED.format(number))[1])
    assert path.exists()
    terminal.expect(PROMPT)
    return path


@pytest.mark.row(
    "S2-02", "S2-03", "S2-05", "S2-06", "S2-07", "S2-08", "S2-09", "S2-10", "S2-11", "S2-12", "S2-13", "S2-14"
)
@pytest.mark.row("S2-17")
def test_a_person_debugs_one_of_two_ranks(start: Start, tmp_path: Path) -> None:
    for stale in ("debug_counter_0.txt", "debug_counter_deadbeef_0.txt", "debug_counter_deadbeef_1.txt"):
        (tmp_path / stale).write_text("{}")  # breakpoint files of crashed runs
    late, env = tmp_path / "late", {"BREAKPOINT_TMP_FILE_PATH": str(tmp_path)}
    arguments = ["tour", str(late), "--lr", "0.1"]
    command = ("-m", "persia", "debug", "run", "--rank", 1, "--nproc", 2, "--", SCRIPT, *arguments)
    terminal = start(*command, spares=2, env=env)
    terminal.expect(re.escape(f"[1] arguments {json.dumps(arguments)}"))
    the_commands_of_pdb_work(terminal, tmp_path)
    terminal.type("c\n")
    a_late_rank_is_waited_for(terminal, tmp_path, late)
    continuing_clears(terminal, tmp_path)
    leaving_the_frame_clears(terminal, tmp_path)
    stops(terminal, 4)
    terminal.command("p step", r"\b3\b")
    terminal.type("c\n")
    stops(terminal, 5)
    pids = pids_of(tmp_path)
    assert sorted(pids) == [0, 1]
    began = time.monotonic()
    terminal.type("q\n")
    wait_until("all ranks to end", lambda: not any(map(is_running, pids.values())), ENDS_S)
    assert terminal.wait() == 130
    assert time.monotonic() - began < 2 * ENDS_S
    assert "[0] six" not in log_of(tmp_path, 0) and "rank 1 ends all ranks (q)" in log_of(tmp_path, 0)
    left = {path.name for path in tmp_path.glob("debug_counter_*")}
    assert left == {"debug_counter_0.txt", "debug_counter_deadbeef_0.txt", "debug_counter_deadbeef_1.txt"}


def the_commands_of_pdb_work(terminal: Terminal, folder: Path) -> None:
    """The other rank continues, and waits at a collective for longer than the time limit that the script set."""
    stops(terminal, 0)
    assert "-> value = added(value)" in terminal.content
    says(folder, 0, "[0] one 42")
    began = time.monotonic()
    terminal.command("p value", r"\b40\b")
    terminal.command("w", r"debug_script\.py\(\d+\)one\(\)")
    terminal.command("l", r"breakpoint_\(\)")
    terminal.command("ll", r"def one\(")
    terminal.command("s", r"--Call--")
    terminal.command("u", r"-> value = added\(value\)")
    terminal.command("d", r"-> def added")
    terminal.command("r", r"--Return--")
    terminal.command("n", r"-> value \+= 1")
    terminal.command("p value", r"\b41\b")
    terminal.command("\x1b[A", r"\b41\b")  # the arrow key: the previous command
    terminal.command(f"b {line_of('say(f')}", r"Breakpoint 1 at")
    terminal.command("c", r"-> say\(f\"one")
    terminal.command("cl 1", r"Deleted breakpoint 1")
    stacks = ranks.stacks_of(next(entry for entry in ranks.running() if entry.pid == pids_of(folder)[0]))
    assert " in one\n" in stacks and " in barrier\n" in stacks, stacks
    wait_until("more than two limits of a collective", lambda: time.monotonic() - began > 2.5, 10)


def a_late_rank_is_waited_for(terminal: Terminal, folder: Path, late: Path) -> None:
    """The other rank waits for the breakpoint to be opened, then for it to be cleared."""
    says(folder, 0, "rank 0 waits at debug_script.py")
    late.touch()
    path = stops(terminal, 1)
    says(folder, 0, "waiting for clear_()")
    assert "[0] two" not in log_of(folder, 0)
    terminal.command("clear_()", r"counter_file cleared: \S+_1\.txt")
    assert not path.exists()
    says(folder, 0, "[0] two")
    terminal.type("c\n")


def continuing_clears(terminal: Terminal, folder: Path) -> None:
    """A person who forgets clear_() gets a message, and nothing hangs."""
    stops(terminal, 2)
    says(folder, 0, "debug_counter")
    assert "[0] three" not in log_of(folder, 0)
    terminal.type("c\n")
    terminal.expect(r"clear_\(\) was not called; the other ranks, which wait at debug_script\.py:\d+, continue now")
    says(folder, 0, "[0] three")


def leaving_the_frame_clears(terminal: Terminal, folder: Path) -> None:
    """With a breakpoint of pdb below, the other rank waits until the frame is left."""
    path = stops(terminal, 3)
    terminal.command(f"b {line_of('framed {later}')}", r"Breakpoint 2 at")
    terminal.command("c", r"the other ranks still wait at debug_script\.py:\d+, because clear_\(\) was not called")
    terminal.command("r", r"--Return--")
    assert path.exists() and "[0] framed" not in log_of(folder, 0)
    terminal.command("cl 2", r"Deleted breakpoint 2")
    terminal.command("n", r"-> say\(\"four\"\)")
    says(folder, 0, "[0] framed later")
    assert not path.exists()
    terminal.type("c\n")


@pytest.mark.row("S2-07", "S2-13", "S2-16")
def test_the_rank_that_fails_stops_at_its_error_and_the_others_are_held(start: Start, tmp_path: Path) -> None:
    env = {"BREAKPOINT_TMP_FILE_PATH": str(tmp_path), "RANK_TO_DEBUG": "3"}
    command = ("-m", "persia", "debug", "run", "--pm", "--rank", 1, "--nproc", 4, "--", SCRIPT, "failing")
    terminal = start(*command, spares=4, env=env)
    stops(terminal, 0)  # the option --rank overrides RANK_TO_DEBUG
    for rank in (0, 2, 3):
        says(tmp_path, rank, "waiting for clear_()")
    terminal.type("c\n")
    terminal.expect(r"ValueError: wrong depth 7")
    terminal.expect(r"rank 3 of 4 failed; the other ranks wait")
    terminal.expect(PROMPT)
    began = time.monotonic()
    terminal.command("p secret", r"'depth 7'")
    terminal.command("u", r"-> broken\(7\)")
    wait_until("more than the limit of a collective", lambda: time.monotonic() - began > 1.5, 10)
    assert sorted(pids_of(tmp_path)) == [0, 1, 2, 3]
    terminal.type("c\n")
    terminal.expect(r"rank 3 ended with exit code 1")
    assert terminal.wait() == 1


@pytest.mark.row("S2-15")
def test_a_crash_is_named_with_the_stacks_of_its_rank(start: Start, tmp_path: Path) -> None:
    command = ("-m", "persia", "debug", "run", "--rank", 1, "--nproc", 2, "--", SCRIPT, "crashing")
    terminal = start(*command, spares=2)
    terminal.expect(r"rank 0 was killed by SIGSEGV")
    terminal.expect(r"Fatal Python error: Segmentation fault")
    terminal.expect(rf'debug_script\.py", line {line_of("_sigsegv()")} in crashing')
    assert terminal.wait() == 128 + signal.SIGSEGV
    assert (tmp_path / "logs" / "rank-0.log").exists()


def test_ctrl_c_ends_all_ranks_and_at_a_prompt_none(start: Start, tmp_path: Path) -> None:
    env = {"BREAKPOINT_TMP_FILE_PATH": str(tmp_path)}
    terminal = start("-m", "persia", "debug", "run", "--nproc", 2, "--", SCRIPT, "endless", spares=2, env=env)
    stops(terminal, 0)
    prompting = psutil.Process(pids_of(tmp_path)[0])
    wait_until("the prompt to read", lambda: prompting.status() == psutil.STATUS_SLEEPING, 10)
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.expect(r"KeyboardInterrupt")
    terminal.command("p 6 * 7", r"\b42\b")
    terminal.type("c\n")
    terminal.expect(r"\[0\] endless")
    pids = pids_of(tmp_path)
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.wait() == 130
    assert not any(map(is_running, pids.values()))


@pytest.mark.row("S2-20")
def test_a_script_of_its_own_launcher_stops_too(start: Start, tmp_path: Path) -> None:
    env = {"BREAKPOINT_TMP_FILE_PATH": str(tmp_path), "RANK_TO_DEBUG": "1"}
    port = find_free_port()
    launcher = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        2,
        "--master-port",
        port,
        "--local-addr",
        "127.0.0.1",
    )
    terminal = start(*launcher, SCRIPT, "grouped", env=env)
    stops(terminal, 0)
    assert "[0] passed" not in terminal.content
    terminal.type("clear_()\n")
    terminal.expect_each(r"counter_file cleared", PROMPT, r"\[0\] passed")  # two processes share the terminal
    terminal.type("c\n")
    terminal.expect(r"\[1\] passed")
    assert terminal.wait() == 0


@pytest.mark.row("S2-05", "S2-17")
def test_digests_of_every_second_step(start: Start, tmp_path: Path) -> None:
    command = ("-m", "persia", "debug", "digest", "--every", 2, "--out", "digest", "--", SCRIPT, "recorded")
    assert start(*command, spares=1).wait() == 0
    lines = (tmp_path / "digest" / "rank-0.csv").read_text().splitlines()
    assert lines[0] == "step,name,md5,norm" and [line.split(",")[0::3] for line in lines[1:]] == [
        ["2", f"{8**0.5:.9g}"],
        ["4", f"{32**0.5:.9g}"],
    ]


@pytest.mark.row("S2-20")
def test_one_process_without_a_launcher_stops(start: Start, tmp_path: Path) -> None:
    terminal = start(SCRIPT, "plain", env={"BREAKPOINT_TMP_FILE_PATH": str(tmp_path)})
    stops(terminal, 0)
    terminal.command("n", r"-> breakpoint_\(False\)")
    terminal.type("c\n")
    stops(terminal, 1)
    terminal.type("c\n")
    terminal.expect(r"\[0\] second")
    assert terminal.wait() == 0
    assert not list(tmp_path.glob("debug_counter_*"))


def test_without_a_terminal_no_rank_stops_and_none_waits(no_job: None, tmp_path: Path) -> None:
    path = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "BREAKPOINT_TMP_FILE_PATH": str(tmp_path)}
    output = tmp_path / "output"
    argv = ["-m", "persia", "debug", "run", "--nproc", "2", "--", str(SCRIPT), "grouped"]
    with output.open("wb") as file, Path(os.devnull).open("rb") as nothing:
        fds = (nothing.fileno(), file.fileno(), file.fileno())
        process = fork_server().start(argv, env, str(tmp_path), fds, spares=2)
    wait_until("the ranks to end", lambda: process.poll() is not None, WAIT_S, evidence=output.read_text)
    assert process.poll() == 0, output.read_text()
    assert "rank 0 has no terminal, so no rank stops; next: persia debug run" in output.read_text()
    assert "[0] passed" in output.read_text() and "[1] passed" in log_of(tmp_path, 1)


def test_ranks_on_two_hosts_share_breakpoints_by_the_store(start: Start, tmp_path: Path) -> None:
    """Two launchers with one rank each represent two hosts. They share no folder."""
    port = find_free_port()
    terminals = []
    for node in range(2):
        (folder := tmp_path / f"host-{node}").mkdir()
        launcher = ("--nnodes", 2, "--node-rank", node, "--nproc-per-node", 1, "--master-addr", "127.0.0.1")
        words = ("torchrun", *launcher, "--master-port", port, SCRIPT, "grouped")
        env = {"BREAKPOINT_TMP_FILE_PATH": str(folder)}
        logs = ("--logs", folder / "logs")
        terminals.append(start("-m", "persia", "debug", "run", "--rank", 1, *logs, "--", *words, spares=1, env=env))
    terminals[1].expect(r"counter_file created: debug_counter_0 in the store of the process group")
    terminals[1].expect(PROMPT)
    says(tmp_path / "host-0", 0, "waiting for clear_()")
    assert "[0] passed" not in log_of(tmp_path / "host-0", 0)
    terminals[1].command("clear_()", r"counter_file cleared")
    says(tmp_path / "host-0", 0, "[0] passed")
    terminals[1].type("c\n")
    assert [terminal.wait() for terminal in terminals] == [0, 0]


@pytest.mark.row("S2-14", "S2-16", "S2-18", "S2-23")
def test_with_servers_no_limit_of_persia_ends_a_rank(make_stack: MakeStack, start: Start, tmp_path: Path) -> None:
    stack = make_stack()
    limits = {"PERSIA_HANG_TIMEOUT": "2", "PERSIA_RPC_TIMEOUT": "2", "PERSIA_DIGEST": "1"}
    env = {**stack.python_env, **limits, "BREAKPOINT_TMP_FILE_PATH": str(tmp_path)}
    terminal = start(*("-m", "persia", "debug", "run", "--rank", 1, "--nproc", 2, "--", SERVED), spares=2, env=env)
    stops(terminal, 0)
    began = time.monotonic()
    says(tmp_path, 0, "rank 0 has reached its staleness limit of 4")
    wait_until("the limit of a step in a collective, which is doubled", lambda: time.monotonic() - began > 5, 20)
    terminal.type("c\n")
    stops(terminal, 1)  # in a reproducible run, the server waits for this rank
    says(tmp_path, 0, "its staleness limit of 1")
    terminal.type("c\n")
    assert terminal.wait() == 0, f"{terminal.content}\n{log_of(tmp_path, 0)}"
    ended_well(stack)
    an_error_is_examined_before_the_others_know(start, tmp_path, env)


def an_error_is_examined_before_the_others_know(start: Start, folder: Path, env: dict[str, str]) -> None:
    """The failed rank stops at the prompt inside its context, so the other rank gets no message of the failure."""
    command = ("-m", "persia", "debug", "run", "--pm", "--nproc", 2, "--", SERVED, "fails")
    terminal = start(*command, spares=2, env={**env, "RANK_TO_DEBUG": "0"})
    terminal.expect(r"ValueError: as the test wants")
    terminal.expect(r"rank 1 of 2 failed; the other ranks wait")
    terminal.expect(PROMPT)
    began = time.monotonic()
    terminal.command("p number", r"\b3\b")
    wait_until("the doubled limit of a step", lambda: time.monotonic() - began > 5, 20)
    assert "is gone" not in terminal.content and sorted(pids_of(folder)) == [0, 1]
    pids = pids_of(folder)
    terminal.type("q\n")
    assert terminal.wait() == 130
    assert not any(map(is_running, pids.values())) and "is gone" not in terminal.content


def ended_well(stack: Stack) -> None:
    """The run is finished, and model and gradients were equal on both ranks in every step."""
    summary = job.finished_summary(stack.folder / "run")
    assert summary is not None and summary["steps"] == 16
    files = [stack.folder / "run" / "digest" / f"rank-{rank}.csv" for rank in range(2)]
    compared = digest_files.diff(*files)
    assert compared.first is None and compared.shared_only and compared.tensors == 16 * 8
    names = {name for _, name in digest_files._read(files[0], shared_only=False)}
    assert {"lookup/a", "push/a", "dense/0", "label/0", "loss"} < names
