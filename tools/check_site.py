"""Check the built documentation site: its links, anchors and images, and that it needs no other host.

Usage: tools/check_site.py FOLDER
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script", "img", "link", "iframe", "source", "object"}
"""Elements whose address a browser loads when it shows the page."""


class Page(HTMLParser):
    """The anchors of a page, and its addresses with their elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element."""
        for name, value in attrs:
            if value and name in {"id", "name"}:
                self.anchors.add(value)
            elif value and name in {"href", "src", "data"}:
                self.links.append((tag, value))


def problems(folder: Path) -> Iterator[str]:
    """Yield each address that leads nowhere, or that a browser would load from another host."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        yield f"{folder}: no page"
    for path, page in pages.items():
        for tag, link in page.links:
            parts = urlsplit(link)
            where = f"{path.relative_to(folder.resolve())}: {link}"
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                if tag in LOADED:
                    yield f"{where}: <{tag}> is loaded from another host"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_relative_to(folder.resolve()) or not target.is_file():
                yield f"{where}: there is no such file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{where}: there is no such anchor"


def main() -> int:
    """Print all problems. Return 1 if there are any."""
    folder = Path(sys.argv[1])
    wrong = [*problems(folder)]
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{len([*folder.rglob('*.html')])} pages, {len(wrong)} wrong links: {folder}/index.html")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
