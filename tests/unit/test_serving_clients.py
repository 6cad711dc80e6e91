"""Stock clients of the Open Inference Protocol work unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from serving_process import serving, write_bundle
from test_serving_grpc import SECRET, TOKEN
from test_serving_http import INPUTS, SCORES

CLIENT = Path(__file__).with_name("triton_client.py")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_tritonclient(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    wanted = ROOT / "requirements" / "serving-clients.txt"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", wanted], check=True, env=own)
    (tmp_path / "token").write_text(SECRET)
    variables = {"PERSIA_TOKEN_FILE": str(tmp_path / "token")}
    spec = json.dumps({each["name"]: [each["datatype"], each["data"]] for each in INPUTS})
    with serving(write_bundle(tmp_path / "bundle", 2.0), tmp_path / "log", variables) as server:
        places = [f"127.0.0.1:{port}" for port in (server.port, server.grpc_port)]
        words = [str(python), str(CLIENT), *places, "small", TOKEN, spec]
        done = subprocess.run(words, env={}, stdout=subprocess.PIPE, check=True, text=True)
    assert json.loads(done.stdout) == [["small-2", SCORES]] * 3
