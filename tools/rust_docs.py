"""The documentation comments of the compiled extension, by the names that Python sees.

The stubs of ``persia_core`` have signatures without texts. The texts are the comments in ``rust_core/core/src``, which
pyo3 turns into docstrings. This module reads the comments, so nothing has to be compiled.
"""

import re
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "rust_core" / "core" / "src"
_ITEM = re.compile(r"(?:pub(?:\([a-z]+\))? )?(struct|enum|fn) (\w+)")
_IMPL = re.compile(r"impl(?:<[^>]*>)? (\w+)")


def read(folder: Path = SOURCES) -> dict[str, str]:
    """Return the texts of classes (``Features``), methods (``Features.parse``) and functions (``hash_text``)."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.rs")):
        found.update(_of_file(path.read_text(encoding="utf-8").splitlines()))
    return found


def _of_file(lines: list[str]) -> Iterator[tuple[str, str]]:
    names: dict[str, str] = {}  # the Python names of Rust structs
    text: list[str] = []
    attributes: list[str] = []
    scope = ""
    for line in lines:
        code = line.strip()
        if code.startswith("///"):
            text.append(code[3:].removeprefix(" "))
            continue
        if code.startswith("#["):
            attributes.append(code)
            continue
        given = " ".join(attributes)
        if line.startswith("impl"):
            matched = _IMPL.match(line)
            scope = matched.group(1) if matched and "#[pymethods]" in given else ""
        elif line.startswith("}"):
            scope = ""
        elif (item := _ITEM.match(code)) and text:
            kind, name = item.groups()
            renamed = re.search(r'name = "(\w+)"', given)
            shown = renamed.group(1) if renamed else name
            if kind != "fn" and "#[pyclass" in given:
                names[name] = shown
                yield shown, _restructured(text)
            elif kind == "fn" and scope:
                yield f"{names.get(scope, scope)}.{shown}", _restructured(text)
            elif kind == "fn" and "#[pyfunction]" in given:
                yield shown, _restructured(text)
        if code:
            text, attributes = [], []


def _restructured(lines: list[str]) -> str:
    """Return a Markdown comment as reStructuredText. Only the marks of code differ."""
    text = re.sub(r"\[(`[^`]+`)\]", r"\1", "\n".join(lines))
    return re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text)
