"""Errors of a script: first the cause and the user's lines, then the file with the traceback, and where to ask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Verb

SCRIPT = """\
import json

def read(text):
    try:
        return json.loads(text)
    except ValueError as error:
        raise RuntimeError("cannot read it") from error

def main():
    return read("{")

main()
"""


def rank(folder: Path, script: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "persia.launch.rank_main", "train.py"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.row("S1-26", "S1-27")
def test_the_cause_and_own_frames_come_first(tmp_path: Path) -> None:
    done = rank(tmp_path, SCRIPT)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "error: RuntimeError: cannot read it"
    assert lines[1].startswith("cause: json.decoder.JSONDecodeError: Expecting property name")
    assert lines[2] == "  at train.py:5 in read: return json.loads(text)"
    assert len(lines) <= 6 and "Traceback" not in done.stderr
    whole = Path(next(line for line in lines if line.startswith("whole traceback: ")).partition(": ")[2])
    assert "json/decoder.py" in whole.read_text() and 'train.py", line 12' in whole.read_text()
    assert lines[-1].startswith("help:  the page Troubleshooting ") and "persia doctor --env" in lines[-1]


@pytest.mark.row("S1-26")
def test_debug_shows_all(tmp_path: Path) -> None:
    done = rank(tmp_path, SCRIPT, LOG_LEVEL="DEBUG")
    assert "Traceback (most recent call last)" in done.stderr and "json/decoder.py" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("help:")


def test_an_error_of_persia_names_the_line_of_the_script(tmp_path: Path) -> None:
    done = rank(tmp_path, "from persia.embedding.optim import Adagrad\n\nAdagrad(lr=-1)\n")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "  at train.py:3 in <module>: Adagrad(lr=-1)" in done.stderr


def test_a_mistake_of_syntax_is_shown_with_its_line(tmp_path: Path) -> None:
    done = rank(tmp_path, "x = (1,\n")
    assert done.returncode == 1 and 'train.py", line 1' in done.stderr and "SyntaxError" in done.stderr


@pytest.mark.row("S1-26")
def test_verbose_is_an_option_of_the_command(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Mine(torch.nn.Module):\n    def __init__(self):\n        1 / 0\n"
    )
    (tmp_path / "persia.yml").write_text(
        "data: {train: rows.csv, split: {fractions: [1, 0, 0]}}\nfeatures: {a: {type: id, dim: 4}}\n"
        "labels: {label: {}}\nmodel: {class: 'mine:Mine'}\n"
    )
    (tmp_path / "rows.csv").write_text("a,label\n" + "x,1\ny,0\n" * 20)
    monkeypatch.setenv("LOG_LEVEL", "")  # restores the variable after the test
    run = ("train", "persia.yml", "--set", "data.columns={label: int64}")
    _, short = verb(*run, code=1)
    assert short.startswith("error: ZeroDivisionError: division by zero\n  at mine.py:4 in __init__: 1 / 0\n")
    assert "help:" in short
    for words in (("--verbose", *run), (*run, "--verbose")):
        monkeypatch.setenv("LOG_LEVEL", "")
        _, whole = verb(*words, code=1)
        assert "Traceback (most recent call last)" in whole
