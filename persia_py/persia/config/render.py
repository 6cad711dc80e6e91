"""A tree as YAML text, with a comment on the source of each value."""

import re
from collections.abc import Callable

from persia.runtime.yaml_tree import Entries, Items, Node, Place, Scalar

_PLAIN = re.compile(r"(-?[A-Za-z0-9_.+~/][A-Za-z0-9_.+~/-]*)( [A-Za-z0-9_.+~/-]+)*")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


class Rendered:
    """The text of a mapping, with one line for each key.

    Attributes:
        text: The YAML.
    """

    def __init__(self, root: Entries, comment: Callable[[Place], str] | None = None) -> None:
        """Write the text.

        Args:
            root: The mapping.
            comment: Returns the comment for the place of a value; None writes no comments.
        """
        self._comment = comment
        self._lines: list[str] = []
        self._places: dict[tuple[int, int], Place] = {}
        self._block(root, 0)
        self.text = "\n".join([*self._lines, ""])

    def origin(self, line: int, column: int) -> Place:
        """Return the place of the node that was written at a line and column, both counted from 1."""
        while column > 0 and (line, column) not in self._places:
            column -= 1
        return self._places.get((line, column), Place(line, 1))

    def _block(self, node: Entries, indent: int) -> None:
        for key, value in node.entries:
            line = len(self._lines) + 1
            self._places.setdefault((line, indent + 1), key.place)
            start = " " * indent + (key.text if _PLAIN_KEY.fullmatch(key.text) else _quote(key.text)) + ":"
            if isinstance(value, Entries) and value.entries:
                self._lines.append(start)
                # A parser reports the position of a mapping as that of its first key.
                self._places[line + 1, indent + 3] = value.place
                self._block(value, indent + 2)
                continue
            self._places[line, len(start) + 2] = value.place
            end = f"  # {self._comment(value.place)}" if self._comment else ""
            self._lines.append(f"{start} {flow(value)}{end}")


def flow(node: Node) -> str:
    """Return a value in YAML's flow style, on one line."""
    if isinstance(node, Items):
        return f"[{', '.join(map(flow, node.items))}]"
    if isinstance(node, Entries):
        return f"{{{', '.join(f'{_quote(key.text)}: {flow(value)}' for key, value in node.entries)}}}"
    assert isinstance(node, Scalar)  # noqa: S101 - there is no other kind
    if node.is_null:
        return "null"
    return node.text if not node.quoted and _PLAIN.fullmatch(node.text) else _quote(node.text)


def _quote(text: str) -> str:
    shown = "".join(_ESCAPED.get(each, each if each.isprintable() else f"\\U{ord(each):08x}") for each in text)
    return f'"{shown}"'
