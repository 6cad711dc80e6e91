"""``persia train --follow``: training in the background, whose output is shown. Ctrl-C leaves it running."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from terminal import Terminal
from waiting import is_running, wait_until

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from trainer_files import write_clicks, write_config

WORDS = ("-m", "persia", "train", "persia.yml", "-f")
STARTED = r"training in the background: pid (\d+), output in (\S+)"


pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Path]:
    """A file. While it exists, training waits in its first step."""
    path = tmp_path / "hold"
    (tmp_path / "mine.py").write_text(
        "import os, time, torch\nclass Mine(torch.nn.Module):\n    def __init__(self, num_dense, embedding_dims):\n"
        "        super().__init__()\n        self.top = torch.nn.Linear(num_dense + sum(embedding_dims), 1)\n"
        f"    def forward(self, dense, embeddings):\n        while os.path.exists({str(path)!r}):\n"
        f"            open({str(tmp_path / 'held')!r}, 'w').close()\n            time.sleep(0.05)\n"
        "        return self.top(torch.cat([*dense, *embeddings], 1))\n"
    )
    write_clicks(tmp_path / "clicks.parquet", 600)
    write_config(tmp_path, model={"class": "mine:Mine"}, run={"dir": "runs"})
    path.touch()
    yield path
    path.unlink(missing_ok=True)  # this also ends processes that a failed test has left


def status(folder: Path) -> str:
    return str(json.loads((folder / "runs" / "one" / "summary.json").read_text())["status"])


@pytest.mark.row("S1-20")
def test_its_output_is_shown_until_its_end(tmp_path: Path, hold: Path) -> None:
    hold.unlink()
    done = subprocess.run([sys.executable, *WORDS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(STARTED, done.stderr)
    assert found is not None and done.stdout == (tmp_path / found[2]).read_text()
    assert "AUC" in done.stdout and done.stdout.splitlines()[-1] == "runs/one" and status(tmp_path) == "finished"
    (tmp_path / "persia.yml").write_text("data: {train: 5}\n")
    wrong = subprocess.run([sys.executable, *WORDS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "persia config check" in wrong.stderr and "background" not in wrong.stderr


@pytest.mark.row("S1-20")
def test_ctrl_c_asks_and_leaves_it_running(tmp_path: Path, hold: Path) -> None:
    terminal = Terminal(WORDS, env=os.environ, cwd=tmp_path)
    pid = int(terminal.expect(STARTED)[1])
    wait_until("the first step", (tmp_path / "held").exists, 90, evidence=lambda: terminal.content)
    os.kill(terminal.process.pid, signal.SIGINT)  # on Ctrl-C, the terminal sends the signal to the follower only
    terminal.expect(r"training continues in the background\. End it\? \[y/N\] ")
    terminal.type("\n")
    command = terminal.expect(r"to follow it: (tail .*\.log)\n")[1]
    terminal.expect(rf"to end it: kill -INT {pid}\n")
    assert terminal.wait() == 130
    terminal.close()  # like closing the window of the terminal
    assert is_running(pid) and os.getsid(pid) == pid, "the session of the window ends, its own does not"
    hold.unlink()
    words = shlex.split(command)
    output = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "runs/one" and status(tmp_path) == "finished"


@pytest.mark.row("S1-20")
def test_ctrl_c_ends_it_if_that_is_the_answer(tmp_path: Path, hold: Path) -> None:
    terminal = Terminal(WORDS, env=os.environ, cwd=tmp_path)
    pid = int(terminal.expect(STARTED)[1])
    wait_until("the first step", (tmp_path / "held").exists, 90, evidence=lambda: terminal.content)
    os.kill(terminal.process.pid, signal.SIGINT)  # on Ctrl-C, the terminal sends the signal to the follower only
    terminal.expect(r"End it\? \[y/N\] ")
    terminal.type("y\n")
    assert terminal.wait() == 130, terminal.content
    terminal.close()
    assert not is_running(pid) and status(tmp_path) == "interrupted"


@pytest.mark.row("S1-20")
def test_without_a_terminal_a_signal_leaves_it_running(tmp_path: Path, hold: Path) -> None:
    words = [sys.executable, *WORDS]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stderr is not None
        found = re.search(STARTED, follower.stderr.readline())
        assert found is not None
        follower.send_signal(signal.SIGINT)
        assert follower.wait(60) == 130 and "End it?" not in (said := follower.stderr.read())
    assert f"kill -INT {found[1]}" in said and is_running(int(found[1]))
    wait_until("the first step", (tmp_path / "held").exists, 90)
    os.kill(int(found[1]), signal.SIGINT)
    wait_until("its end", lambda: not is_running(int(found[1])), 60)
    assert status(tmp_path) == "interrupted"


@pytest.mark.row("S1-20")
def test_a_reader_that_ends_leaves_it_running(tmp_path: Path, hold: Path) -> None:
    """The reader of the output ends, as in ``persia train --follow | head``."""
    words = [sys.executable, *WORDS]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stderr is not None and follower.stdout is not None
        follower.stdout.close()
        found = re.search(STARTED, follower.stderr.readline())
        assert found is not None
        hold.unlink()
        assert follower.wait(120) == 130
        said = follower.stderr.read()
    assert f"training continues: pid {found[1]}" in said and "BrokenPipe" not in said
    wait_until("its end", lambda: not is_running(int(found[1])), 60)
    assert status(tmp_path) == "finished"
