"""The repository's own tools: missing requirements of a machine, the direction of dependencies."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

pytestmark = pytest.mark.clone


def load(name: str) -> ModuleType:
    """Import a tool by its file, because ``tools/`` is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_import_that_points_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = load("check_layers")
    package = tmp_path / "persia_py" / "persia"
    package.mkdir(parents=True)
    (package / "good.py").write_text("import persia_core.forward\nfrom persia import env\nfrom . import data\n")
    (package / "bad.py").write_text("import os\n\n\ndef f():\n    from tests.conftest import ROOT\n")
    example = tmp_path / "examples" / "dlrm"
    example.mkdir(parents=True)
    (example / "train.py").write_text("import persia_core\nimport census\n")
    monkeypatch.setattr(layers, "ROOT", tmp_path)
    assert list(layers.python_errors()) == [
        "persia_py/persia/bad.py:5: persia_py/persia imports tests",
        "examples/dlrm/train.py:1: examples imports persia_core",
    ]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], list[str]]:
    """Return the findings of the layer check in a package of these files."""
    layers = load("check_layers")
    monkeypatch.setattr(layers, "ROOT", tmp_path)

    def check(files: dict[str, str]) -> list[str]:
        for name, content in {"__init__.py": "", "runtime/__init__.py": "", "ctx/__init__.py": "", **files}.items():
            path = tmp_path / "persia_py" / "persia" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return list(layers.package_errors())

    return check


Check = Callable[[dict[str, str]], list[str]]


def test_layers_that_import_what_is_below_them_are_right(package: Check) -> None:
    files = {
        "runtime/errors.py": "from persia import __version__\n",
        "ctx/__init__.py": "from persia.ctx.train import TrainCtx\n",
        "ctx/train.py": "from persia.runtime.errors import PersiaError\nfrom persia.runtime import errors\n",
        "errors.py": "from persia.runtime.errors import PersiaError\n",
    }
    assert package(files) == []


@pytest.mark.parametrize(
    "line",
    [
        "from persia.ctx.train import TrainCtx",
        "from persia.ctx import train",
        "import persia.ctx.train",
        "def f() -> None:\n    from persia.ctx import train",
        "if TYPE_CHECKING:\n    from persia.ctx.train import TrainCtx",
        "from ..ctx import train",
        "importlib.import_module('persia.ctx.train')",
    ],
)
def test_an_import_of_a_layer_above_is_named(package: Check, line: str) -> None:
    found = package({"runtime/errors.py": line + "\n", "ctx/train.py": ""})
    number = 1 + line.count("\n")
    wanted = f"persia_py/persia/runtime/errors.py:{number}: persia.runtime.errors imports persia.ctx.train"
    assert found == [wanted + ", which is in a higher layer"]


def test_no_layer_imports_the_paths_of_persiaml(package: Check) -> None:
    found = package({"ctx/train.py": "from persia import env\n", "env.py": ""})
    assert found == ["persia_py/persia/ctx/train.py:1: persia.ctx.train imports persia.env, which is in a higher layer"]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_circle_of_imports_is_named(package: Check, lazy: bool) -> None:
    back = "def f() -> None:\n    from persia.ctx.one import f\n" if lazy else "from persia.ctx.one import f\n"
    files = {"ctx/one.py": "from persia.ctx.two import f\n", "ctx/two.py": "from persia.ctx.three import f\n"}
    found = package({**files, "ctx/three.py": back})
    assert found == ["import cycle: persia.ctx.one -> persia.ctx.two -> persia.ctx.three -> persia.ctx.one"]


def test_names_that_say_nothing_are_refused(package: Check) -> None:
    found = package({"ctx/common.py": "", "runtime/peers/__init__.py": "", "helper.py": "", "ctx/helper.py": ""})
    assert found == [
        "persia_py/persia/ctx/common.py: no module may be named common; choose a descriptive name",
        "persia_py/persia/ctx/helper.py: no module may be named helper; choose a descriptive name",
        "persia_py/persia/runtime/peers/__init__.py: no module may be named peers; choose a descriptive name",
    ]


def test_a_new_package_has_to_be_put_into_its_layer(package: Check) -> None:
    found = package({"gateway/__init__.py": ""})
    assert found == [
        "persia_py/persia/gateway/__init__.py: a new package; add it to the layers in tools/check_layers.py"
    ]


