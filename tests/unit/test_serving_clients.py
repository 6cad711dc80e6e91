"""Stock clients of the Open Inference Protocol work unchanged."""

from pathlib import Path

import pytest
import stock_clients
from serving_process import serving, write_bundle
from test_serving_grpc import SECRET, TOKEN
from test_serving_http import INPUTS, SCORES


@pytest.mark.nightly
@pytest.mark.clone
@pytest.mark.timeout(600)
def test_tritonclient(tmp_path: Path) -> None:
    python = stock_clients.install(tmp_path / "environment")
    (tmp_path / "token").write_text(SECRET)
    variables = {"PERSIA_TOKEN_FILE": str(tmp_path / "token")}
    spec = {each["name"]: (each["datatype"], each["data"]) for each in INPUTS}
    with serving(write_bundle(tmp_path / "bundle", 2.0), tmp_path / "log", variables) as server:
        places = [f"127.0.0.1:{port}" for port in (server.port, server.grpc_port)]
        found = stock_clients.ask(python, places, "small", TOKEN, spec)
    assert found == [("small-2", SCORES)] * 3
