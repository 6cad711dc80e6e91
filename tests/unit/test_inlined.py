"""Loops compiled for an instruction set have its instructions in them, and no calls of functions that are one each."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import persia_core
from persia.launch.binaries import SERVER
from persia.utils import resolve_binary_execute_path


@pytest.mark.parametrize("which", ["server", "extension"])
def test_no_vector_instruction_is_a_function_of_its_own(which: str) -> None:
    """A closure or an iterator's method between the loop and the instruction can make it one: three times slower."""
    if shutil.which("nm") is None:
        pytest.skip("no nm here (binutils)")
    if which == "server":
        try:
            path = resolve_binary_execute_path(SERVER)
        except RuntimeError as error:
            pytest.skip(str(error))
    else:
        path = str(next(Path(persia_core.__file__).parent.glob("persia_core*.so"), persia_core.__file__))
    symbols = subprocess.run(["nm", "-C", path], check=True, capture_output=True, text=True).stdout
    if not symbols.strip():
        pytest.skip(f"{path} has no symbols")
    assert re.search(r" [tT] .*persia_store::", symbols), "want the store's functions among the symbols"
    assert re.findall(r" t (core::core_arch::x86::(?:avx|f16c|fma)\S*)", symbols) == []
