"""Check the links between Markdown files, and that each page of the manual is in the navigation of the site.

Usage: tools/check_links.py

A link must lead to a file of the repository, and its anchor to a heading. Nothing is built and nothing is downloaded.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    *("*.md", "docs/**/*.md", "examples/*/*.md", "examples/*/data/*.md", "tests/*.md", "tests/chaos/*.md"),
    *("persia_py/*.md", "rust_core/*/*.md", "services/*/*.md", "third_party/*.md"),
)
INDEX = Path("docs/index.md")
"""The first page of the site, whose lists of pages are the navigation."""
PLAIN = ("csv", "mermaid")
"""Languages of blocks that the site shows as they are, without colors."""
GENERATED = "docs/reference/api/"
"""Pages that the build of the site makes."""


@dataclass
class Page:
    """A Markdown file.

    Attributes:
        links: The line and the target of each link and image.
        anchors: The anchors of its headings, as git hosts and the site make them.
        entries: The files that the lists of pages in the file name, if the file is the first page.
        languages: The line and the language of each block of code that has one.
    """

    links: list[tuple[int, str]] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    entries: list[str] = field(default_factory=list)
    languages: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> "Page":
        """Parse the text of a file."""
        page = cls()
        tokens = MarkdownIt("commonmark").enable("table").parse(text)
        line = 0
        for place, token in enumerate(tokens):
            line = token.map[0] + 1 if token.map else line
            if token.type == "heading_open":
                page._add_anchor(_text(tokens[place + 1]))
            elif token.type == "fence" and token.info.strip() == "{toctree}":
                lines = (each.strip() for each in token.content.splitlines())
                page.entries += [each for each in lines if each and not each.startswith(":")]
            elif token.type == "fence" and token.info:
                page.languages.append((line, token.info.split()[0]))
            for child in token.children or ():
                target = child.attrGet("href" if child.type == "link_open" else "src")
                if child.type in {"link_open", "image"} and target:
                    page.links.append((line, str(target)))
        return page

    def _add_anchor(self, heading: str) -> None:
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 1
        unique = anchor
        while unique in self.anchors:
            unique = f"{anchor}-{number}"
            number += 1
        self.anchors.add(unique)


def _text(inline: Token) -> str:
    return "".join(child.content for child in inline.children or () if child.type in {"text", "code_inline"})


def pages(root: Path = ROOT) -> dict[Path, Page]:
    """Return the pages by their paths in the repository."""
    found = {path for pattern in PATTERNS for path in root.glob(pattern)}
    return {path.relative_to(root): Page.read(path.read_text(encoding="utf-8")) for path in sorted(found)}


def broken(found: dict[Path, Page], root: Path = ROOT) -> Iterator[str]:
    """Yield each link that leads nowhere."""
    for path, page in found.items():
        for line, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (root / path.parent / unquote(parts.path)).resolve() if parts.path else root / path
            where = f"{path}:{line}: {link}"
            if parts.path.startswith("/") or not target.is_relative_to(root):
                yield f"{where}: not a relative path in the repository"
            elif not target.exists():
                yield f"{where}: there is no such file"
            elif parts.fragment and parts.fragment not in _anchors(found, target.relative_to(root)):
                yield f"{where}: there is no heading with this anchor"


def _anchors(found: dict[Path, Page], path: Path) -> set[str]:
    return found[path].anchors if path in found else set()


def unknown_languages(found: dict[Path, Page]) -> Iterator[str]:
    """Yield each block of code in a language that the site does not know, which is an error of its build."""
    for path, page in found.items():
        for line, language in page.languages:
            if language not in PLAIN and not _is_known(language):
                yield f"{path}:{line}: {language}: Pygments does not know this language; add it to PLAIN, or write none"


def _is_known(language: str) -> bool:
    try:
        get_lexer_by_name(language)
    except ClassNotFound:
        return False
    return True


def outside_navigation(found: dict[Path, Page], root: Path = ROOT) -> Iterator[str]:
    """Yield each page of the manual that is not exactly once in the navigation, and each entry without a page."""
    listed = [_entry(each) for each in found[INDEX].entries]
    for path in found:
        if path.parts[0] == "docs" and path != INDEX and (times := listed.count(path)) != 1:
            yield f"{path}: {times} times in the lists of pages of {INDEX}; add it to one of them, without .md"
    for each in listed:
        if not each.as_posix().startswith(GENERATED) and not (root / each).is_file():
            yield f"{INDEX}: {each}: there is no such file"


def _entry(name: str) -> Path:
    """Return the file of an entry: ``page``, ``/page`` from the top, or ``Title <page>``."""
    name = re.sub(r"^.* <(.+)>$", r"\1", name)
    return Path(f"{name[1:]}.md" if name.startswith("/") else f"docs/{name}.md")


def main() -> int:
    """Print all problems. Return 1 if there are any."""
    found = pages()
    wrong = [*broken(found), *unknown_languages(found), *outside_navigation(found)]
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{sum(len(page.links) for page in found.values())} links in {len(found)} files, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
