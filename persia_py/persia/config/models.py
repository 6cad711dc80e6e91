"""The models that ``model`` can select, and their arguments.

The arguments are read from source files, without importing torch or the models.
"""

import ast
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Union, get_origin

from persia.config.findings import near
from persia.config.values import COMPUTED, REQUIRED, Argument

MODELS: Mapping[str, str] = MappingProxyType(
    {
        "autoint": "persia.models.autoint:AutoInt",
        "dcnv2": "persia.models.dcnv2:DCNv2",
        "dlrm": "persia.models.dlrm:DLRM",
        "tiny": "persia.models.tiny:Tiny",
    }
)
"""The names allowed in ``model.name``, and their classes."""

SUPPLIED = ("num_dense", "num_slots", "embedding_dims", "num_labels", "inputs")
"""Arguments that the trainer passes to every model that has them."""

REFUSED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys((*SUPPLIED, "embedding_dim"), "found, but its value follows from `features` and `labels`: remove it")
)
"""Arguments of :data:`MODELS` that a file must not set, and the reasons."""

_TYPES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "Any": Any,
    "Sequence": Sequence,
    "list": list,
    "tuple": tuple,
}


@cache
def arguments_of(name: str) -> Mapping[str, Argument]:
    """Return the arguments of a built-in model that a file may set."""
    module, _, class_name = MODELS[name].partition(":")
    tree = ast.parse((Path(__file__).parents[1] / "models" / f"{module.rpartition('.')[2]}.py").read_text("utf-8"))
    declared = _declared(_classes(tree)[class_name]) or {}
    arguments = {key: argument for key, argument in declared.items() if key not in REFUSED}
    # The trainer supplies arguments that the class requires, because it knows the dimensions.
    return {
        key: replace(argument, default=COMPUTED) if argument.default is REQUIRED else argument
        for key, argument in arguments.items()
    }


def arguments_of_class(reference: str, folder: Path) -> Mapping[str, Argument] | None:
    """Return the arguments of a user's class; None if they cannot be read from its source.

    Args:
        reference: ``module:Class``.
        folder: The folder that is searched for the module before ``sys.path``.

    Raises:
        LookupError: The module or class does not exist. The message has the next step.
    """
    module, _, name = reference.partition(":")
    if not module or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise LookupError(f"found `{reference}`, allowed: `module:Class`, such as `my_model:MyModel`")
    file = _source(module, folder)
    if file is None or file.suffix != ".py":
        return None
    try:
        classes = _classes(ast.parse(file.read_text(encoding="utf-8"), str(file)))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
        raise LookupError(f"{file} cannot be read: {error}") from error
    if name not in classes:
        # The file may import the class from elsewhere; imports are not followed.
        if not classes:
            return None
        guess = near(name, classes)
        if guess:
            raise LookupError(f"{file} has no class `{name}`{guess}")
        return None
    return _declared(classes[name])


def _source(module: str, folder: Path) -> Path | None:
    """Return the file of a module without importing the module; None if it has no file."""
    places: Sequence[str] | None = [str(folder), *sys.path]
    name = ""
    spec = None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, places) if places else None
        if spec is None:
            raise LookupError(
                f"no module `{name}` in {folder}, nor among the installed packages; move it to that folder, add its "
                "folder to PYTHONPATH, or install it: pip install -e FOLDER"
            )
        places = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin else None


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _declared(declared: ast.ClassDef) -> dict[str, Argument] | None:
    """Return the arguments of a class; None if it has no ``__init__``, or one that accepts any argument."""
    made = (node for node in declared.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    function = next(made, None)
    if function is None or function.args.kwarg is not None:
        return None
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args][1:]
    defaults: list[ast.expr | None] = [None] * len(positional)
    if arguments.defaults:
        defaults[-len(arguments.defaults) :] = arguments.defaults
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    texts = _texts(ast.get_docstring(declared) or "")
    return {
        one.arg: Argument(kind := _type(one.annotation), (), _default(default, kind), texts.get(one.arg, ""))
        for one, default in pairs
    }


def _default(node: ast.expr | None, kind: Any) -> Any:
    if node is None:
        return REQUIRED
    try:
        default = ast.literal_eval(node)
    except ValueError:
        return COMPUTED
    return [*default] if isinstance(default, tuple) and get_origin(kind) is not tuple else default


def _type(node: ast.expr | None) -> Any:
    """Return the type of an annotation; Any if YAML has no such type."""
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name):
        return _TYPES.get(node.id, Any)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _type(node.left), _type(node.right)
        return Any if Any in (left, right) else Union[left, right]  # noqa: UP007 - the union is built at run time
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
        return _literal(node.slice)
    if isinstance(node, ast.Subscript):
        kind = _type(node.value)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        types = tuple(Ellipsis if isinstance(one, ast.Constant) and one.value is ... else _type(one) for one in items)
        return kind if kind is Any else kind[types]
    return Any


def _literal(node: ast.expr) -> Any:
    """Return the type of a choice of strings.

    A choice with values of other types gives Any, because YAML may write these values in several ways.
    """
    items = node.elts if isinstance(node, ast.Tuple) else [node]
    choices = [one.value if isinstance(one, ast.Constant) else None for one in items]
    return Literal[tuple(choices)] if choices and all(isinstance(one, str) for one in choices) else Any


def _texts(docstring: str) -> dict[str, str]:
    """Return the description of each argument from the section ``Args:`` of a docstring."""
    texts: dict[str, str] = {}
    name, inside = "", False
    for line in docstring.splitlines():
        indent = len(line) - len(line.lstrip())
        if not indent and line.strip():
            inside, name = line.strip() == "Args:", ""
        elif inside and indent == 4 and ":" in line:
            name, _, text = line.strip().partition(":")
            texts[name] = text.strip()
        elif inside and name and line.strip():
            texts[name] += f" {line.strip()}"
    return texts
