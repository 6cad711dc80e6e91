"""Checks of versions: Python, torch, persia and its compiled part, and which file of that part is loaded."""

import hashlib
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import persia
import persia_core
from persia.doctor.check import Check
from persia.runtime.exit_codes import ExitCode

PYTHON = (3, 10)
"""The minimum version of Python."""
REQUIREMENTS = {"torch": "2.4", "numpy": "1.26", "grpcio": "1.85.1", "pydantic": "2.11", "protobuf": "7.35.1"}
"""The minimum versions of packages whose older versions fail late. They equal those in ``pyproject.toml``."""


def checks() -> Iterator[Check]:
    """Yield the checks of versions."""
    yield python(sys.version_info[:3])
    yield from packages(installed(REQUIREMENTS))
    yield core_version(persia.__version__, persia_core.__version__)
    yield core_file(Path(persia_core.__file__), sys.path)
    yield build(Path(persia_core.__file__))


def python(version: tuple[int, ...]) -> Check:
    """Check the version of Python."""
    found = ".".join(map(str, version))
    if version[:2] < PYTHON:
        oldest = ".".join(map(str, PYTHON))
        return Check("python", "fail", found, f"persia needs {oldest} or later", f"install Python {oldest} or later")
    return Check("python", "ok", f"{found}, {sys.executable}")


def installed(names: "dict[str, str] | list[str]") -> dict[str, str | None]:
    """Return the installed version of each package; None if it is not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def packages(found: dict[str, str | None]) -> Iterator[Check]:
    """Yield a check of each package of :data:`REQUIREMENTS`.

    Args:
        found: The installed versions, as :func:`installed` returns them.
    """
    for name, version in found.items():
        oldest = REQUIREMENTS[name]
        command = f"{Path(sys.executable).name} -m pip install '{name}>={oldest}'"
        if version is None:
            yield Check(name, "fail", "not installed", f"persia needs {name} {oldest} or later", command)
        elif number_of(version) < number_of(oldest):
            yield Check(name, "fail", version, f"persia needs {name} {oldest} or later", command)
        else:
            yield Check(name, "ok", version)


def number_of(version: str) -> tuple[int, ...]:
    """Return the release of a version as a tuple of integers: ``2.4.1+cpu`` is (2, 4, 1)."""
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def core_version(package: str, core: str) -> Check:
    """Check that the package and its compiled part have the same version."""
    if package != core:
        why = "the Python package and its compiled part have different versions"
        remedy = "install the wheels persia and persia-core of one release; in a clone: make setup"
        return Check("persia", "fail", f"persia {package}, persia_core {core}", why, remedy, ExitCode.REFUSED)
    return Check("persia", "ok", f"{package}, {Path(persia.__file__).parent}")


def core_file(loaded: Path, path: list[str]) -> Check:
    """Check which file of ``persia_core`` is loaded, and which other files it hides.

    Args:
        loaded: The loaded file.
        path: The folders that Python searches, in order.
    """
    found = [each for folder in dict.fromkeys(path) for each in _cores(Path(folder or "."))]
    hidden = [each for each in dict.fromkeys(found) if each.resolve() != loaded.resolve()]
    if not hidden:
        return Check("persia_core", "ok", f"{loaded}{_features()}")
    listed = ", ".join(map(str, hidden))
    why = "the loaded file comes first on the import path; the hidden ones are not used"
    remedy = f"if that is not intended: rm {shlex.quote(str(loaded))}"
    return Check("persia_core", "warn", f"{loaded} hides {listed}", why, remedy)


def _cores(folder: Path) -> list[Path]:
    """Return the compiled files of ``persia_core`` that Python would find in a folder."""
    if not folder.is_dir():
        return []
    package = folder / "persia_core"
    inside = sorted(package.glob("*.so")) if package.is_dir() else []
    return [*inside, *sorted(folder.glob("persia_core*.so"))]


def _features() -> str:
    return f", features {', '.join(persia_core.FEATURES) or 'none'}"


def build(loaded: Path) -> Check:
    """Compare the file's hash with the ``BUILD_INFO`` next to it, and report how the file was built."""
    how = ", ".join(f"{key} {value}" for key, value in persia_core.BUILD_INFO.items())
    record = loaded.parent / "BUILD_INFO"
    if not record.is_file():
        return Check("build", "ok", how or "nothing is recorded")
    lines = {line.split()[1]: line.split()[0] for line in record.read_text().splitlines() if len(line.split()) > 1}
    expected = lines.get(loaded.name)
    if expected is None:
        return Check("build", "warn", f"{record} does not list {loaded.name}", "the file is of another build", REBUILD)
    if expected != hashlib.sha256(loaded.read_bytes()).hexdigest():
        why = f"{loaded.name} was changed after {record} was written"
        return Check("build", "warn", f"the hash differs from that in {record}", why, REBUILD)
    return Check("build", "ok", f"{how}; the hash is that in {record}")


REBUILD = "make third-party"
"""The command that builds the compiled parts and records their hashes."""


def environment() -> list[tuple[str, str]]:
    """Return the versions of this machine as names and values, to paste into a report."""
    names = [*REQUIREMENTS, "pyarrow", "rich", "typer", "psutil", "obstore", "nats-python"]
    rows = [
        ("persia", persia.__version__),
        ("persia_core", f"{persia_core.__version__}{_features()}"),
        ("built", ", ".join(f"{key} {value}" for key, value in persia_core.BUILD_INFO.items())),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("platform", f"{platform.system()} {platform.release()}, {platform.machine()}, glibc {platform.libc_ver()[1]}"),
    ]
    return [*rows, *((name, version or "not installed") for name, version in installed(names).items())]
