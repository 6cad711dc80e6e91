"""Check that dependencies point one way only: the layers of the architecture, for crates and for Python.

examples -> persia -> persia_core -> cuda -> engine; persia_core -> engine, store, wire -> types -> kernels;
server -> store, wire.
Nothing points back.
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
    "persia-engine": {"persia-kernels", "persia-types"},
    "persia-store": {"persia-kernels", "persia-types"},
    "persia-wire": {"persia-kernels", "persia-types"},
    "persia-embedding-sharded-server": {"persia-kernels", "persia-types", "persia-store", "persia-wire"},
    "persia-cuda": {"persia-kernels", "persia-types", "persia-engine"},
    "persia-core": {"persia-types", "persia-engine", "persia-store", "persia-wire", "persia-cuda"},
}
"""What each crate may depend on; tests may use more. ``persia-contract`` is a dependency of tests only."""

FORBIDDEN_CRATES: dict[str, set[str]] = {
    "persia-kernels": {"tokio", "tonic", "pyo3"},
    "persia-types": {"tokio", "tonic", "pyo3"},
    "persia-engine": {"tokio", "tonic", "pyo3"},
    "persia-store": {"tokio", "tonic", "pyo3"},
    "persia-wire": {"pyo3"},
    "persia-cuda": {"tokio", "tonic", "pyo3"},
    "persia-embedding-sharded-server": {"pyo3"},
}
"""The network and Python stay out of what must work without them."""

FORBIDDEN_STD: dict[str, tuple[str, ...]] = {
    "kernels": ("std::fs", "std::net", "std::thread"),
    "types": ("std::fs", "std::net", "std::thread"),
    "engine": ("std::fs", "std::net"),
    "store": ("std::net",),
}
"""What the sources of a crate may not name; its tests may."""

TESTS = {"tests"}
"""Parts of a crate that hold tests."""

PYTHON: dict[str, set[str]] = {
    "rust_core/core/python": {"persia_core"},
    "persia_py/persia": {"persia", "persia_core"},
    "examples": {"persia"},
}
"""Which of the project's own packages the Python under a folder may import."""

OWN_PACKAGES = {"persia", "persia_core", "examples", "benches", "tests", "tools"}


def crate_errors() -> Iterator[str]:
    """Yield each dependency between crates that points the wrong way."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"]
    done = subprocess.run(command, cwd=ROOT / "rust_core", check=True, stdout=subprocess.PIPE)
    for package in json.loads(done.stdout)["packages"]:
        name = package["name"]
        if name not in CRATES:
            yield f"{name}: a new crate; say in tools/check_layers.py what it may depend on"
            continue
        for dependency in (found["name"] for found in package["dependencies"] if found["kind"] is None):
            own = dependency.startswith("persia-")
            if (own and dependency not in CRATES[name]) or dependency in FORBIDDEN_CRATES.get(name, ()):
                yield f"{name} depends on {dependency}"


def std_errors() -> Iterator[str]:
    """Yield each use of the disk, the network or threads where it does not belong."""
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
    """Yield each import that points the wrong way."""
    for folder, allowed in PYTHON.items():
        for file in sorted((ROOT / folder).rglob("*.py*")):
            if file.suffix not in {".py", ".pyi"}:
                continue
            for line, package in imports(file):
                if package in OWN_PACKAGES - allowed:
                    yield f"{file.relative_to(ROOT)}:{line}: {folder} imports {package}"


def main() -> int:
    """Print what is wrong; 1 when something is."""
    errors = [*crate_errors(), *std_errors(), *python_errors()]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
