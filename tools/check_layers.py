"""Check that dependencies between crates, and between Python modules, follow the layers of the architecture.

examples -> persia -> persia_core -> cuda -> engine; persia_core -> features, engine, store, wire -> types -> kernels;
server -> store, wire; store -> objects -> types.
Inside the package ``persia``, each layer imports only layers below it, without cycles.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CRATES: dict[str, set[str]] = {
    "persia-kernels": set(),
    "persia-types": {"persia-kernels"},
    "persia-contract": {"persia-kernels", "persia-types"},
    "persia-features": {"persia-types"},
    "persia-objects": {"persia-types"},
    "persia-engine": {"persia-kernels", "persia-types"},
    "persia-store": {"persia-kernels", "persia-types", "persia-objects"},
    "persia-wire": {"persia-kernels", "persia-types"},
    "persia-embedding-sharded-server": {"persia-kernels", "persia-types", "persia-store", "persia-wire"},
    "persia-cuda": {"persia-kernels", "persia-types", "persia-engine"},
    "persia-core": {
        "persia-types",
        "persia-features",
        "persia-engine",
        "persia-store",
        "persia-wire",
        "persia-cuda",
    },
}
"""What each crate may depend on; tests may use more. ``persia-contract`` is a dependency of tests only."""

FORBIDDEN_CRATES: dict[str, set[str]] = {
    "persia-kernels": {"tokio", "tonic", "pyo3"},
    "persia-types": {"tokio", "tonic", "pyo3"},
    "persia-features": {"tokio", "tonic", "pyo3"},
    "persia-engine": {"tokio", "tonic", "pyo3"},
    "persia-objects": {"tonic", "pyo3"},
    "persia-store": {"tokio", "tonic", "pyo3", "object_store", "reqwest"},
    "persia-wire": {"pyo3"},
    "persia-cuda": {"tokio", "tonic", "pyo3"},
    "persia-embedding-sharded-server": {"pyo3"},
}
"""The crates for the network and for Python on which each crate may not depend."""

FORBIDDEN_STD: dict[str, tuple[str, ...]] = {
    "kernels": ("std::fs", "std::net", "std::thread"),
    "types": ("std::fs", "std::net", "std::thread"),
    "features": ("std::fs", "std::net", "std::thread"),
    "engine": ("std::fs", "std::net"),
    "store": ("std::net",),
}
"""Names that the sources of a crate may not use; its tests may."""

TESTS = {"tests"}
"""The parts of a crate that contain tests."""

PYTHON: dict[str, set[str]] = {
    "rust_core/core/python": {"persia_core"},
    "persia_py/persia": {"persia", "persia_core"},
    "examples": {"persia"},
}
"""The project's own packages that the Python code in a folder may import."""

OWN_PACKAGES = {"persia", "persia_core", "examples", "benches", "tests", "tools"}


PACKAGE = "persia_py/persia"

LAYERS = (
    "proto",
    "runtime",
    "embedding",
    "features",
    "serving",
    "discovery",
    "feed",
    "distributed",
    "backend",
    "checkpoint",
    "loop",
    "profile",
    "monitor",
    "models",
    "nn",
    "ctx",
    "data",
    "debug",
    "config",
    "trainer",
    "testing",
    "launch",
    "doctor",
    "cli",
)
"""The packages below ``persia``, lowest first. Each imports only those before it. All may import ``persia`` itself."""

PATHS = ("__main__", "env", "errors", "helper", "launcher", "logger", "prelude", "service", "utils")
"""PersiaML's import paths, and ``python -m persia``: they import from every layer, and no layer imports them."""

MOVED = {("persia.embedding", "persia.nn")}
"""Modules that provide a name under its old path."""

FORBIDDEN_NAMES = {"common", "helper", "misc", "copies", "meeting", "stopping", "interfaces", "peers"}
"""Names without meaning, or for which the glossary has a different word."""


