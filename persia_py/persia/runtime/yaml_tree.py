"""Parses YAML text into a tree whose nodes have places. The rules equal those of the Rust parser of the same files.

Scalars keep their text: ``yes``, ``010`` and ``2024-05-01`` are strings, ``1e6`` and ``1_000_000`` are numbers. Tags
are refused, and so are texts that are nested too deeply, or whose aliases expand them beyond :data:`MAX_NODES`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_BYTES = 4 << 20
"""The maximum size of a configuration file, in bytes."""
MAX_DEPTH = 32
"""The maximum number of nested levels in a configuration file."""
MAX_NODES = 500_000
"""The maximum number of keys and values in a configuration file. An alias counts as the nodes that it repeats."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULLS = ("", "~", "null")
_SEPARATED = re.compile(r"(?<=[0-9a-fA-F])_(?=[0-9a-fA-F])")
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_RADIX = re.compile(r"\+?0(x[0-9a-fA-F]+|o[0-7]+|b[01]+)")
_NUMBER = re.compile(r"[+-]?[0-9]*(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_ODD_BREAK = re.compile("[\x85\u2028\u2029]")
_SHOWN = 60


@dataclass(frozen=True, order=True)
class Place:
    """The place of a node.

    Attributes:
        line: The line in the file, from 1; 0 if the node is not in the file.
        column: The column, from 1.
        override: The text of the ``--set`` that set the node; empty if the node is in the file or is a default.
    """

    line: int = 0
    column: int = 0
    override: str = ""

    def shown(self, file: str) -> str:
        """Return the place as ``FILE:LINE``, as the ``--set`` that set the node, or as the file alone."""
        if self.override:
            return f"--set {self.override}"
        return f"{file}:{self.line}" if self.line else file


NOWHERE = Place()
"""The place of a default, or of a value that a program created."""


class TreeError(ValueError):
    """The text is not a tree that can be used.

    Attributes:
        place: The place of the error.
    """

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(message)
        self.place = place


@dataclass
class Node(ABC):
    """A value and its place.

    Attributes:
        place: The place at which it begins.
        size: The number of nodes in it, including keys and itself; an alias counts as the nodes that it repeats.
        height: The number of nested levels.
    """

    place: Place
    size: int = field(default=1, init=False)
    height: int = field(default=1, init=False)

    @property
    def is_null(self) -> bool:
        """Whether the value is missing (``key:``), ``~`` or ``null``."""
        return False

    @abstractmethod
    def found(self) -> str:
        """Return the value as messages show it."""

    def _measure(self, children: Iterator["Node"]) -> None:
        for child in children:
            self.size += child.size
            self.height = max(self.height, child.height + 1)


@dataclass
class Scalar(Node):
    """A value without parts.

    Attributes:
        text: The text as written, without quotes.
        quoted: Whether it had quotes. Numbers, booleans and null have none.
    """

    text: str
    quoted: bool = False

    @property
    def is_null(self) -> bool:
        """Whether the value is missing (``key:``), ``~`` or ``null``."""
        return not self.quoted and self.text in _NULLS

    def found(self) -> str:
        """Return the value as messages show it."""
        if self.is_null:
            return "nothing"
        shown = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        shown = shown.encode("unicode_escape").decode() if not shown.isprintable() else shown
        return f'"{shown}"' if self.quoted else f"`{shown}`"


@dataclass
class Items(Node):
    """A list."""

    items: list[Node]

    def __post_init__(self) -> None:
        """Compute size and height."""
        self._measure(iter(self.items))

    def found(self) -> str:
        """Return the value as messages show it."""
        return "a list"


@dataclass
class Entries(Node):
    """A mapping, in the order of the file. Repeated keys are kept."""

    entries: list[tuple[Scalar, Node]]

    def __post_init__(self) -> None:
        """Compute size and height."""
        self._measure(node for entry in self.entries for node in entry)

    def get(self, key: str) -> Node | None:
        """Return the value of a key; for a repeated key, the first value."""
        return next((node for known, node in self.entries if known.text == key), None)

    @property
    def first(self) -> dict[str, Node]:
        """Keys and values; for a repeated key, the first value."""
        return {key.text: node for key, node in reversed(self.entries)}

    def at(self, *path: str) -> "Entries":
        """Return the mapping at this path of keys.

        Raises:
            KeyError: A key of the path does not exist, or its value is not a mapping.
        """
        node: Node = self
        for key in path:
            inner = node.get(key) if isinstance(node, Entries) else None
            if not isinstance(inner, Entries):
                raise KeyError(key)
            node = inner
        return node if isinstance(node, Entries) else self

    def put(self, key: str, value: Node) -> None:
        """Replace the value of a key, or add it."""
        for index, (known, _) in enumerate(self.entries):
            if known.text == key:
                self.entries[index] = (known, value)
                return
        self.entries.append((Scalar(value.place, key), value))

    def found(self) -> str:
        """Return the value as messages show it."""
        return "a mapping"


@dataclass
class _Open:
    """A collection whose end has not been parsed yet."""

    place: Place
    anchor: str | None
    children: list[Node]
    is_mapping: bool


def parse(text: str, override: str = "") -> Node:
    """Parse a text that holds one document.

    Args:
        text: The text of a file, or of the value of a ``--set``.
        override: The ``--set``; its nodes have no line.

    Raises:
        TreeError: The text is empty, is not YAML, or is beyond a limit.
    """
    start = Place(0, 0, override) if override else Place(1, 1)
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise TreeError(start, f"the file has {size} bytes, the limit is {MAX_BYTES}")
    text = text.removeprefix("\ufeff")
    if (odd := _ODD_BREAK.search(text)) is not None:
        lines = text[: odd.start()].split("\n")
        place = start if override else Place(len(lines), len(lines[-1]) + 1)
        code = f"{ord(odd.group()):04X}"
        message = f'the character U+{code} ends a line for some parsers only: remove it, or write "\\u{code}"'
        raise TreeError(place, message)
    builder = _Builder(override)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        place = builder.place(error.problem_mark) if error.problem_mark is not None else start
        context = f"{error.context}, " if error.context else ""
        raise TreeError(place, f"not valid YAML: {context}{error.problem}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise TreeError(start, f"not valid YAML: {getattr(error, 'reason', error)}") from error
    if builder.root is None or (builder.root.is_null and not override):
        raise TreeError(start, "the file is empty" if not override else "no value")
    return builder.root


class _Builder:
    """Assembles nodes from events in a loop. Deeply nested text therefore cannot exhaust the stack."""

    def __init__(self, override: str) -> None:
        self._override = override
        self._open: list[_Open] = []
        self._anchors: dict[str, Node] = {}
        self._nodes = 0
        self.root: Node | None = None

    def place(self, mark: Any) -> Place:
        """Return the place of a parser mark."""
        return Place(0, 0, self._override) if self._override else Place(mark.line + 1, mark.column + 1)

    def take(self, event: Any) -> None:
        """Process the next event."""
        place = self.place(event.start_mark)
        if getattr(event, "tag", None) not in (None, "!"):  # the parser reports "!" for quoted strings
            raise TreeError(place, f"the tag `{event.tag[:_SHOWN]}` is not supported: remove it")
        if isinstance(event, yaml.ScalarEvent):
            self._close(Scalar(place, event.value, quoted=bool(event.style)), event.anchor, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._count(1, place)
            if len(self._open) >= MAX_DEPTH:
                raise TreeError(place, f"nested deeper than {MAX_DEPTH} levels")
            self._open.append(_Open(place, event.anchor, [], isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = self._open.pop()
            self._close(_collection(ended), ended.anchor, 0)
        elif isinstance(event, yaml.AliasEvent):
            self._repeat(event.anchor, place)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise TreeError(
                place,
                "a second document begins here, but a file may have only one: remove the `---` or `...` before it",
            )

    def _repeat(self, anchor: str | None, place: Place) -> None:
        node = self._anchors.get(anchor or "")
        if node is None:
            raise TreeError(place, f"the alias `*{anchor}` has no anchor `&{anchor}` before it")
        if len(self._open) + node.height > MAX_DEPTH:
            raise TreeError(place, f"nested deeper than {MAX_DEPTH} levels")
        self._close(node, None, node.size)

    def _close(self, node: Node, anchor: str | None, nodes: int) -> None:
        self._count(nodes, node.place)
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._open:
            self.root = node
            return
        into = self._open[-1]
        if into.is_mapping and len(into.children) % 2 == 0 and not isinstance(node, Scalar):
            raise TreeError(node.place, f"a key must be a string, found {node.found()}")
        into.children.append(node)

    def _count(self, nodes: int, place: Place) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise TreeError(place, f"more than {MAX_NODES} keys and values up to here")


def _collection(ended: _Open) -> Node:
    children = ended.children
    if not ended.is_mapping:
        return Items(ended.place, children)
    keys = [child for child in children[::2] if isinstance(child, Scalar)]
    return Entries(ended.place, [*zip(keys, children[1::2], strict=True)])


def whole_number(text: str) -> int | None:
    """Read ``1000000``, ``1_000_000``, ``1e6``, ``0x10``, ``0o17`` or ``0b1``. None for anything else.

    ``010`` is not a number: YAML 1.1 reads it as 8, YAML 1.2 as 10.
    """
    digits = _SEPARATED.sub("", text)
    if _WHOLE.fullmatch(digits):
        return int(digits) if len(digits) <= 4000 else None  # int() refuses more digits
    if _RADIX.fullmatch(digits):
        return int(digits, 0)
    if digits.lstrip("+-").isdigit():
        return None  # octal in YAML 1.1
    value = number(digits)
    return int(value) if value is not None and value.is_integer() and abs(value) <= 2.0**53 else None


def number(text: str) -> float | None:
    """Read ``0.5``, ``-1``, ``.5``, ``1e-3`` or ``1_000.0``. None for anything else, including infinity and NaN."""
    digits = _SEPARATED.sub("", text)
    if not _NUMBER.fullmatch(digits) or not any(each.isdigit() for each in digits.lower().split("e")[0]):
        return None
    value = float(digits)
    return value if abs(value) < float("inf") else None


def value_of(node: Node) -> Any:
    """Return the node as None, booleans, numbers, strings, lists and dicts; for a repeated key, the first value."""
    if isinstance(node, Items):
        return [value_of(item) for item in node.items]
    if isinstance(node, Entries):
        values: dict[str, Any] = {}
        for key, value in node.entries:
            if key.text not in values:
                values[key.text] = value_of(value)
        return values
    if not isinstance(node, Scalar) or node.is_null:
        return None
    if node.quoted:
        return node.text
    if node.text in {"true", "false"}:
        return node.text == "true"
    is_whole = node.text.lower().startswith(("0x", "+0x")) or not re.search("[.eE]", node.text)
    found = whole_number(node.text) if is_whole else number(node.text)
    return node.text if found is None else found


def node_of(value: Any, place: Place = NOWHERE) -> Node:
    """Return the node of a value that a program created, so that ``value_of(node_of(value)) == value``.

    Raises:
        TreeError: The value has a type that YAML does not have, or is beyond a limit.
    """
    return _node_of(value, place, 1)


def _node_of(value: Any, place: Place, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise TreeError(place, f"nested deeper than {MAX_DEPTH} levels")
    if value is None:
        return Scalar(place, "null")
    if isinstance(value, bool):
        return Scalar(place, "true" if value else "false")
    if isinstance(value, int):
        return Scalar(place, str(value))
    if isinstance(value, float):
        return Scalar(place, repr(value))
    if isinstance(value, str):
        plain = Scalar(place, value)
        return Scalar(place, value, quoted=value_of(plain) != value or not isinstance(value_of(plain), str))
    if isinstance(value, list | tuple):
        return Items(place, [_node_of(item, place, depth + 1) for item in value])
    if isinstance(value, Mapping):
        entries = [(Scalar(place, str(key)), _node_of(item, place, depth + 1)) for key, item in value.items()]
        return Entries(place, entries)
    raise TreeError(place, f"found {type(value).__name__}, allowed: a string, number, boolean, null, list or mapping")
