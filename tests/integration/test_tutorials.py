"""The tutorials and the documented examples work as their pages describe."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from stack import missing
from tutorials import PageError, matches, run_page

pytestmark = [pytest.mark.clone, pytest.mark.timeout(480)]

PAGES = sorted([*ROOT.glob("docs/tutorials/*.md"), *ROOT.glob("docs/from-embeddingbag.md")])
# Other tests also read a data set of Criteo's format and train on it.
RUN = [pytest.param(page, marks=[pytest.mark.nightly] if page.stem == "criteo" else []) for page in PAGES]
EXAMPLES = [ROOT / "examples" / name for name in ("collection", "table")]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_a_page_runs_as_it_stands(page: Path, tmp_path: Path, commands: str) -> None:
    if "persia up" in page.read_text() and (reason := missing()):
        pytest.skip(reason)
    run_page(page, tmp_path, {**os.environ, "PATH": commands})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_is_short(example: Path) -> None:
    for file in (path for path in example.iterdir() if path.suffix in {".py", ".yml", ".md"}):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 100, f"{file}: more than 100 lines"


@pytest.mark.nightly
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_does_what_its_page_says(example: Path, tmp_path: Path, commands: str) -> None:
    made = shutil.ignore_patterns("runs", "checkpoint", "*.parquet", "proposed.yml", "__pycache__")
    copy = shutil.copytree(example, tmp_path / example.name, ignore=made)
    (tmp_path / "dlrm").symlink_to(ROOT / "examples" / "dlrm")  # this folder has the data
    run_page(example / "README.md", copy, {**os.environ, "PATH": commands})


GOOD = """Write a file:

```python
# add.py
print("sum", 1 / 3, flush=True)
```

and run it:

```sh
python add.py
```

```
sum 0.33…
```
"""


def check(text: str, folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    run_page(page, folder, {**os.environ, "PATH": path})


def test_a_page_that_is_true_passes(tmp_path: Path) -> None:
    check(GOOD, tmp_path)
    assert (tmp_path / "add.py").exists()
    check(GOOD.replace("```\nsum 0.33…\n```", "  ```\n  …\n  ```"), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sum 0.33…", "sum 0.34…", r"page.md:14: the page shows\nsum 0.34…"),
        ("sum 0.33…", "", r"page.md:14: the page shows"),
        ("1 / 3", "1 / 0", r"page.md:10: exit code 1[^$]*ZeroDivisionError"),
        ("python add.py", "python sum.py", r"page.md:3: no block after it uses add.py"),
        ("```\nsum", "```json\nsum", r"page.md:14: json: not a script"),
        ("```sh\npython add.py\n```", "python add.py", r"page.md: no block that can be run"),
        ("```sh\npython add.py\n```", "```\nsum\n```", r"page.md: no block that can be run"),
        ("\nsum 0.33…\n```", "\nsum 0.33…\n```\n\n```\nsum 0.33…\n```", r"page.md:18: an output: not a script"),
        ("sum 0.33…\n```", "sum 0.33…", r"page.md:14: the block is not closed"),
    ],
)
def test_a_page_that_is_not_true_is_an_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(PageError, match=message):
        check(GOOD.replace(old, new), tmp_path)


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("a 1\nb 2", "a 1  \nb 2\n", True),
        ("a …\n…\nz", "a 1\nb\nc\nz\n", True),
        ("…\nz", "z\n", True),
        ("a 0.8…", "a 0.79\n", False),
        ("a", "a\nb\n", False),
        ("a\nb", "a\n", False),
        ("a.c", "abc\n", False),
    ],
)
def test_an_output_is_compared_line_by_line(shown: str, printed: str, equal: bool) -> None:
    assert matches(shown, printed) is equal