def test_disk_and_network_are_noticed_where_they_do_not_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = load("check_layers")
    source = tmp_path / "rust_core" / "store" / "src"
    source.mkdir(parents=True)
    (source / "lib.rs").write_text(
        "//! No std::net here.\nuse std::fs;\nuse std::net::TcpStream;\n"
        "#[cfg(test)]\nmod tests {\n    use std::net;\n}\n"
    )
    monkeypatch.setattr(layers, "ROOT", tmp_path)
    assert list(layers.std_errors()) == ["rust_core/store/src/lib.rs:3: store uses std::net"]


def test_the_layers_of_this_repository_hold() -> None:
    assert load("check_layers").main() == 0


def machine(path: Path, python: str) -> tuple[int, str]:
    """Run the check with only the programs in ``path``."""
    done = subprocess.run(
        [shutil.which("sh") or "sh", "tools/check_machine.sh", python],
        cwd=ROOT,
        env={**os.environ, "PATH": str(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_everything_a_machine_lacks_is_named_at_once(tmp_path: Path) -> None:
    for tool in ("sed", "cut", "sort", "head"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    code, said = machine(tmp_path, "python3")
    assert code == 2
    for lack in ("missing: python3\n", "missing: cargo and rustc 1.", "missing: a C compiler"):
        assert lack in said, said
    assert said.count("missing: ") == 3

    def fake(name: str, body: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    fake("python3", 'test "$1" = -V && echo Python 3.9.2; exit 1')
    fake("cargo", "exit 0")
    fake("rustc", "echo 'rustc 1.70.0 (abc 2023-01-01)'")
    fake("cc", "exit 0")
    code, said = machine(tmp_path, "python3")
    assert code == 2
    assert "Python 3.10 or later (python3 is Python 3.9.2)" in said
    assert "(this one is 1.70.0)" in said
    assert said.count("missing: ") == 2

    fake("python3", "exit 0")
    fake("rustc", "echo 'rustc 1.100.0 (abc 2027-01-01)'")
    assert machine(tmp_path, "python3") == (0, "")


def test_a_row_without_test_or_with_a_failed_one_is_missing() -> None:
    report = load("checklist").report
    outcomes = {"S0-01": "passed", "S0-02": "skipped: no GPU", "S0-03": "failed"}
    rows = dict.fromkeys(["S0-01", "S0-02"], "L")
    assert report(rows, outcomes) == (["S0-02: skipped: no GPU", "1 passed, 1 skipped, of 2 rows"], True)
    lines, complete = report(dict.fromkeys(["S0-01", "S0-03", "S0-04"], "L"), outcomes)
    assert (lines[:2], complete) == (["S0-03: failed", "S0-04: no test"], False)


def test_the_part_of_a_row_that_needs_a_gpu_is_told_with_its_reason() -> None:
    report, rows = load("checklist").report, {"S3-01": "L(fake)/G", "S3-02": "L", "S3-32": "L/G"}
    passed = dict.fromkeys(rows, "passed")
    lines, complete = report(rows, {**passed, "S3-32/G": "skipped: no CUDA device here"})
    assert complete and lines[:2] == ["S3-01, on a GPU: no test", "S3-32, on a GPU: skipped: no CUDA device here"]
    assert not report(rows, {**passed, "S3-32/G": "failed"})[1]


def test_every_row_of_the_checklist_has_a_tier() -> None:
    text = (ROOT / "tests" / "checklist.md").read_text()
    found = load("checklist").ROW.findall(text)
    assert len(found) == len(re.findall(r"^\| S\d-", text, re.MULTILINE)) > 150 and ("S3-32", "L/G") in found
    one = r"[LCGX](\(\w+\))?"
    assert all(re.fullmatch(f"{one}(/{one})?( docs| \\(pexpect\\))?", tier) for _, tier in found)


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0", False),
        ("MIT/GPL-3.0", True),
        ("GPL-3.0 OR MIT", True),
        ("(MIT OR GPL-3.0) AND ISC", True),
        ("MIT AND GPL-3.0", False),
        ("MIT OR ISC AND GPL-3.0", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Apache-2.0", False),
    ],
)
def test_licences_of_crates_are_read_as_spdx_means_them(expression: str, allowed: bool) -> None:
    assert load("check_crates").is_allowed(expression, {"MIT", "ISC", "Apache-2.0 WITH LLVM-exception"}) is allowed


def test_crates_from_elsewhere_and_without_a_version_are_named() -> None:
    own = {"name": "a", "version": "1", "license": "MIT", "source": None, "dependencies": [{"name": "b", "req": "*"}]}
    foreign = {**own, "name": "c", "source": "git+https://host/c", "license": None}
    found = list(load("check_crates").problems([own, foreign], {"MIT"}))
    assert len(found) == 3
    assert "a 1: any version of b is accepted" in found[0]
    assert all("c 1" in line for line in found[1:])
