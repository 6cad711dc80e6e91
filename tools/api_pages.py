"""Write the pages of the Python API, in reStructuredText, for the documentation site.

Usage: tools/api_pages.py FOLDER

The sources are read and not imported, so neither PyTorch nor the compiled extension is needed. A reference in a
docstring to a name that does not exist is an error.
"""

import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe
import rust_docs
from api_modules import GROUPS, OF_PACKAGE
from griffe import Alias, Attribute, Class, Expr, ExprName, Function, Module, Object, ParameterKind, Parameters
from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "rust_core" / "core"
ROLE = re.compile(r":(class|func|meth|attr|data|mod|exc):`(~?)([\w.]+)`")
NAPOLEON = Config(napoleon_use_ivar=True, napoleon_use_rtype=False)


class Pages:
    """The pages, written from one reading of the sources."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(CORE / "python" / "persia_core", folder / "persia_core", ignore=shutil.ignore_patterns("*.so"))
        shutil.copy(
            CORE / "src" / "errors.py", folder / "persia_core"
        )  # the names that the extension contains; the stub is merged
        loader = griffe.GriffeLoader(search_paths=[ROOT / "persia_py", folder], allow_inspection=False)
        loader.load("persia_core")
        loader.load("persia")
        loader.resolve_aliases(implicit=True, external=False)
        self.tree = loader.modules_collection
        self.rust = rust_docs.read()
        self.modules = [name for names in GROUPS.values() for name in names]
        self.names = {name: self._public(name) for name in self.modules}
        self.homes: dict[str, str] = {}  # the page that describes an object, by the path of the object
        for module, names in self.names.items():
            for name in names:
                self.homes.setdefault(_target(self.tree[f"{module}.{name}"]).path, f"{module}.{name}")
        self.wrong: list[str] = []

    def _public(self, module: str) -> list[str]:
        """Return the public names of a module: those of its ``__all__``, or those that it defines."""
        if module == "persia":
            return []
        found = self.tree[module]
        if found.exports is not None:
            return sorted((str(name) for name in found.exports), key=str.lower)
        if "__all__" in found.members:  # the name is another path of a module, whose __all__ is used
            return self._public(str(found.members["__all__"].target_path).removesuffix(".__all__"))
        return [
            name
            for name, member in found.members.items()
            if not name.startswith("_") and not member.is_alias and member.docstring
        ]

    def index(self) -> str:
        """Return the page that lists the modules."""
        lines = [*_heading("Python API", "="), "What a script imports, generated from the sources."]
        for group, modules in GROUPS.items():
            lines += ["", *_heading(group, "-"), ".. toctree::", "   :maxdepth: 1", ""]
            lines += [f"   {module}" for module in modules]
        return "\n".join([*lines, ""])

    def page(self, module: str) -> str:
        """Return the page of a module."""
        found = _target(self.tree[module])
        text = self._described(found, module) if found.docstring else ""
        lines = [*_heading(module, "="), f".. py:module:: {module}", "", ".. highlight:: default", "", text, ""]
        if module == "persia":
            lines = [*lines, *(f"* :py:obj:`persia.{name} <{home}.{name}>`" for name, home in OF_PACKAGE.items())]
        for name in self.names[module]:
            target = _target(self.tree[f"{module}.{name}"])
            home = self.homes[target.path]
            if home == f"{module}.{name}":
                lines += [*self._entry(target, name, ""), ""]
            else:
                lines += [f"``{name}``: see :py:obj:`{home}`.", ""]
        return "\n".join(lines)

    def _entry(self, found: Object, name: str, indent: str, *, of: Class | None = None) -> Iterator[str]:
        """Yield the description of a name."""
        options: list[str] = []
        inner: list[tuple[str, Object]] = []
        if isinstance(found, Class):
            kind = "exception" if _is_error(found) else "class"
            made = found.members.get("__new__")  # a class of the extension
            given = made.parameters if isinstance(made, Function) else found.parameters
            shown = "" if kind == "exception" or _is_enum(found) else self._parameters(given, bound=True)
            inner = [*self._members(found)]
        elif isinstance(found, Function):
            kind = "method" if of else "function"
            static = "staticmethod" in found.labels
            shown = self._parameters(found.parameters, bound=of is not None and not static)
            shown += f" -> {self._type(found.returns)}" if found.returns is not None else ""
            options = [f"{label}:" for label in ("classmethod", "staticmethod", "async") if label in found.labels]
        else:
            kind = "property" if "property" in found.labels else "attribute" if of else "data"
            shown = ""
            if found.annotation is not None:
                options.append(f"type: {self._type(found.annotation)}")
            if kind != "property" and found.value is not None and len(str(found.value)) < 80:
                options.append(f"value: {found.value}")
        yield f"{indent}.. py:{kind}:: {name}{shown}"
        canonical = f"{found.path}"
        home = self._home(canonical)
        if home != canonical:
            options.append(f"canonical: {canonical}")
        yield from (f"{indent}   :{option}" for option in options)
        yield ""
        if isinstance(found, Class) and (bases := self._bases(found)):
            yield f"{indent}   Bases: {bases}\n"
        yield textwrap.indent(self._described(found, name), f"{indent}   ")
        for each, member in inner:
            yield ""
            yield from self._entry(member, each, f"{indent}   ", of=found if isinstance(found, Class) else None)

    def _parameters(self, given: Parameters, *, bound: bool) -> str:
        """Return the parameters of a signature. ``bound`` omits the first one, which is the object."""
        parts: list[str] = []
        kinds = [each.kind for each in given]
        for place, each in enumerate(given):
            if bound and place == 0 and each.name in {"self", "cls"}:
                continue
            star = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}.get(each.kind, "")
            only = each.kind is ParameterKind.keyword_only
            if only and ParameterKind.var_positional not in kinds and "*" not in parts:
                parts.append("*")
            text = f"{star}{each.name.lstrip('*')}"
            if each.annotation is not None:
                text += f": {self._type(each.annotation)}"
            if each.default is not None and not star:
                text += f" = {each.default}" if each.annotation is not None else f"={each.default}"
            parts.append(text)
            following = kinds[place + 1] if place + 1 < len(kinds) else None
            if each.kind is ParameterKind.positional_only and following is not ParameterKind.positional_only:
                parts.append("/")
        return f"({', '.join(parts)})"

    def _type(self, given: str | Expr) -> str:
        """Return an annotation with the full names of described objects. An alias without a description is replaced."""
        if isinstance(given, str):
            return given
        parts: list[str] = []
        for each in given.iterate(flat=True):
            if not isinstance(each, ExprName):
                parts.append(str(each))
                continue
            found = self._at(each.canonical_path)
            if found is not None and found.path in self.homes:
                parts.append(self.homes[found.path])
            elif isinstance(found, Attribute) and isinstance(found.parent, Module) and len(str(found.value)) < 80:
                parts.append(self._type(found.value or each.name))
            else:
                parts.append(each.name)
        return "".join(parts)

    def _members(self, found: Class) -> Iterator[tuple[str, Object]]:
        """Yield the public members of a class, and those that it inherits from a class without a description."""
        for name, each in found.all_members.items():
            if name.startswith("_"):
                continue
            try:
                member = _target(each)
            except griffe.AliasResolutionError:
                continue
            owner = member.parent
            if owner is not found and (
                owner is None or owner.path in self.homes or not owner.path.startswith("persia")
            ):
                continue
            if isinstance(member, Attribute) and "property" not in member.labels and not member.docstring:
                if not _is_enum(found):
                    continue
            elif isinstance(member, Class) and not member.docstring:
                continue
            yield name, member

    def _bases(self, found: Class) -> str:
        paths = [str(getattr(base, "canonical_path", base)) for base in found.bases]
        return ", ".join(self._link(path, path.rpartition(".")[2]) for path in paths if path != "object")

    def _home(self, path: str) -> str:
        """Return the documented path of an object, or its own path."""
        head, rest = path, ""
        while head:
            if head in self.homes:
                return self.homes[head] + rest
            head, _, last = head.rpartition(".")
            rest = f".{last}{rest}"
        return path

    def _link(self, path: str, shown: str) -> str:
        """Return a link to an object, or its name, if it has no description."""
        home = self._home(path)
        if path in self.modules:
            return f":py:mod:`{shown} <{path}>`"
        return f":py:obj:`{shown} <{home}>`" if home != path or path in self.homes else f"``{shown}``"

    def _described(self, found: Object, name: str) -> str:
        """Return the text of an object, with its sections as lists of fields."""
        text = found.docstring.value if found.docstring else self._of_extension(found)
        place = f"{found.path}"
        what = "class" if isinstance(found, Class) else "module" if isinstance(found, Module) else "function"
        lines = GoogleDocstring(text, NAPOLEON, what=what, name=name).lines()
        return ROLE.sub(lambda role: self._reference(place, *role.groups()), "\n".join(lines))

    def _of_extension(self, found: Object) -> str:
        """Return the text of an object of the compiled extension."""
        if not found.path.startswith("persia_core."):
            return ""
        parent = found.parent
        return self.rust.get(f"{parent.name}.{found.name}" if isinstance(parent, Class) else found.name, "")

    def _reference(self, place: str, role: str, short: str, target: str) -> str:
        """Return the target of a role of a docstring, as a link or as code."""
        shown = target.rpartition(".")[2] if short else target
        root = target.partition(".")[0]
        if "." in target and root not in {"persia", "persia_core"} and self._find(root, place) is None:
            return f"``{shown}``"  # an object of another package
        found = self._find(target, place)
        if found is None:
            self.wrong.append(f"{place}: :{role}:`{target}`: there is no such name")
            return f"``{shown}``"
        return self._link(found.path, shown)

    def _find(self, target: str, place: str) -> Object | None:
        """Return the object that a docstring at ``place`` names, looked up from the inner to the outer scope."""
        scopes = [place]
        while "." in scopes[-1]:
            scopes.append(scopes[-1].rpartition(".")[0])
        for path in [*(f"{scope}.{target}" for scope in scopes), target]:
            if (found := self._at(path)) is not None:
                return found
        name, dot, rest = target.removeprefix("persia.").partition(".")
        alike = [path for path in self.homes if path.rpartition(".")[2] == name]
        return self._at(f"{alike[0]}{dot}{rest}") if len(alike) == 1 else None

    def _at(self, path: str) -> Object | None:
        root, *names = path.split(".")
        if root not in self.tree:
            return None
        found: Object = self.tree[root]
        for name in names:
            member = found.all_members.get(name) if hasattr(found, "all_members") else None
            if member is None:
                return None
            try:
                found = _target(member)
            except (griffe.AliasResolutionError, griffe.CyclicAliasError):
                return None
        return found


def write(folder: Path) -> None:
    """Write all pages into an empty folder.

    Raises:
        SystemExit: A docstring names something that does not exist.
    """
    with tempfile.TemporaryDirectory() as stubs:
        pages = Pages(Path(stubs))
        texts = {"index": pages.index(), **{module: pages.page(module) for module in pages.modules}}
    if pages.wrong:
        raise SystemExit("\n".join(pages.wrong))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"{name}.rst").write_text(text, encoding="utf-8")


def _target(found: Object | Alias) -> Object:
    return found.final_target if isinstance(found, Alias) else found


def _is_error(found: Class) -> bool:
    return any(re.search(r"(Error|Exception)$", str(base)) for base in found.bases)


def _is_enum(found: Class) -> bool:
    return any(str(base).rpartition(".")[2] in {"Enum", "IntEnum"} for base in found.bases)


def _heading(text: str, line: str) -> list[str]:
    return [text, line * len(text), ""]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
