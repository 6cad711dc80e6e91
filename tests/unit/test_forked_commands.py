"""Commands of tests that run as forks, started by ``subprocess`` or by shell scripts."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forking
import pytest
from forkwork import spares_of
from waiting import is_running, wait_until

LOADED = "import sys\nprint('loaded' if 'torch' in sys.modules else 'not loaded', *sys.argv[1:], flush=True)\n"
Sh = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "WANTED", True)


@pytest.fixture
def sh(commands: str, tmp_path: Path) -> Sh:
    """Start a script of a shell."""
    (tmp_path / "loaded.py").write_text(LOADED)

    def start(script: str) -> "subprocess.Popen[str]":
        env = {**os.environ, "PATH": commands}
        return subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.usefixtures("forks")
def test_popen_passes_streams_directory_and_environment(tmp_path: Path) -> None:
    code = LOADED + "import os\nsys.stderr.write(sys.stdin.read() + os.environ['NAME'] + os.getcwd())\nsys.exit(3)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, "a b"],
        cwd=tmp_path,
        env={**os.environ, "NAME": "value"},
        input="typed ",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "loaded a b\n", f"typed value{tmp_path}")


@pytest.mark.usefixtures("forks")
def test_popen_waits_and_signals() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        assert process.poll() is None
        process.terminate()
        assert process.wait(30) == process.poll() == -signal.SIGTERM
        process.kill()  # the process has ended


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("options", [{"env": {**os.environ, "OMP_NUM_THREADS": "3"}}, {"preexec_fn": os.getpid}])
def test_popen_starts_what_cannot_be_a_fork(options: dict[str, object]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], stdout=subprocess.PIPE, text=True, check=True, **options)  # type: ignore[call-overload]
    assert done.stdout == "not loaded\n"


def test_the_fork_server_does_not_end_with_the_thread_of_a_command(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fork of a test may be a command, whose thread then starts the fork server."""
    monkeypatch.setattr(forking, "_server", None)
    monkeypatch.setattr("atexit.register", lambda _: None)
    start: Sh = request.getfixturevalue("sh")
    out, _ = start("python loaded.py 1; python loaded.py 2; python loaded.py 3").communicate()
    assert out == "loaded 1\nloaded 2\nloaded 3\n"
    forking.fork_server().close()


def test_a_command_of_a_shell_is_a_fork(sh: Sh) -> None:
    out, _ = sh("python loaded.py 'a b' | cat; python -c 'exit(5)'; echo $?; python -X dev loaded.py").communicate()
    assert out == "loaded a b\n5\nnot loaded\n"
    out, _ = sh("persia --help > help; echo $?; cat help; python -c 'import os; os.abort()'; echo $?").communicate()
    assert out.startswith("0\n") and "persia [OPTIONS]" in out and out.endswith(f"\n{128 + signal.SIGABRT}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_for_a_command_is_for_its_fork(sh: Sh, number: int) -> None:
    script = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    with sh(f"exec python -c '{script}'") as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        assert fork != process.pid
        process.send_signal(number)
        assert process.wait(30) == -number
    wait_until("the fork to end", lambda: not is_running(fork), 30)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("-m persia.launch.cli nn-worker --nproc-per-node 3 train.py", 3),
        ("/bin/persia-launcher nn-worker train.py", 1),
        ("/bin/persia-launcher data-loader data.py", 2),
        ("/bin/persia up job.yml", 9),
        ("-m persia train persia.yml --nproc 2", 9),
        ("-m persia train persia.yml", 0),
        ("train.py up", 0),
    ],
)
def test_the_processes_that_a_command_starts(words: str, count: int) -> None:
    assert spares_of(words.split()) == count
