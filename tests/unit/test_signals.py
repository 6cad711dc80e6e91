"""Signals that end a process: its temporary folders are removed first."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LADDER = """
import os, signal
from pathlib import Path
from persia.cli import doctor_views
from persia.doctor import ladder

ladder.steps = lambda path, ranks: [ladder.Step(number, "a step", ("python", "-c", "")) for number in (1, 2)]
show = doctor_views._show_result

def stopped(result):
    show(result)
    os.kill(os.getpid(), signal.SIGTERM)

doctor_views._show_result = stopped
doctor_views.ladder(Path("persia.yml"), until=10, nproc=None)
"""
NOHUP = """
import os, signal
from persia.runtime import signals

signal.signal(signal.SIGHUP, signal.SIG_IGN)
with signals.cleaned_up():
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on")
    os.kill(os.getpid(), signal.SIGTERM)
"""


def run(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)


def test_a_ladder_that_is_stopped_between_two_steps_leaves_nothing(tmp_path: Path) -> None:
    done = run(LADDER, tmp_path)
    assert done.returncode == 75, done.stderr
    assert done.stdout.count("✓") == 1 and not [*tmp_path.iterdir()]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    done = run(NOHUP, tmp_path)
    assert (done.returncode, done.stdout) == (75, "goes on\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_handlers_end_with_the_block(number: signal.Signals, tmp_path: Path) -> None:
    default = f"import os, signal\nsignal.signal({int(number)}, signal.SIG_DFL)\n"  # nohup ignores one
    block = f"{default}from persia.runtime import signals\nwith signals.cleaned_up():\n    pass\n"
    assert run(f"{block}os.kill(os.getpid(), {int(number)})", tmp_path).returncode == -number
