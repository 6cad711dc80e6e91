"""The documentation site: links between pages, the navigation, and the modules whose reference is generated."""

import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT
from test_tools import load

import persia

pytestmark = pytest.mark.clone


@pytest.fixture(scope="module")
def links() -> ModuleType:
    return load("check_links")


def test_every_link_leads_to_a_file_and_a_heading(links: ModuleType) -> None:
    found = links.pages()
    assert len(found) > 40 and sum(len(page.links) for page in found.values()) > 200
    assert [*links.broken(found)] == []
    assert sum(len(page.languages) for page in found.values()) > 100
    assert [*links.unknown_languages(found)] == []


def test_every_page_of_the_manual_is_in_the_navigation_once(links: ModuleType) -> None:
    assert [*links.outside_navigation(links.pages())] == []


def test_broken_links_and_missing_pages_are_named(links: ModuleType, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(
        "# Start\n\n```{toctree}\n:hidden:\n\none\ngone\nTwo </docs/two>\nreference/api/index\n```\n"
    )
    (docs / "one.md").write_text(
        "# One `two`, three\n\n## Again\n\n## Again\n\n"
        "[right](#one-two-three) [right](#again-1) [right](other.md#a-b)\n\n"
        "```\n[code](nothing.md)\n```\n\n| table |\n|---|\n| [wrong](nothing.md) |\n\n"
        "[wrong](#again-2) ![wrong](no.svg) [wrong](/docs/one.md) [wrong](../../one.md) "
        "[other host](https://example.com/x#y)\n"
    )
    (docs / "other.md").write_text("# A b\n")
    (docs / "two.md").write_text("# Two\n\n```sh\nls\n```\n\n```notalanguage\n```\n\n```mermaid\n```\n")
    found = links.pages(tmp_path)
    assert [*links.broken(found, tmp_path)] == [
        "docs/one.md:15: nothing.md: there is no such file",
        "docs/one.md:17: #again-2: there is no heading with this anchor",
        "docs/one.md:17: no.svg: there is no such file",
        "docs/one.md:17: /docs/one.md: not a relative path in the repository",
        "docs/one.md:17: ../../one.md: not a relative path in the repository",
    ]
    (unknown,) = links.unknown_languages(found)
    assert unknown.startswith("docs/two.md:7: notalanguage: Pygments does not know this language")
    assert [*links.outside_navigation(found, tmp_path)] == [
        "docs/other.md: 0 times in the lists of pages of docs/index.md; add it to one of them, without .md",
        "docs/index.md: docs/gone.md: there is no such file",
    ]


def test_every_module_that_a_script_imports_has_a_page() -> None:
    given = load("api_modules")
    listed = {module for modules in given.GROUPS.values() for module in modules}
    package = ROOT / "persia_py" / "persia"
    with_names = {path.parent.name for path in package.glob("*/__init__.py") if "\n__all__ = " in path.read_text()}
    assert {f"persia.{name}" for name in persia._MODULES | with_names} <= listed
    assert {name: f"persia.{module}" for name, module in persia._NAMES.items()} == given.OF_PACKAGE
    for module in listed:
        path = package.joinpath(*module.split(".")[1:])
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module


def test_texts_of_the_extension_are_those_of_its_comments() -> None:
    found = load("rust_docs").read()
    import persia_core

    for name in ("Features", "Fitter", "Transform", "Samples"):
        assert found[name] == re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", getattr(persia_core.features, name).__doc__)
    assert found["hash_text"] == persia_core.features.hash_text.__doc__
    assert found["Features.parse"].startswith("Parse the blocks ``features``")


def test_addresses_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    check = load("check_site")
    (tmp_path / "a.html").write_text(
        '<script src="https://example.com/x.js"></script><a href="https://example.com/">x</a><h1 id="top">A</h1>'
        '<a href="#top">x</a><a href="b.html#two">x</a><a href="b.html#one">x</a>'
        '<img src="c.svg"><a href="../d.html">x</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="two">B</h1><link rel="stylesheet" href="style.css?v=1">')
    (tmp_path / "style.css").write_text("")
    assert [*check.problems(tmp_path)] == [
        "a.html: https://example.com/x.js: <script> is loaded from another host",
        "a.html: b.html#one: there is no such anchor",
        "a.html: c.svg: there is no such file",
        "a.html: ../d.html: there is no such file",
    ]
    assert [*check.problems(tmp_path / "none")] == [f"{tmp_path / 'none'}: no page"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_site_is_built_without_a_warning() -> None:
    done = subprocess.run(["make", "site"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(r"^\d+ pages, 0 wrong links", done.stdout, re.MULTILINE)
    page = (ROOT / "site/docs/reference/api/persia.ctx.html").read_text()
    assert 'id="persia.ctx.TrainCtx"' in page and 'id="persia.ctx.TrainCtx.backward"' in page
    assert "TrainCtx" in (ROOT / "site" / "searchindex.js").read_text()
