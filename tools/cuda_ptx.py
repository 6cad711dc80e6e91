"""Compile the CUDA kernels to the PTX that persia_core carries: rust_core/cuda/src/kernels.ptx.

    python tools/cuda_ptx.py            # compare the committed PTX with a new one
    python tools/cuda_ptx.py --write    # replace it

The tool uses NVRTC 12.0 (requirements/nvrtc.txt, in .venv/nvrtc after `make setup`), because a driver refuses PTX that
is newer than itself. Every driver from 525 on accepts the PTX of 12.0.
"""

import argparse
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "rust_core" / "cuda" / "src" / "kernels.cu"
PTX = SOURCE.with_suffix(".ptx")
NVRTC = Path(sys.prefix) / "nvrtc"

ARCHITECTURE = "compute_80"
OPTIONS = ("--std=c++17", "--fmad=false")
"""No multiply-add is fused: the kernels give the CPU's bits."""


class NvrtcError(Exception):
    """NVRTC is missing, or rejects the source. The message contains its log."""


def library(folder: Path) -> Path:
    """Return NVRTC's library below ``folder``."""
    found = sorted(file for file in folder.rglob("libnvrtc.so.*") if "builtins" not in file.name)
    if not found:
        raise NvrtcError(f"no libnvrtc.so below {folder}; run: make setup")
    return found[0]


def compile_ptx(nvrtc: Path, architecture: str = ARCHITECTURE) -> str:
    """Return the kernels as PTX for ``architecture``."""
    # NVRTC's built-in functions are in a library in the same folder, which the loader does not search.
    for builtins in sorted(nvrtc.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(nvrtc))
    program = ctypes.c_void_p()
    source = SOURCE.read_bytes()
    code = lib.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    if code != 0:
        raise NvrtcError(f"nvrtcCreateProgram: error {code}")
    try:
        options = [f"--gpu-architecture={architecture}", *OPTIONS]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = lib.nvrtcCompileProgram(program, len(options), given)
        if code != 0:
            log = _text(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program)
            raise NvrtcError(f"{nvrtc.name}: error {code}\n{log}")
        return _text(lib.nvrtcGetPTXSize, lib.nvrtcGetPTX, program)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: Callable[..., int], read: Callable[..., int], program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    read(program, text)
    return text.value.decode()


def main() -> int:
    """Return 1 if the committed PTX differs from the PTX of the source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the committed PTX")
    parser.add_argument("--print", action="store_true", help="print the PTX, and write nothing")
    parser.add_argument("--nvrtc", type=Path, default=NVRTC, help="a folder with libnvrtc.so.12 below it")
    parser.add_argument("--architecture", default=ARCHITECTURE, help=f"target, by default {ARCHITECTURE}")
    arguments = parser.parse_args()
    try:
        ptx = compile_ptx(library(arguments.nvrtc), arguments.architecture)
    except NvrtcError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.print:
        print(ptx)
    elif arguments.write:
        PTX.write_text(ptx)
    elif not PTX.exists() or PTX.read_text() != ptx:
        print(f"error: {PTX.relative_to(ROOT)} is not current: {SOURCE.name} compiles to other PTX", file=sys.stderr)
        print("  next: python tools/cuda_ptx.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
