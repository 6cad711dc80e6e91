"""`persia serve`: the scores over REST, gRPC and POST /score equal those of the bundle, with TLS and a token."""

import json
import os
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
from bundle_files import bundle_of, table_of, write_run
from forking import Popen
from typer.testing import CliRunner
from waiting import wait_until

from persia.cli.main import app
from persia.errors import ConfigError, DataError
from persia.proto import inference_pb2 as pb
from persia.proto import inference_pb2_grpc as services
from persia.runtime.tokens import role_token
from persia.serving import Bundle, access
from persia.serving.bundled import BundledModel
from persia.serving.server import Options

SECRET = "s" * 40
TOKEN = role_token(SECRET.encode(), "serving")
ROWS = table_of(1_000, 9, unseen=True).drop_columns(["clicked", "spent"])
CODES = {"INT64": "q", "FP32": "f", "FP64": "d"}


def certificate(folder: Path) -> None:
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=persia"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(
        ["openssl", "req", *words, *files, "-addext", "subjectAltName=DNS:persia"], check=True, capture_output=True
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    folder = tmp_path_factory.mktemp("bundle")
    with Bundle.open(bundle_of(write_run(folder), folder / "ranker")) as bundle:
        yield bundle


@pytest.fixture(scope="module")
def served(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int, ssl.SSLContext]]:
    """The ports of `persia serve` with TLS and a token, and the context of its clients."""
    folder = tmp_path_factory.mktemp("served")
    certificate(folder)
    (folder / "token").write_text(SECRET)
    environment = {
        **os.environ,
        "PERSIA_TOKEN_FILE": str(folder / "token"),
        "PERSIA_TLS_CERT": str(folder / "cert.pem"),
        "PERSIA_TLS_KEY": str(folder / "key.pem"),
        "PERSIA_SERVE_HTTP": "127.0.0.1:0",
        "PERSIA_SERVE_GRPC": "127.0.0.1:0",
    }
    log = folder / "log"
    with (
        log.open("w") as file,
        Popen(["persia", "serve", str(bundle.path)], env=environment, stderr=file) as process,
    ):
        try:
            line = wait_until(
                "the address",
                lambda: next((line for line in log.read_text().splitlines() if ": https:" in line), None),
                90,
                evidence=log.read_text,
            )
            http, remote = (int(part.split(",")[0]) for part in line.split("127.0.0.1:")[1:])
            yield http, remote, ssl.create_default_context(cafile=str(folder / "cert.pem"))
            process.terminate()
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()


class _Named(HTTPSConnection):
    """A connection that verifies the certificate for the name persia."""

    def connect(self) -> None:
        context: ssl.SSLContext = self._context  # type: ignore[attr-defined]
        self.sock = context.wrap_socket(socket.create_connection((self.host, self.port), 30), server_hostname="persia")


def ask(served: tuple[int, int, ssl.SSLContext], path: str, content: Any) -> Any:
    connection = _Named("127.0.0.1", served[0], context=served[2], timeout=60)
    try:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", path, json.dumps(content, default=str), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, found
        return found
    finally:
        connection.close()


def tensors(bundle: Bundle, rows: pa.Table) -> list[tuple[str, str, list[Any]]]:
    """The tensors of rows: name, datatype, values."""
    found: list[tuple[str, str, list[Any]]] = []
    for column in bundle.inputs:
        values = rows.column(column.name).combine_chunks()
        if column.is_list:
            filled = values.fill_null([]) if values.null_count else values
            lengths = [len(each) for each in filled.to_pylist()]
            found.append((column.name, column.datatype, [each for row in filled.to_pylist() for each in row]))
            found.append((f"{column.name}.offsets", "INT64", [0, *np.cumsum(lengths).tolist()]))
        else:
            texts = values.cast(pa.string()) if column.datatype == "BYTES" else values
            found.append((column.name, column.datatype, texts.to_pylist()))
    return found


