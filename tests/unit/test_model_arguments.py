"""A check and the creation of the model name a wrong hyperparameter by its key and its place in the file."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Verb
from trainer_files import write_clicks, write_config

MINE = """\
import torch

class Base(torch.nn.Module):
    def __init__(self, num_dense, embedding_dims, hidden=(8,), share=0.5):
        super().__init__()
        {check}
        self.top = torch.nn.Linear(num_dense + sum(embedding_dims), hidden[0])

class Mine(Base):
    pass
"""
"""The class ``Mine`` has no ``__init__`` of its own, so that its source does not show its arguments."""


def lines_of(path: Path, *keys: str) -> list[int]:
    """Return the lines of a file in which keys begin."""
    return [number for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip().startswith(keys)]


@pytest.mark.row("S1-04")
@pytest.mark.parametrize(
    ("model", "key", "message"),
    [
        ({"bottom_mlp": ["x", 4]}, "bottom_mlp[0]", "found `x`, allowed: a whole number"),
        ({"bottom_mlp": [0, 4]}, "bottom_mlp[0]", "found `0`, allowed: a whole number of at least 1"),
        ({"top_mlp": [8, -2, 1]}, "top_mlp[1]", "found `-2`, allowed: a whole number of at least 1"),
        ({"bottom_mpl": [8, 4]}, "bottom_mpl", "unknown key, did you mean `bottom_mlp`?"),
        ({"dropout": "much"}, "dropout", "found `much`, allowed: a number"),
    ],
)
def test_a_check_names_the_argument_and_its_place(
    tmp_path: Path, verb: Verb, model: dict[str, Any], key: str, message: str
) -> None:
    path = write_config(tmp_path, model={"name": "dlrm", **model})
    line = lines_of(path, key.partition("[")[0])[0]
    if "[" in key:  # the items of a list have separate lines
        line += 1 + int(key.partition("[")[2].rstrip("]"))
    for words in (("config", "check", str(path)), ("train", str(path))):
        errors = verb(*words, code=2)[1]
        assert f"{path}:{line}:" in errors and f": model.{key}: {message}" in errors, errors


@pytest.mark.row("S1-04")
@pytest.mark.parametrize(
    ("model", "place", "text"),
    [
        (
            {"name": "dcnv2", "cross_layers": 0},
            "cross_layers",
            "model.cross_layers: dcnv2: DCNv2: cross_layers (0) must be",
        ),
        ({"name": "dcnv2", "dropout": 1.5}, "dropout", "model.dropout: dcnv2: DCNv2: dropout (1.5) must be"),
        (
            {"class": "mine:Mine", "hiden": [8]},
            "hiden",
            "model.hiden: mine:Mine: `hiden` is not an argument; the arguments are num_dense, ",
        ),
        (
            {"class": "mine:Mine", "hidden": [-1]},
            "- -1",
            "model.hidden[0]: mine:Mine: hidden[0]: want above 0 (at mine.py:7 in",
        ),
        (
            {"class": "mine:Mine", "share": 7},
            "share",
            "model.share: mine:Mine: the share is wrong (at mine.py:8 in __init__: if share > 1",
        ),
        (
            {"class": "mine:Mine", "hidden": []},
            "class",
            "model: mine:Mine: nothing is right (at mine.py:6 in __init__: if not hidden",
        ),
    ],
)
def test_a_model_that_refuses_an_argument(
    tmp_path: Path, verb: Verb, model: dict[str, Any], place: str, text: str
) -> None:
    """If only the model detects the error, the argument that its message mentions determines the place."""
    check = (
        "if not hidden: raise ValueError('nothing is right')\n"
        "        if hidden[0] < 1: raise ValueError('hidden[0]: want above 0')\n"
        "        if share > 1: raise ValueError('the share is wrong')"
    )
    (tmp_path / "mine.py").write_text(MINE.format(check=check))
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = write_config(tmp_path, model=model)
    (line,) = lines_of(path, place)
    if place in ("hiden", "class"):
        assert not verb("config", "check", str(path))[1], "the source does not show it"
    errors = verb("train", str(path), "--test", "--local", code=2)[1]
    assert f"{path}:{line}: {text}" in errors
    assert f"next:  correct each error, then run: python -m persia.testing {path}" in errors


@pytest.mark.row("S1-04")
def test_an_argument_of_the_command_line_is_named(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = write_config(tmp_path)
    errors = verb("train", str(path), "--set", "model.cross_layers=0", "--test", "--local", code=2)[1]
    assert "--set model.cross_layers=0: model.cross_layers: dcnv2: DCNv2: cross_layers (0) must be at least 1" in errors
    errors = verb("config", "check", str(path), "--set", "model.deep_mlp=[8, 0]", code=2)[1]
    assert "--set model.deep_mlp=[8, 0]: model.deep_mlp[1]: found `0`, allowed: a whole number of at least 1" in errors
