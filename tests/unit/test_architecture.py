"""docs/architecture.md names functions that exist in the files that it names."""

import re
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.clone

PAGE = ROOT / "docs" / "architecture.md"
PLACE = re.compile(r"`(?P<name>[A-Za-z_:.]+)` (?:in `(?P<file>[a-z_./]+\.(?:rs|py))`|there)")


def places(text: str) -> list[tuple[str, Path]]:
    """Return each function that the page names, and its file. "there" means the last named file."""
    found: list[tuple[str, Path]] = []
    for match in PLACE.finditer(text):
        if match["file"] is None:
            found.append((match["name"], found[-1][1]))
        else:
            root = ROOT / ("persia_py" if match["file"].endswith(".py") else "rust_core")
            found.append((match["name"], root / match["file"]))
    return found


def missing(named: list[tuple[str, Path]]) -> list[str]:
    """Return the names that their files do not define."""
    gone = []
    for name, file in named:
        last = re.split(r"::|\.", name)[-1]
        source = file.read_text() if file.exists() else ""
        if not re.search(rf"\b(fn|def|class) {last}\b", source):
            gone.append(f"{name} in {file.relative_to(ROOT)}")
    return gone


def test_every_function_is_where_the_page_says() -> None:
    named = places(PAGE.read_text())
    assert len(named) > 25
    assert missing(named) == []


def test_a_function_that_is_gone_is_found() -> None:
    text = "`serve` in `engine/src/pipeline/lookup.rs` and `no_such` there, `run` in `engine/src/gone.rs`"
    assert missing(places(text)) == [
        "no_such in rust_core/engine/src/pipeline/lookup.rs",
        "run in rust_core/engine/src/gone.rs",
    ]
