"""Processes of tests that run as forks: their state and their end. No fork outlives its parent."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forking
import psutil
import pytest
from conftest import ROOT
from forking import ForkServer, fork_server
from stack import TESTS, Part, start
from waiting import is_running, wait_until

from persia.launch.local_job import Command

FINDS = """
import json, os, pathlib, signal, sys, tempfile, threading
from pathlib import Path
def stream(one):
    kind = type(getattr(one, "buffer", None)).__name__
    return one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through, one.newlines, kind
def texts(file):
    return sorted(text for text in Path("/proc/self", file).read_text().split(chr(0)) if text)
links = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) <= 2}
print(json.dumps({
    "argv": (sys.argv, sys.orig_argv, sys.executable, sys.flags),
    "shown": (texts("cmdline"), texts("environ")),
    "env": sorted(os.environ.items()),
    "cwd": os.getcwd(),
    "path": sys.path,
    "main": (sorted(name for name in vars() if name.startswith("__")), __name__, __spec__ and __spec__.name),
    "file": vars().get("__file__"),
    "streams": [stream(one) for one in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__)],
    "fds": [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")],
    "links": {name: link.split(":")[0] for name, link in links.items()},
    "one pipe": links["1"] == links["2"],
    "leads": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
    "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "wakeup": signal.set_wakeup_fd(-1),
    "threads": (threading.active_count(), len(os.listdir("/proc/self/task"))),
    "temporary": tempfile.gettempdir(),
    "rest": (os.umask(0o22), [name for name in sys.modules if name.split(".")[0] in {"persia", "conftest"}]),
}, default=str))
"""
LOADED = "import sys\nprint('loaded' if 'torch' in sys.modules else 'not loaded')\n"
RANK = "import os, sys, time\nprint('process:', os.getpid(), flush=True)\ntime.sleep(60)\n"

STARTED: list[Part] = []
"""The processes that a test has started, which end with it."""


def python(*words: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Part:
    """Start Python. Scripts find the modules of the tests."""
    path = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    command = Command("child", [sys.executable, *map(str, words)], {**os.environ, "PYTHONPATH": path, **(env or {})})
    STARTED.append(start(command, cwd))
    return STARTED[-1]


def launch(script: Path, ranks: int) -> Part:
    """Start ranks that need no NATS."""
    words = ("-m", "persia.launch.cli", "nn-worker", "--nproc-per-node", str(ranks), script)
    return python(*words, env={"PERSIA_NATS_URL": ""})


def pids(part: Part, ranks: int) -> list[int]:
    """Wait for the ranks and return their process ids."""

    def found() -> list[int] | None:
        numbers = [int(line.split()[-1]) for line in list(part.lines) if "process: " in line]
        return numbers if len(numbers) == ranks else None

    return wait_until(f"{ranks} ranks", found, 30, evidence=lambda: part.output)


def wait_gone(*numbers: int) -> None:
    wait_until(f"processes {numbers} to end", lambda: not any(map(is_running, numbers)), 30)


@pytest.fixture(autouse=True)
def forked(no_job: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(forking, "WANTED", True)
    yield
    for part in STARTED:
        if part.process.running:
            part.process.signal(signal.SIGKILL)
            part.wait()
    STARTED.clear()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("how", ["file", "module", "command"])
def test_a_fork_finds_what_a_new_process_finds(
    how: str, unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "finds.py").write_text(FINDS)
    words = {"file": ["finds.py"], "module": ["-m", "finds"], "command": ["-c", FINDS]}[how]
    env = {"PYTHONUNBUFFERED": unbuffered, "NAME": "value é", "TMPDIR": str(tmp_path)}
    found = []
    for wanted in (True, False):
        monkeypatch.setattr(forking, "WANTED", wanted)
        part = python(*words, "--lr", "a b", env=env, cwd=tmp_path)
        assert part.wait() == 0, part.output
        found.append(json.loads(part.output))
    for name, value in found[1].items():
        assert found[0][name] == value, name


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(5)", 5),
        ("sys.exit('why')", 1),
        ("raise ValueError('mine')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.abort()", -signal.SIGABRT),
        ("atexit.register(os.abort)", -signal.SIGABRT),
        ("atexit.register(lambda: print('at exit'))", 0),
        ("threading.Timer(0.2, lambda: print('from a thread')).start()", 0),
        ("import torch; kept.append(torch.ones(2)); kept.append(Last())", 0),
    ],
)
def test_a_fork_ends_as_a_new_process_does(
    end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import atexit, os, signal, sys, threading\nkept = []\n"
        "class Last:\n    def __del__(self):\n        print('destroyed')\n"
        "for number in range(3):\n    print(number)\n    sys.stderr.write(f'error {number}\\n')\n" + end
    )
    (tmp_path / "ends.py").write_text(text)
    last = []
    for wanted in (True, False):
        monkeypatch.setattr(forking, "WANTED", wanted)
        part = python("ends.py", cwd=tmp_path)
        assert part.wait() == code, part.output
        assert part.lines[:6] == ["0", "error 0", "1", "error 1", "2", "error 2"]
        last.append(part.lines[6:][-1:])
    assert last[0] == last[1]


def test_signals_reach_a_fork_and_its_group() -> None:
    # Two processes share one pipe: each writes its line in one call, which `print` without a buffer does not.
    part = python("-c", "import os, time\nos.fork()\nos.write(1, b'process: %d\\n' % os.getpid())\ntime.sleep(60)")
    first, second = pids(part, 2)
    part.process.signal(signal.SIGSTOP)
    wait_until("both to stop", lambda: {psutil.Process(pid).status() for pid in (first, second)} == {"stopped"}, 30)
    assert part.process.running
    part.process.signal(signal.SIGCONT)
    part.process.signal(signal.SIGTERM)
    assert part.wait() == -signal.SIGTERM
    assert part.process.outcome() == "was killed by SIGTERM"
    wait_gone(first, second)


def test_a_process_that_reads_another_setting_at_its_start_is_no_fork(tmp_path: Path) -> None:
    (tmp_path / "loaded.py").write_text(LOADED)
    assert python(tmp_path / "loaded.py").says("loaded") == "loaded"
    assert python(tmp_path / "loaded.py", env={"OMP_NUM_THREADS": "3"}).says("loaded") == "not loaded"
    assert python("-X", "dev", tmp_path / "loaded.py").says("loaded") == "not loaded"


def test_ranks_are_children_of_their_launcher_and_forks_without_its_modules(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADED + "print(*[name for name in sys.modules if name.startswith('persia.launch')])\n" + RANK)
    part = launch(script, 2)
    ranks = [psutil.Process(pid) for pid in pids(part, 2)]
    launcher = part.process.pid
    assert {rank.ppid() for rank in ranks} == {launcher}
    assert {rank.environ()["RANK"] for rank in ranks} == {"0", "1"}
    for number, rank in enumerate(sorted(ranks, key=lambda rank: rank.environ()["RANK"])):
        assert "persia.launch.rank_main" in rank.cmdline()
        assert os.getsid(rank.pid) == rank.pid
        opened = {entry.name: entry.readlink().suffix for entry in Path(f"/proc/{rank.pid}/fd").iterdir()}
        assert {name for name, suffix in opened.items() if suffix not in (".stacks", ".request")} == {"0", "1", "2"}
        assert f"[rank {number}] loaded" in part.lines
    assert "persia.launch.rank_main" in psutil.Process(launcher).children()[0].cmdline()
    (modules,) = {line.split("] ")[1] for line in list(part.lines) if "persia.launch " in line}
    assert "persia.launch.user_script" in modules and "persia.launch.nn_worker" not in modules
    part.process.signal(signal.SIGKILL)
    assert part.wait() == -signal.SIGKILL
    wait_gone(*(rank.pid for rank in ranks))


def test_a_launcher_without_a_spare_left_starts_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "spares_of", lambda _: 1)
    script = tmp_path / "train.py"
    script.write_text(LOADED)
    part = launch(script, 2)
    assert part.wait() == 0, part.output
    assert sorted(part.lines) == ["[rank 0] loaded", "[rank 1] not loaded"]


def test_forks_do_not_share_random_numbers(tmp_path: Path) -> None:
    script = tmp_path / "random.py"
    script.write_text("import random, numpy\nprint(random.random(), numpy.random.rand())\n")
    found = []
    for _ in range(2):
        part = python(tmp_path / "random.py")
        assert part.wait() == 0, part.output
        found += part.output.split()
    assert len(set(found)) == 4


def test_the_server_has_one_thread_and_keeps_no_descriptor() -> None:
    server = fork_server().pid
    assert python("-c", "pass").wait() == 0
    before = len([*Path(f"/proc/{server}/fd").iterdir()])
    for _ in range(3):
        assert python("-c", "pass").wait() == 0
    assert len([*Path(f"/proc/{server}/fd").iterdir()]) == before
    assert len([*Path(f"/proc/{server}/task").iterdir()]) == 1
    assert not psutil.Process(server).children()


def test_a_process_with_threads_is_not_forked() -> None:
    text = (
        "import threading, forkserver\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "forkserver.fork()\n"
    )
    done = subprocess.run([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": TESTS}, capture_output=True)
    assert b"2 threads before a fork" in done.stderr, done.stderr


def test_nothing_outlives_the_process_that_started_the_server(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    text = (
        f"import sys, time\nsys.path[:0] = {[TESTS, str(ROOT / 'tests' / 'unit')]!r}\nfrom pathlib import Path\n"
        "from forking import fork_server\nfrom test_forkserver import launch, pids\n"
        f"part = launch(Path({str(tmp_path / 'train.py')!r}), 2)\n"
        "print(fork_server().pid, part.process.pid, *pids(part, 2), flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = [int(word) for word in process.stdout.readline().split()]
        assert len(found) == 4 and all(map(is_running, found))
        process.kill()
    wait_gone(*found)


def test_a_server_that_was_killed_is_told() -> None:
    server = ForkServer()
    try:
        child = server.start(["-c", "import time; time.sleep(60)"], dict(os.environ), str(ROOT), [0, 1, 2])
        os.kill(server.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        wait_gone(child.pid)
        with pytest.raises(RuntimeError, match="the fork server has ended"):
            server.start(["-c", "pass"], dict(os.environ), str(ROOT), [0, 1, 2])
    finally:
        server.close()
