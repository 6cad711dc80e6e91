"""Commands in messages. Users paste them into a shell, so a path with a space must be quoted."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Verb
from trainer_files import write_clicks, write_config

BEFORE_A_PATH = re.compile(
    r"(?:\bpersia (?:train|up|eval|predict|export|serve|config [a-z]+|ckpt [a-z]+|data [a-z]+)"
    r"|\bpython -m [a-z.]+|\brm(?: -r)?|\bmkdir -p|--(?:resume|dir)) $"
)


def unquoted(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and expression of each value in an f-string that follows a command or its option and is not quoted."""
    tree = ast.parse(source)
    assigned = [each for each in ast.walk(tree) if isinstance(each, ast.Assign) and "shlex." in ast.unparse(each.value)]
    names = {each.id for one in assigned for each in ast.walk(one) if isinstance(each, ast.Name)}
    for text in (each for each in ast.walk(tree) if isinstance(each, ast.JoinedStr)):
        before = ""
        for part in text.values:
            if isinstance(part, ast.Constant):
                before += str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            value = ast.unparse(part.value)
            if BEFORE_A_PATH.search(before) and "shlex." not in value and value not in names:
                yield text.lineno, value
            before += "X"


@pytest.mark.clone
def test_paths_in_commands_are_quoted() -> None:
    assert [*unquoted('f"next: rm -r {folder}"')] == [(1, "folder")]
    assert [*unquoted('f"next: rm -r {shlex.quote(folder)}, {folder}"')] == []
    files = (ROOT / "persia_py" / "persia").rglob("*.py")
    found = [f"{path}:{line}: {value}" for path in files for line, value in unquoted(path.read_text())]
    assert not found


def command(text: str) -> list[str]:
    """Return the words of the command in the last line of a text that has one, as a shell splits them."""
    line = next(each for each in reversed(text.splitlines()) if "persia " in each)
    return shlex.split(line[line.index("persia ") :])


@pytest.mark.parametrize("name", ["my rows.yml", "it's.yml"])
def test_the_next_command_has_the_name_of_the_file_as_one_word(tmp_path: Path, verb: Verb, name: str) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = write_config(tmp_path).rename(tmp_path / name)
    path.write_text(path.read_text() + "nonsense: 1\n")
    for words in (("config", "check"), ("train",)):
        _, errors = verb(*words, str(path), code=2)
        assert command(errors) == ["persia", "config", "check", str(path)]


def test_the_command_that_trains_on_has_the_overrides_as_given(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = write_config(tmp_path)
    given = ("--set", "run.dir=my runs", "--set", "run.name=one")
    verb("train", str(path), *given)
    out, errors = verb("train", str(path), *given, "--resume")
    words = command(out + errors)
    assert words[:3] == ["persia", "train", str(path)] and words[3:5] == ["--set", "run.dir=my runs"]
    assert words[-2] == "--resume" and words[-1].endswith("my runs/one")
