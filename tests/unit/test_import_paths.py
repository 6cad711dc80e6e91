"""Packages and models are found next to the configuration, by PYTHONPATH, or installed in editable mode."""

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Verb
from test_one_batch import MINE, mine
from trainer_files import write_clicks, write_config

import persia
import persia_core

PYTHON = Path(persia.__file__).parents[1]
CORE = Path(persia_core.__file__).parents[1]
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "twotower"
version = "1"
"""


def python(*words: str, folder: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run Python without the import paths of this process."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env={**own, **env}, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.row("S3-29")
def test_persia_is_imported_from_its_sources_and_by_pythonpath(tmp_path: Path) -> None:
    show = "import persia; print(persia.__file__)"
    for folder, path in ((PYTHON, str(CORE)), (tmp_path, os.pathsep.join([str(CORE), str(PYTHON)]))):
        done = python("-c", show, folder=folder, PYTHONPATH=path)
        assert done.stdout.strip() == persia.__file__, done.stderr


@pytest.mark.row("S3-29")
def test_sources_without_the_engine_say_how_to_build_it(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "persia").symlink_to(PYTHON / "persia")
    done = python("-S", "-c", "import persia", folder=tmp_path, PYTHONPATH=str(sources))
    assert done.returncode == 1
    assert "persia_core, the compiled part of persia, is not installed; install the wheel persia-core" in done.stderr
    assert "in a clone run: make setup" in done.stderr


@pytest.mark.row("S3-29")
def test_a_model_is_found_beside_its_configuration_by_pythonpath_or_installed(
    tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hatchling", reason="hatchling, which installs the project, is not installed here")
    path = mine(tmp_path)
    assert "✓ checkpoint" in verb("train", str(path), "--local", "--test")[0]
    project, installed = tmp_path / "project", tmp_path / "installed"
    (project / "twotower").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "twotower" / "__init__.py").touch()
    (project / "twotower" / "model.py").write_text(MINE.format(build="pass", forward="pass", state="pass"))
    write_config(tmp_path, model={"class": "twotower.model:Mine"})
    _, errors = verb("train", str(path), "--local", "--test", code=2)
    assert f"no module `twotower` in {tmp_path}, nor among the installed packages; move it to that folder" in errors
    assert "add its folder to PYTHONPATH, or install it: pip install -e FOLDER" in errors
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(project))
        assert "✓ checkpoint" in verb("train", str(path), "--local", "--test")[0]
    for name in ("twotower", "twotower.model"):
        sys.modules.pop(name, None)
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    done = python(*words, "--target", str(installed), "--editable", str(project), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "path", [*sys.path])
    site.addsitedir(str(installed))
    assert "✓ checkpoint" in verb("train", str(path), "--local", "--test")[0]


@pytest.mark.row("S3-29")
def test_a_package_that_a_model_imports_is_named(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    (tmp_path / "needy.py").write_text("import no_such_package.inside\n")
    path = write_config(tmp_path, model={"class": "needy:Mine"})
    _, errors = verb("train", str(path), "--local", "--test", code=2)
    assert "next:  install what needy imports: pip install no_such_package" in errors
