"""The commands of docs/troubleshooting.md end with 0 where nothing is wrong; the page names what messages say."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, Verb
from trainer_files import write_clicks, write_config

from persia.doctor import gpu, ladder
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
    """Return the commands of the page's tables, those of the second table left out: tests/compose runs them."""
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
