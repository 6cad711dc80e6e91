"""The allowed values of a key, by the annotation of its field. A value is converted, or refused with a message."""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from persia.config.findings import near
from persia.runtime.yaml_tree import Entries, Items, Node, Scalar, number, value_of, whole_number

REQUIRED: Any = object()
"""The default of a key that must be set."""
COMPUTED: Any = object()
"""The default of a key whose value is computed where it is used."""


@dataclass(frozen=True)
class Argument:
    """A key of a block: its allowed values, and its description.

    Attributes:
        annotation: The type.
        metadata: The limits that are not in the annotation.
        default: The value if the key is not set; :data:`REQUIRED` if it must be set.
        text: The description in the reference.
    """

    annotation: Any
    metadata: Sequence[Any] = ()
    default: Any = REQUIRED
    text: str = ""

    @classmethod
    def of(cls, field: FieldInfo) -> "Argument":
        """Return the key that a field of a block declares."""
        default = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        return cls(field.annotation, field.metadata, default, field.description or "")

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        return allowed(self.annotation, self.metadata)


class RefusedError(ValueError):
    """The error for a value that is not allowed for a key.

    Attributes:
        node: The value, or the part of it that is wrong.
        path: The path of the part within the value, such as ``[0]``; empty for the whole value.
    """

    def __init__(self, node: Node, allowed: str, choices: Sequence[str] = ()) -> None:
        guess = near(node.text, choices) if isinstance(node, Scalar) else ""
        super().__init__(f"found {node.found()}, allowed: {allowed}{guess.replace(',', ';', 1)}")
        self.node = node
        self.path = ""

    def within(self, step: str) -> "RefusedError":
        """Return this error for a part of a larger value; ``step`` is the path from that value to the part."""
        self.path = step + self.path
        return self


@dataclass(frozen=True)
class Range:
    """The limits of a number; None means no limit.

    Attributes:
        ge: The inclusive minimum.
        gt: The exclusive minimum.
        le: The inclusive maximum.
        lt: The exclusive maximum.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    @classmethod
    def of(cls, metadata: Sequence[Any]) -> "Range":
        """Return the limits in the metadata of a field."""
        limits: dict[str, float] = {}
        for each in metadata:
            for inner in each.metadata if isinstance(each, FieldInfo) else [each]:
                limits |= {key: getattr(inner, key) for key in ("ge", "gt", "le", "lt") if hasattr(inner, key)}
        return cls(**limits)

    def has(self, value: float) -> bool:
        """Whether a number is in the range."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        ge, gt, le, lt = map(_limit, (self.ge, self.gt, self.le, self.lt))
        if ge and le:
            return f" from {ge} to {le}"
        lower = f" of at least {ge}" if ge else f" above {gt}" if gt else ""
        upper = f" at most {le}" if le else f" below {lt}" if lt else ""
        return f"{lower}{' and' if lower and upper else ''}{upper}"


def _limit(limit: float | None) -> str:
    if limit is None:
        return ""
    return str(int(limit)) if abs(limit) < 1e15 and limit == int(limit) else repr(limit)


def read(annotation: Any, node: Node, metadata: Sequence[Any] = ()) -> Any:
    """Return the value of a node, converted to the type of the annotation.

    Args:
        annotation: A type: bool, int, float, str, None, Any, a Literal, a list, tuple, Sequence or dict of them, a
            union, or one with limits in ``Annotated``. For any other annotation, the text of the value determines its
            type.
        node: The value.
        metadata: Limits that are not part of the annotation.

    Raises:
        RefusedError: The value is not allowed by the type.
    """
    annotation, metadata = _unpacked(annotation, metadata)
    if _is_union(annotation):
        return _read_union(annotation, node, metadata)
    origin = get_origin(annotation)
    if origin is Literal:
        if isinstance(node, Scalar) and node.text in get_args(annotation):
            return node.text
        raise RefusedError(node, allowed(annotation), get_args(annotation))
    if annotation in _SCALARS:
        value = _SCALARS[annotation](node) if isinstance(node, Scalar) and not node.is_null else None
        if value is not None and (annotation in {bool, str} or Range.of(metadata).has(value)):
            return value
    elif annotation is None or annotation is type(None):
        if node.is_null:
            return None
    elif _is_list(annotation):
        return _read_list(annotation, node)
    elif origin is dict or annotation is dict:
        return _read_dict(annotation, node)
    else:
        return value_of(node)
    raise RefusedError(node, allowed(annotation, metadata))


