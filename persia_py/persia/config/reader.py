"""Reads the typed blocks from the tree of a ``persia.yml``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from persia.config.blocks import RESERVED, Config, ModelBlock, OptimizerBlock
from persia.config.findings import Findings, near
from persia.config.models import MODELS, REFUSED, SUPPLIED, arguments_of, arguments_of_class
from persia.config.optimizers import OPTIMIZERS
from persia.config.values import COMPUTED, REQUIRED, Argument, RefusedError, is_optional, read
from persia.runtime.yaml_tree import NOWHERE, Entries, Items, Node, Place, Scalar, node_of

FREE = ("features", "labels")
"""Blocks that the Rust parser reads."""

_EMPTY: Mapping[str, str] = MappingProxyType({})
_LATER = MappingProxyType(dict.fromkeys(RESERVED, "not in this version yet: remove the block"))
_UNSUPPORTED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "train": {
            "baseline": "not a key, but an option of the command: persia train FILE --baseline lightgbm",
        },
    }
)
_MISSING_BLOCKS = {"data": "missing, allowed: at least `data: {train: FILE}`"}


class Reader:
    """Reads blocks, and collects errors.

    Attributes:
        findings: The errors.
        tree: The parsed values with defaults, in the order of the reference.
        guessed: The keys that unknown keys probably mean. They are not also reported as missing.
    """

    def __init__(self, findings: Findings, folder: Path) -> None:
        self.findings = findings
        self._folder = folder
        self.tree = Entries(NOWHERE, [])
        self.guessed: set[str] = set()

    def read(self, root: Entries) -> dict[str, Any]:
        """Return the values of all blocks except ``features`` and ``labels``."""
        values: dict[str, Any] = {}
        fields = Config.model_fields
        self._check_notation(root, "")
        self._check_keys(root, "", fields, _LATER)
        for key, field in fields.items():
            node = root.get(key)
            if key in FREE:
                if node is not None:
                    self.tree.entries.append((Scalar(node.place, key), node))
                continue
            values[key], shown = self._field(root, "", key, field)
            self.tree.entries.append((Scalar(NOWHERE, key), shown))
        return values

    def _check_notation(self, node: Node, path: str) -> None:
        """Report duplicate keys and merge keys in a value, at all levels."""
        places: dict[str, list[Place]] = {}
        for key, _ in node.entries if isinstance(node, Entries) else []:
            places.setdefault(key.text, []).append(key.place)
        for key, value in node.entries if isinstance(node, Entries) else []:
            at, found = _join(path, key.text), places.pop(key.text, None)
            if found is None:  # a repeated key, which was reported at its first occurrence
                continue
            if len(found) > 1:
                self.findings.error(found[1], at, _repeated(found))
            if key.text == "<<":
                message = "merge keys are not supported; an alias (`*name`) repeats a whole value"
                self.findings.error(key.place, at, message)
            elif at not in FREE:
                self._check_notation(value, at)
        for item in node.items if isinstance(node, Items) else []:
            self._check_notation(item, path)

    def _check_keys(
        self, block: Entries, path: str, known: Mapping[str, Any], refused: Mapping[str, str] = _EMPTY
    ) -> None:
        """Report unknown keys, and the keys in ``refused`` with their reasons."""
        for key, _ in block.entries:
            at = _join(path, key.text)
            if key.text in refused:
                self.findings.error(key.place, at, refused[key.text])
            elif key.text not in known and key.text != "<<":
                absent = [name for name in known if block.get(name) is None]
                guess = near(key.text, absent) or near(key.text, known)
                self.guessed |= {_join(path, name) for name in absent if guess.endswith(f" `{name}`?")}
                self.findings.error(key.place, at, f"unknown key{guess}; allowed: {', '.join(known)}")

    def _field(self, block: Entries, path: str, key: str, field: FieldInfo) -> tuple[Any, Node]:
        """Return the value of one key, and its node for :attr:`tree`."""
        node, at, argument = block.get(key), _join(path, key), Argument.of(field)
        kind = _block_of(field.annotation)
        if kind is None:
            value = self._argument(block, path, key, argument)
            return value, _shown(value, node)
        if (node is None or node.is_null) and is_optional(field.annotation):
            return None, _shown(None, node)
        if node is None and argument.default is REQUIRED:
            if at not in self.guessed:
                self.findings.error(block.place, at, _MISSING_BLOCKS.get(at, "missing"))
            return None, _shown(None, None)
        given = node if isinstance(node, Entries) else Entries(block.place if node is None else node.place, [])
        if node is not None and not node.is_null and given is not node:
            self.findings.error(node.place, at, f"found {node.found()}, allowed: a mapping (`key: value` lines)")
            return None, node
        return self._block(kind, given, at, argument.default)

    def _block(self, kind: type[BaseModel], block: Entries, at: str, default: Any) -> tuple[Any, Node]:
        if issubclass(kind, OptimizerBlock):
            return self._optimizer(block, at, default)
        if issubclass(kind, ModelBlock):
            return self._model(block, at, default)
        names = {field.alias or name: field for name, field in kind.model_fields.items()}
        self._check_keys(block, at, names, _UNSUPPORTED.get(at, _EMPTY))
        values: dict[str, Any] = {}
        entries: list[tuple[Scalar, Node]] = []
        for key, field in names.items():
            values[key], shown = self._field(block, at, key, field)
            entries.append((Scalar(NOWHERE, key), shown))
        return values, Entries(block.place, entries)

    def _optimizer(self, block: Entries, at: str, default: OptimizerBlock) -> tuple[Any, Node]:
        kinds = OPTIMIZERS[at.rpartition(".")[2]]
        name = self._choice(block, at, kinds, default)
        if name is None:
            return None, block
        fields = kinds[name].model_fields
        return self._named(block, at, {"name": name}, {key: Argument.of(field) for key, field in fields.items()})

    def _model(self, block: Entries, at: str, default: ModelBlock) -> tuple[Any, Node]:
        """Read the model, which ``name`` or the user's ``class`` selects; ``null`` counts as absent."""
        given, name = (None if one is None or one.is_null else one for one in map(block.get, ("class", "name")))
        if given is not None and name is not None:
            self.findings.error(name.place, _join(at, "name"), "found together with `class`; allowed: one of the two")
        if given is not None:
            return self._class(block, at, given)
        chosen = self._choice(block, at, MODELS, default)
        if chosen is None:
            return None, block
        return self._named(block, at, {"name": chosen, "class": None}, arguments_of(chosen), REFUSED)

    def _class(self, block: Entries, at: str, given: Node) -> tuple[Any, Node]:
        """Read a user's model. Its arguments are checked if they can be read from its source."""
        reference = self._value(given, _join(at, "class"), str)
        arguments: Mapping[str, Argument] | None = None
        if reference is not None:
            try:
                arguments = arguments_of_class(reference, self._folder)
            except LookupError as error:
                self.findings.error(given.place, _join(at, "class"), str(error))
        known = dict.fromkeys(block.first, Argument(Any)) if arguments is None else dict(arguments)
        chosen = {"name": None, "class": reference}
        known = {
            key: replace(one, default=COMPUTED) if key in SUPPLIED or one.default is not REQUIRED else one
            for key, one in known.items()
            if key not in chosen
        }
        return self._named(block, at, chosen, known)

    def _choice(
        self, block: Entries, at: str, kinds: Mapping[str, Any], default: OptimizerBlock | ModelBlock
    ) -> str | None:
        """Return the ``name`` of a block, which must be one of ``kinds``; if absent, the default."""
        node = block.get("name")
        if node is None or node.is_null:
            return default.name
        text = node.text if isinstance(node, Scalar) else ""
        if text in kinds:
            return text
        guess = near(text, kinds).replace(",", ";", 1)
        message = f"found {node.found()}, allowed: {', '.join(kinds)}{guess}"
        self.findings.error(node.place, _join(at, "name"), message)
        return None

    def _named(
        self,
        block: Entries,
        at: str,
        chosen: Mapping[str, str | None],
        arguments: Mapping[str, Argument],
        refused: Mapping[str, str] = _EMPTY,
    ) -> tuple[Any, Node]:
        """Read the arguments of the object that the keys in ``chosen`` select. Missing ones get their defaults."""
        self._check_keys(block, at, {**chosen, **arguments}, refused)
        values: dict[str, Any] = {key: value for key, value in chosen.items() if value is not None}
        entries = [(Scalar(NOWHERE, key), _shown(value, block.get(key))) for key, value in values.items()]
        for key, argument in arguments.items():
            if argument.default is COMPUTED and block.get(key) is None:
                continue
            values[key] = self._argument(block, at, key, argument)
            entries.append((Scalar(NOWHERE, key), _shown(values[key], block.get(key))))
        return values, Entries(block.place, entries)

    def _argument(self, block: Entries, at: str, key: str, argument: Argument) -> Any:
        node = block.get(key)
        if node is not None:
            return self._value(node, _join(at, key), argument.annotation, argument.metadata)
        if argument.default is REQUIRED:
            if _join(at, key) not in self.guessed:
                self.findings.error(block.place, _join(at, key), f"missing, allowed: {argument.allowed}")
            return None
        return argument.default

    def _value(self, node: Node, at: str, annotation: Any, metadata: Sequence[Any] = ()) -> Any:
        try:
            return read(annotation, node, metadata)
        except RefusedError as refused:
            self.findings.error(refused.node.place, at + refused.path, str(refused))
            return None


def _repeated(places: list[Place]) -> str:
    """Return the message about a duplicate key."""
    if len(places) == 2:
        where = f", first on line {places[0].line}" if places[0].line else ""
        return f"appears twice{where}: remove one"
    lines = [str(line) for line in dict.fromkeys(place.line for place in places) if line]
    where = "" if not lines else f", on line{'s' * (len(lines) > 1)} {', '.join(lines)}"
    return f"appears {len(places)} times{where}: keep one"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _block_of(annotation: Any) -> type[BaseModel] | None:
    """Return the block class of a field; None if the field holds a value."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _shown(value: Any, node: Node | None) -> Node:
    return node_of(value, NOWHERE if node is None else node.place)
