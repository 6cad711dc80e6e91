"""The committed Python code of the protocol matches the proto files."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.clone

INFERENCE = (
    "python -m grpc_tools.protoc -Ipersia_py --python_out=persia_py --grpc_python_out=persia_py --pyi_out=persia_py "
    "persia/proto/inference.proto"
)
COMMAND = (
    "python -m grpc_tools.protoc -Ipersia/proto=rust_core/wire/proto/persia/v1 --python_out=persia_py "
    "--grpc_python_out=persia_py --pyi_out=persia_py persia/proto/feed.proto persia/proto/tables.proto"
)


def test_the_generated_code_is_that_of_the_proto_files(tmp_path: Path) -> None:
    for text in (COMMAND, INFERENCE):
        command = text.replace("_out=persia_py", f"_out={tmp_path}").split()
        subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "persia" / "proto").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "persia_py" / "persia" / "proto").glob("*_pb2*")}
    assert len(fresh) == 9
    assert committed == fresh, f"the proto files changed; run: {COMMAND}; {INFERENCE}"