def allowed(annotation: Any, metadata: Sequence[Any] = (), *, plural: bool = False) -> str:
    """Return a description of what an annotation allows, for messages and the reference."""
    annotation, metadata = _unpacked(annotation, metadata)
    if _is_union(annotation):
        members = [*_members(annotation)]
        if float in members and int in members:
            members.remove(int)  # an integer is allowed wherever a float is allowed
        return ", or ".join(allowed(one, metadata, plural=plural) for one in members)
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if annotation in {int, float}:
        words = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers")}[annotation]
        return f"{words[plural]}{Range.of(metadata)}"
    if annotation in {bool, str}:
        return {bool: ("true, false", "true, false"), str: ("a string", "strings")}[annotation][plural]
    if _is_list(annotation):
        count, item = _item(annotation)
        number_of = f"{count} " if count else ""
        if item is Any:
            return f"{'lists' if plural else 'a list'}{f' of {count}' if count else ''}"
        return f"{'lists' if plural else 'a list'} of {number_of}{allowed(item, plural=True)}"
    if get_origin(annotation) is dict:
        _, item = get_args(annotation)
        return f"{'mappings' if plural else 'a mapping'} of names to {allowed(item, plural=True)}"
    return "anything"


def is_optional(annotation: Any) -> bool:
    """Whether an annotation allows ``null``."""
    annotation, _ = _unpacked(annotation, ())
    return annotation is Any or (_is_union(annotation) and type(None) in get_args(annotation))


def _text(node: Scalar) -> str | None:
    return node.text or None


def _boolean(node: Scalar) -> bool | None:
    return {"true": True, "false": False}.get(node.text) if not node.quoted else None


def _whole(node: Scalar) -> int | None:
    return None if node.quoted else whole_number(node.text)


def _number(node: Scalar) -> float | None:
    return None if node.quoted else number(node.text)


_SCALARS: dict[Any, Any] = {str: _text, bool: _boolean, int: _whole, float: _number}


def _unpacked(annotation: Any, metadata: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return an annotation without ``Annotated``, and all its limits."""
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata = [*metadata, *more]
    return annotation, metadata


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in {Union, types.UnionType}


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union except None, numbers before strings: ``2024`` is a number if numbers are allowed."""
    members = [one for one in get_args(annotation) if one is not type(None)]
    yield from sorted(members, key=lambda one: one is str)


def _read_union(annotation: Any, node: Node, metadata: Sequence[Any]) -> Any:
    if node.is_null and is_optional(annotation):
        return None
    inner = []
    for one in _members(annotation):
        try:
            return read(one, node, metadata)
        except RefusedError as refused:
            inner.append(refused)
    deeper = next((refused for refused in inner if refused.node is not node), None)
    choices = [word for one in _members(annotation) if get_origin(one) is Literal for word in get_args(one)]
    raise deeper or RefusedError(node, allowed(annotation, metadata), choices)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) in {list, tuple, Sequence} or annotation in {list, tuple, Sequence}


def _item(annotation: Any) -> tuple[int, Any]:
    """Return the length of a list (0 means any) and the type of its items."""
    arguments = get_args(annotation)
    if not arguments:
        return 0, Any
    fixed = get_origin(annotation) is tuple and arguments[-1] is not Ellipsis
    return len(arguments) if fixed else 0, arguments[0]


def _read_list(annotation: Any, node: Node) -> Any:
    count, item = _item(annotation)
    if not isinstance(node, Items) or (count and len(node.items) != count):
        if isinstance(node, Items):
            raise RefusedError(node, f"{allowed(annotation)}; this list has {len(node.items)}")
        raise RefusedError(node, allowed(annotation))
    values = [_read_part(item, one, f"[{index}]") for index, one in enumerate(node.items)]
    return tuple(values) if get_origin(annotation) is tuple or annotation is tuple else values


def _read_dict(annotation: Any, node: Node) -> Any:
    if node.is_null:
        return {}
    if not isinstance(node, Entries):
        raise RefusedError(node, allowed(annotation))
    item = (get_args(annotation) or (str, Any))[1]
    return {name: _read_part(item, value, f".{name}") for name, value in node.first.items() if name != "<<"}


def _read_part(annotation: Any, node: Node, step: str) -> Any:
    try:
        return read(annotation, node)
    except RefusedError as refused:
        raise refused.within(step) from None