def crate_errors() -> Iterator[str]:
    """Yield each dependency between crates in the wrong direction."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"]
    done = subprocess.run(command, cwd=ROOT / "rust_core", check=True, stdout=subprocess.PIPE)
    for package in json.loads(done.stdout)["packages"]:
        name = package["name"]
        if name not in CRATES:
            yield f"{name}: a new crate; add its allowed dependencies to tools/check_layers.py"
            continue
        for dependency in (found["name"] for found in package["dependencies"] if found["kind"] is None):
            own = dependency.startswith("persia-")
            if (own and dependency not in CRATES[name]) or dependency in FORBIDDEN_CRATES.get(name, ()):
                yield f"{name} depends on {dependency}"


def std_errors() -> Iterator[str]:
    """Yield each use of the disk, the network or threads in a crate that must not use them."""
    for crate, names in FORBIDDEN_STD.items():
        for file in sorted((ROOT / "rust_core" / crate / "src").rglob("*.rs")):
            if TESTS & {*file.parts, file.stem}:
                continue
            code = file.read_text().split("#[cfg(test)]\nmod tests {")[0]
            for number, line in enumerate(code.splitlines(), 1):
                used = [] if line.lstrip().startswith("//") else [name for name in names if name in line]
                yield from (f"{file.relative_to(ROOT)}:{number}: {crate} uses {name}" for name in used)


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and top-level package of each absolute import in a file."""
    for node in ast.walk(ast.parse(file.read_text(), filename=str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name.split(".")[0]) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


def python_errors() -> Iterator[str]:
    """Yield each import in the wrong direction."""
    for folder, allowed in PYTHON.items():
        for file in sorted((ROOT / folder).rglob("*.py*")):
            if file.suffix not in {".py", ".pyi"}:
                continue
            for line, package in imports(file):
                if package in OWN_PACKAGES - allowed:
                    yield f"{file.relative_to(ROOT)}:{line}: {folder} imports {package}"


def module_of(file: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = file.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(("persia", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported(file: Path, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and module of each import of the package's own modules, lazy and type-only ones included."""
    name = module_of(file)
    for node in ast.walk(ast.parse(file.read_text(), filename=str(file))):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = name.split(".")[: len(name.split(".")) - node.level + (file.name == "__init__.py")]
                source = ".".join([*parts, *([source] if source else [])])
            names = [f"{source}.{each.name}" for each in node.names]
            found = [each if each in known else source for each in names]
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) and node.args:
            text = node.args[0]
            found = [text.value] if isinstance(text, ast.Constant) and isinstance(text.value, str) else []
        for module in found:
            if module in known and module != name and (name, module) not in MOVED:
                yield getattr(node, "lineno", 0), module


def package_errors() -> Iterator[str]:
    """Yield each upward import inside the package, each cycle, and each unused name."""
    files = {module_of(file): file for file in sorted((ROOT / PACKAGE).rglob("*.py"))}
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        place = file.relative_to(ROOT)
        for part in {*file.relative_to(ROOT / PACKAGE).with_suffix("").parts} & FORBIDDEN_NAMES:
            if place != Path(PACKAGE, "helper.py"):
                yield f"{place}: no module may be named {part}; choose a descriptive name"
        layer = layer_of(name)
        if layer is None:
            yield f"{place}: a new package; add it to the layers in tools/check_layers.py"
            continue
        graph[name] = set()
        for line, module in imported(file, set(files)):
            graph[name].add(module)
            above = layer_of(module)
            if above is not None and above > layer:
                yield f"{place}:{line}: {name} imports {module}, which is in a higher layer"
    yield from (f"import cycle: {' -> '.join(circle)}" for circle in circles(graph))


def layer_of(module: str) -> int | None:
    """Return the height of a module's layer; None if it has none."""
    part = [*module.split("."), ""][1]
    if not part:
        return -1
    if part in PATHS:
        return len(LAYERS)
    return LAYERS.index(part) if part in LAYERS else None


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield each import cycle once, as a path of modules."""
    seen: set[str] = set()
    for start in sorted(graph):
        if start in seen:
            continue
        before: dict[str, str] = {}
        waiting = [start]
        while waiting:
            at = waiting.pop()
            for module in sorted(graph.get(at, ())):
                if module == start:
                    path = [at, start]
                    while path[0] != start:
                        path.insert(0, before[path[0]])
                    seen |= set(path)
                    yield path
                    waiting.clear()
                    break
                if module not in before:
                    before[module] = at
                    waiting.append(module)


def main() -> int:
    """Print all problems. Return 1 if there are any."""
    errors = [*crate_errors(), *std_errors(), *python_errors(), *package_errors()]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