def test_records_and_tensors_have_the_scores_of_the_bundle(
    bundle: Bundle, served: tuple[int, int, ssl.SSLContext]
) -> None:
    wanted = bundle.score(ROWS)
    found = ask(served, "/score", ROWS.to_pylist())
    assert found["bundle"] == bundle.identity
    scores = np.array([found["scores"]["clicked"], found["scores"]["spent"]], np.float32).T
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-5)

    inputs = [
        {"name": name, "datatype": datatype, "shape": [len(values)], "data": values}
        for name, datatype, values in tensors(bundle, ROWS)
    ]
    found = ask(served, "/v2/models/ranker/infer", {"inputs": inputs})
    assert found["model_version"] == bundle.identity
    rest = {each["name"]: each["data"] for each in found["outputs"]}
    np.testing.assert_allclose(rest["score_clicked"], wanted[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rest["score_spent"], wanted[:, 1], rtol=1e-5, atol=1e-5)


def test_a_tensor_of_a_wrong_type_is_refused_and_a_null_is_not(bundle: Bundle) -> None:
    model, rows = BundledModel(bundle), ROWS.slice(0, 3).combine_chunks().to_batches()[0]
    names = rows.schema.names
    whole = next(each.name for each in bundle.inputs if each.datatype == "INT64" and not each.is_list)
    lists = next(each.name for each in bundle.inputs if each.is_list)
    wrong = {
        whole: [pa.array([1.0, 2.0, 3.0], pa.float32()), pa.array(["1", "x", "3"]), pa.array([[1], [2], [3]])],
        lists: [pa.array([1, 2, 3])],
    }
    for name, columns in wrong.items():
        for column in columns:
            with pytest.raises(DataError, match=f"column `{name}`"):
                model.transform(rows.set_column(names.index(name), name, column))
    nulls = rows.set_column(names.index(whole), whole, pa.nulls(3, pa.int64()))
    assert model.transform(nulls).report.counts[whole]["null"] == 3
    assert len(model.transform(b'[{"%s": [1]}]' % whole.encode())) == 1


def test_grpc_with_tls_has_the_scores_of_the_bundle(bundle: Bundle, served: tuple[int, int, ssl.SSLContext]) -> None:
    rows = [index for index, row in enumerate(ROWS.to_pylist()) if None not in row.values()]
    whole = ROWS.take(rows)
    request = pb.ModelInferRequest(model_name="ranker")
    for name, datatype, values in tensors(bundle, whole):
        request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        if datatype == "BYTES":
            texts = [each.encode() for each in values]
            request.raw_input_contents.append(b"".join(struct.pack("<I", len(each)) + each for each in texts))
        else:
            request.raw_input_contents.append(struct.pack(f"<{len(values)}{CODES[datatype]}", *values))
    cafile = next(iter(served[2].get_ca_certs(binary_form=True)))
    credentials = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(cafile).encode())
    named = (("grpc.ssl_target_name_override", "persia"),)
    with grpc.secure_channel(f"127.0.0.1:{served[1]}", credentials, options=named) as channel:
        stub = services.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request, metadata=(("authorization", f"Bearer {TOKEN}"),))
    scores = np.stack([np.frombuffer(raw, "<f4") for raw in answer.raw_output_contents], 1)
    np.testing.assert_allclose(scores, bundle.score(whole), rtol=1e-5, atol=1e-5)


def test_one_user_and_many_candidates(bundle: Bundle, served: tuple[int, int, ssl.SSLContext]) -> None:
    rows = ROWS.slice(0, 50).to_pylist()
    own = ("item", "price", "at")
    shared = {name: value for name, value in rows[0].items() if name not in own}
    candidates = [{name: row[name] for name in own} for row in rows]
    found = ask(served, "/score", {"shared": shared, "candidates": candidates})
    wanted = bundle.score([{**shared, **each} for each in candidates])
    np.testing.assert_allclose(found["scores"]["clicked"], wanted[:, 0], rtol=1e-5, atol=1e-5)


def test_a_certificate_and_the_key_of_another_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        certificate(tmp_path / name)
    (tmp_path / "empty").touch()
    one, two, empty = tmp_path / "one/cert.pem", tmp_path / "two/key.pem", tmp_path / "empty"
    for file, key in ((one, two), (empty, two), (one, empty)):
        monkeypatch.setenv("PERSIA_TLS_CERT", str(file))
        monkeypatch.setenv("PERSIA_TLS_KEY", str(key))
        with pytest.raises(ConfigError, match=f"certificate PERSIA_TLS_CERT={file} with the key PERSIA_TLS_KEY={key}"):
            access.certificate()
    monkeypatch.setenv("PERSIA_TLS_KEY", str(tmp_path / "one/key.pem"))
    assert access.certificate() == (str(one), str(tmp_path / "one/key.pem"))


def test_the_largest_body_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Options] = []

    def serve(_path: Path, options: Options, _load: Any) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr("persia.serving.server.serve", serve)
    for size in ("8", "300"):
        assert CliRunner().invoke(app, ["serve", str(tmp_path), "--max-body-mb", size]).exit_code == 0
    assert [each.limits.body_bytes >> 20 for each in found] == [8, 300]
    assert [each.limits.waiting_bytes >> 20 for each in found] == [256, 300]


def test_health_and_token_of_the_command(
    served: tuple[int, int, ssl.SSLContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["serve", *words])

    monkeypatch.setenv("PERSIA_TLS_CERT", "set")
    assert run("--health", "--http", f"127.0.0.1:{served[0]}").exit_code == 0
    monkeypatch.delenv("PERSIA_TLS_CERT")
    assert run("--health", "--http", f"127.0.0.1:{served[0]}").exit_code == 1  # the server accepts only TLS
    monkeypatch.setenv("PERSIA_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "token").write_text(SECRET)
    assert run("--show-token").stdout == f"{TOKEN}\n"
    with pytest.raises(Exception, match="no BUNDLE"):
        CliRunner().invoke(app, ["serve"], catch_exceptions=False, standalone_mode=False)
    with pytest.raises(Exception, match="no bundle"):
        CliRunner().invoke(app, ["serve", str(tmp_path)], catch_exceptions=False, standalone_mode=False)
