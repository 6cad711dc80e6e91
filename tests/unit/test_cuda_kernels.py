"""The PTX of the CUDA kernels: the committed file matches the source, and newer compilers accept the source."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.clone

TOOL = ROOT / "tools" / "cuda_ptx.py"
PTX = ROOT / "rust_core" / "cuda" / "src" / "kernels.ptx"


def compile_ptx(*arguments: object) -> str:
    """Run the tool in a separate process, because a process has one version of NVRTC."""
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchs_nvrtc() -> Path:
    """Return the folder of the packages that PyTorch depends on."""
    spec = importlib.util.find_spec("nvidia")
    assert spec is not None and spec.submodule_search_locations, "torch has brought no package of NVIDIA"
    return Path(next(iter(spec.submodule_search_locations)))


def test_the_committed_ptx_is_what_the_source_gives() -> None:
    compile_ptx()


def test_ptx_that_is_not_of_the_source_is_refused(tmp_path: Path) -> None:
    """The tool reports a difference for a source with one changed constant."""
    folder = tmp_path / "rust_core" / "cuda" / "src"
    folder.mkdir(parents=True)
    source = PTX.with_suffix(".cu").read_text()
    changed = source.replace("TILE = 128", "TILE = 64")
    assert changed != source
    (folder / "kernels.cu").write_text(changed)
    (folder / "kernels.ptx").write_text(PTX.read_text())
    (tmp_path / "tools").mkdir()
    tool = tmp_path / "tools" / "cuda_ptx.py"
    tool.write_text(TOOL.read_text())
    done = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cuda_ptx.py --write" in done.stderr


def test_every_driver_from_cuda_12_on_can_read_it() -> None:
    text = PTX.read_text()
    assert re.search(r"^\.version 8\.0$", text, re.MULTILINE)
    assert re.search(r"^\.target sm_80$", text, re.MULTILINE)
    assert set(re.findall(r"\.entry (\w+)", text)) == {"gather_pool", "gather_raw", "segment_sum"}


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_newer_compilers_take_the_source(architecture: str) -> None:
    text = compile_ptx("--nvrtc", torchs_nvrtc(), "--architecture", architecture, "--print")
    assert f".target {architecture.replace('compute', 'sm')}" in text
    version = re.search(r"^\.version (\d+)\.", text, re.MULTILINE)
    assert version and int(version[1]) >= 9, "not a newer compiler"
    check_arithmetic(text)


def test_sums_are_made_as_the_cpu_makes_them() -> None:
    check_arithmetic(PTX.read_text())


def check_arithmetic(text: str) -> None:
    """Operations are not fused, approximated or flushed to zero, and sums have a fixed order."""
    instructions = re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]*)", text, re.MULTILINE)
    floats = {
        name
        for name in instructions
        if name.startswith(("fma", "mad", "mul", "add", "div", "sub", "rcp")) and ".f32" in name
    }
    assert floats <= {"add.rn.f32", "mul.rn.f32", "div.rn.f32", "rcp.rn.f32"}, floats
    assert not [
        name for name in instructions if name.startswith(("atom", "red", "shfl")) or ".approx" in name or ".ftz" in name
    ]
