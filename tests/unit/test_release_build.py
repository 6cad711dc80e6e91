"""A complete run of ``make release``: every file and image is built and verified, and the engine compiled again."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

import persia

pytestmark = [pytest.mark.clone, pytest.mark.nightly, pytest.mark.timeout(7200)]


def make_release(*options: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHONPATH"))}
    words = ["make", "release", "REHEARSE=1", "BORROW=.venv", "LTO=false", *options]
    done = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_release_is_made_verified_and_continued() -> None:
    docker = (
        shutil.which("docker") is not None
        and subprocess.run(["docker", "version"], capture_output=True).returncode == 0
    )
    images = [] if docker else ["IMAGES=0"]
    said = make_release(*images)
    version = persia.__version__
    folder = Path(ROOT, "dist", "rehearsal", f"persia-{version}")
    wheels = {f"persia-{version}-py3-none-any", f"persia_core-{version}-cp310-abi3-manylinux_2_28_x86_64"}
    wheels.add(f"persia_server-{version}-py3-none-manylinux_2_28_x86_64")
    bills = {f"{name}-{version}.cdx.json" for name in ("persia", "persia_core", "persia_server")}
    archives = {f"{name}-{version}.tar.gz" for name in ("persia", "persia_core", "persia_server")}
    expected = {*(f"{name}.whl" for name in wheels), *bills, *archives, "NOTES.md", "SHA256SUMS"}
    if docker:
        names = ("server", "nats", "runtime", "serving", "monitor")
        expected |= {"images.json", *(f"image-{name}-{version}.cdx.json" for name in names)}
    assert {path.name for path in folder.iterdir() if path.is_file()} == expected
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    assert re.search(r"compiled for glibc 2\.28 or later; AUC 0\.\d+ in one process", said), said
    again = make_release(*images)
    assert again.count(": done before") == (7 if docker else 5), again
