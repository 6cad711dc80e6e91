"""The commands of docs/troubleshooting.md exit with 0 if there is no problem. The page quotes messages correctly."""

import inspect
import itertools
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Verb
from meeting import me
from trainer_files import write_clicks, write_config

from persia.distributed import handshake
from persia.doctor import gpu, ladder
from persia.errors import UnreachableError
from persia.loop import out_of_memory, training
from persia.runtime import clock
from persia.testing.__main__ import main as check_model

pytestmark = pytest.mark.clone

PAGE = ROOT / "docs" / "troubleshooting.md"
ELSEWHERE = {
    "persia debug shell --context FOLDER -- COMMAND",  # test_context_shell.py, and test_third_party.py
    "persia train persia.yml --test",  # test_test_runs.py
    "persia train persia.yml --test --nproc 2",
    "persia train persia.yml --nproc 2",
}
"""Commands that need a job or containers, and the tests that run them."""


def commands() -> list[str]:
    """Return the commands of the page's tables, except the second table, whose commands tests/compose runs."""
    text = PAGE.read_text()
    first, rest = text.partition("With containers,")[::2]
    steps = rest.partition("## A new model does not train")[2].partition("\n## ")[0]
    return [
        *re.findall(r"\| `([^`]+)` \|$", first, re.MULTILINE),
        *re.findall(r"\| `([^`]+)` \|$", steps, re.MULTILINE),
    ]


def test_every_command_runs(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 600)
    write_config(tmp_path)
    found = dict.fromkeys(commands())
    assert len(found) >= 14 and set(found) > ELSEWHERE
    for command in found:
        if command in ELSEWHERE or "--ladder" in command:  # the ladder: test_test_runs.py
            continue
        words = shlex.split(command)
        if words[0] == "python":
            assert check_model(words[3:]) == 0, command
        else:
            assert words[0] == "persia"
            verb(*words[1:])


def test_the_page_has_the_steps_of_the_ladder(tmp_path: Path) -> None:
    write_config(tmp_path)
    steps = ladder.steps(tmp_path / "persia.yml", ranks=2)
    by_hand = PAGE.read_text().partition("| step | adds |")[2].partition("\n\n")[0]
    for step in (*steps[:3], steps[6], steps[8]):
        command = step.command.replace(str(tmp_path / "persia.yml"), "persia.yml")
        assert f"| {step.number} |" in by_hand and f"`{command}`" in by_hand, command
    assert [step.number for step in steps] == [*range(1, 11)]


def test_the_page_quotes_messages_as_they_are() -> None:
    page = PAGE.read_text()
    for facts in (gpu.Facts(wanted=1), gpu.Facts(wanted=1, in_container=True, driver_loaded=True)):
        assert f"`{gpu.device(facts).found.partition(';')[0]}`" in page
    assert f"`{gpu.ranks(5, 1, None).found}`" in page


def test_the_page_has_the_symptoms_of_usual_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each symptom quotes a message of the package, so a change of the message needs a change of the page."""
    page = PAGE.read_text()
    kept = [torch.zeros(7, 333) for _ in range(out_of_memory.MANY)]
    text = str(out_of_memory.report(RuntimeError("no memory"), 3, 32, []))
    (line,) = (each for each in text.splitlines() if "7x333" in each)
    assert re.sub(r"^.* not named, \d+", "not named, 531", line) in page and kept
    monkeypatch.setattr(clock, "now", itertools.count(step=100).__next__)
    with pytest.raises(UnreachableError) as late:
        handshake.host(handshake.listen("127.0.0.1"), me(0), 60.0, "127.0.0.1:40167")
    assert f"`{str(late.value).partition(': ')[2].partition(';')[0]}`" in page
    source = inspect.getsource(training)
    assert "all ranks stop after step %d: the data of rank%s %s has ended" in source
    assert "`all ranks stop after step 64: the data of rank 1 has ended`" in page


def test_the_pages_have_the_codes_of_signals() -> None:
    """Shells and container engines report 128 plus the number of the signal."""
    codes = {str(128 + number) for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)}
    running = (ROOT / "docs" / "running.md").read_text().partition("## Exit codes")[2]
    assert codes <= {*re.findall(r"^\| (\d+) \|", running, re.MULTILINE)}
    died = PAGE.read_text().partition("## A container of a rank has died")[2].partition("\n## ")[0]
    assert codes - {"130"} <= {*re.findall(r"^\| (\d+) \|", died, re.MULTILINE)}
