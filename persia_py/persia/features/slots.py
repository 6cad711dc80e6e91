"""Compares the slots of a ``persia.yml`` with those of an ``embedding_config.yml``."""

from dataclasses import dataclass
from typing import Any

from persia.embedding.listed import listed
from persia.runtime.yaml_tree import Entries, Items, Node, Place, Scalar, parse, value_of

_DEFAULTS: dict[str, Any] = {
    "pooling": "sum",
    "dtype": "f32",
    "rounding": "nearest",
    "optimizer": None,
    "init": None,
    "admission": None,
    "ttl": None,
}
_PLACES = 10
"""The value of ``sample_fixed_size`` if ``embedding_config.yml`` does not set it."""


@dataclass(frozen=True)
class _Slot:
    """The settings that determine the vectors of a slot.

    Attributes:
        place: The place of its declaration.
        keys: The values by key, as written in the file.
        table: The name of its table.
    """

    place: Place
    keys: dict[str, Any]
    table: str


def differences(persia: tuple[str, str], embedding: tuple[str, str]) -> list[str]:
    """Return the differences between the slots of two valid files; empty if batches have the same meaning with both.

    Args:
        persia: The text and the name of a ``persia.yml``.
        embedding: The text and the name of an ``embedding_config.yml``.
    """
    ours, theirs = _of_features(parse(persia[0])), _of_slots(parse(embedding[0]))
    found = []
    for name, slot in ours.items():
        where = f"{persia[1]}:{slot.place.line}: features.{name}"
        other = theirs.get(name)
        if other is None:
            found.append(f"{where}: {embedding[1]} has no slot `{name}`")
            continue
        there = f"{embedding[1]}:{other.place.line}"
        for key, value in slot.keys.items():
            if value != other.keys[key]:
                message = f"{key} is {_shown(value)}, but {_shown(other.keys[key])} in {there}"
                found.append(f"{where}: {message}")
        both = ours.keys() & theirs.keys()
        shared, also = _sharing(ours, name) & both, _sharing(theirs, name) & both
        if shared != also:
            message = f"the table is shared with {_names(shared - {name})}, but with {_names(also - {name})} in {there}"
            found.append(f"{where}: {message}")
    extra = [(name, f"{embedding[1]}:{slot.place.line}") for name, slot in theirs.items() if name not in ours]
    found += [f"{where}: slots_config.{name}: {persia[1]} has no feature `{name}`" for name, where in extra]
    return found


def _of_features(root: Node) -> dict[str, _Slot]:
    slots = {}
    for name, feature in _children(root, "features").items():
        keys = _keys(feature)
        if not keys["dim"]:
            continue  # the feature has no embedding
        last, table = feature.get("last"), feature.get("table")
        keys |= {"sequence": None if last is None else value_of(last), "sqrt_scaling": False, "hash_stack_rounds": 0}
        slots[name] = _Slot(feature.place, keys, table.text if isinstance(table, Scalar) else name)
    return slots


def _of_slots(root: Node) -> dict[str, _Slot]:
    table_of: dict[str, str] = {}
    groups = root.get("feature_groups") if isinstance(root, Entries) else None
    for group, members in groups.first.items() if isinstance(groups, Entries) else []:
        names = members.items if isinstance(members, Items) else []
        table_of |= {one.text: group for one in names if isinstance(one, Scalar)}
    slots = {}
    for name, slot in _children(root, "slots_config").items():
        keys = _keys(slot)
        raw = _value(slot, "embedding_summation", True) is False
        stack = slot.get("hash_stack_config")
        keys |= {
            "sequence": _value(slot, "sample_fixed_size", _PLACES) if raw else None,
            "sqrt_scaling": _value(slot, "sqrt_scaling", False),
            "hash_stack_rounds": _value(stack, "hash_stack_rounds", 0) if isinstance(stack, Entries) else 0,
        }
        slots[name] = _Slot(slot.place, keys, table_of.get(name, name))
    return slots


def _children(root: Node, block: str) -> dict[str, Entries]:
    node = root.get(block) if isinstance(root, Entries) else None
    inner = node.first if isinstance(node, Entries) else {}
    return {name: one for name, one in inner.items() if isinstance(one, Entries)}


def _keys(slot: Entries) -> dict[str, Any]:
    """Return the keys that both files have, with their defaults."""
    return {"dim": _value(slot, "dim", None)} | {key: _value(slot, key, value) for key, value in _DEFAULTS.items()}


def _value(block: Entries, key: str, default: Any) -> Any:
    node = block.get(key)
    return default if node is None else value_of(node)


def _sharing(slots: dict[str, _Slot], name: str) -> set[str]:
    """Return the slots that share the table of this slot, including itself."""
    return {other for other, slot in slots.items() if slot.table == slots[name].table}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)


def _names(slots: set[str]) -> str:
    return listed(sorted(slots)) if slots else "no other slot"
