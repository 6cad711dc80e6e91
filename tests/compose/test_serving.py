"""The service `serving`: the serving image serves a bundle that this host has exported, to stock clients."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from compose.conftest import BUILD, Project, docker
from persia.data import synth
from persia.serving import Bundle
from persia.utils import find_free_port

sys.path.insert(0, str(ROOT / "tests" / "unit"))
import stock_clients as clients

OVERLAY = {"COMPOSE_FILE": "docker-compose.serving.yaml"}
TRAINING = ("cloudpickle", "matplotlib", "nats-python", "obstore", "psutil", "pytest", "torchmetrics")
"""Packages that only training needs."""


@pytest.fixture(scope="module")
def image(engine: None) -> str:
    """Build the image with the documented command."""
    docker("compose", "build", timeout=BUILD, env=OVERLAY)
    return "persia/serving:dev"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of versions with a bundle that any user may read."""
    folder = tmp_path_factory.mktemp("serving")
    synth.write(folder / "clicks.parquet", 2000, synth.Teacher((50, 200), dense=2, positive=0.3))
    for words in (
        ("data", "inspect", "clicks.parquet", "-o", "persia.yml"),
        ("train", "persia.yml", "--set", "data.epochs=1"),
        ("export", "runs/LATEST", "-o", "models/1"),
    ):
        (folder / "models").mkdir(exist_ok=True)
        subprocess.run(["persia", *words], cwd=folder, check=True, capture_output=True)
    for path in (folder, *folder.parents[:2], folder / "models", folder / "models" / "1"):
        path.chmod(0o755)
    for path in (folder / "models" / "1").iterdir():
        path.chmod(0o644)
    return folder / "models"


def ask(port: int, path: str, content: Any = None, token: str = "") -> Any:
    body = None if content is None else json.dumps(content, default=str).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"Authorization": f"Bearer {token}"} if token else {}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return json.load(answer)


@dataclass(frozen=True)
class Service:
    """The service `serving`, and the data that its clients need.

    Attributes:
        project: The project of the service.
        http: The published port for HTTP.
        grpc: The published port for gRPC.
        token: The token.
        rows: Rows as records.
        scores: The scores of the rows by the bundle.
        identity: The identity of the bundle.
        columns: The columns of the rows with their datatypes.
    """

    project: Project
    http: int
    grpc: int
    token: str
    rows: list[dict[str, Any]]
    scores: list[float]
    identity: str
    columns: dict[str, str]


@contextmanager
def running(models: Path) -> Iterator[Service]:
    """Start the service with a folder of versions, wait until it is healthy, and remove it at the end of the block."""
    http, remote = find_free_port(), find_free_port()
    variables = {
        **OVERLAY,
        "BUNDLE_DIR": str(models),
        "SERVING_HTTP": f"127.0.0.1:{http}",
        "SERVING_GRPC": f"127.0.0.1:{remote}",
    }
    project = Project(f"persia-serving-{http}", ROOT / "examples" / "dlrm", **variables)
    rows = pq.read_table(models.parent / "clicks.parquet").slice(0, 20).drop(["label"]).to_pylist()
    with Bundle.open(models / "1") as bundle:
        scores, identity = bundle.score(rows).tolist(), bundle.identity
        columns = {each.name: each.datatype for each in bundle.inputs}
    try:
        project.up()
        project.healthy("serving")
        token = project("exec", "--no-TTY", "serving", "persia", "serve", "--show-token").stdout.strip()
        yield Service(project, http, remote, token, rows, scores, identity, columns)
    except BaseException:
        print(project.logs())  # noqa: T201
        raise
    finally:
        project.remove()


@pytest.fixture(scope="module")
def service(image: str, models: Path) -> Iterator[Service]:
    """A service for the tests that do not change it."""
    with running(models) as service:
        yield service


def test_the_service_gives_the_scores_of_the_bundle_and_ends_with_zero(image: str, models: Path) -> None:
    with running(models) as service:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(service.http, "/score", service.rows)
        found = ask(service.http, "/score", service.rows, service.token)
        assert found["bundle"] == service.identity
        assert found["scores"] == pytest.approx(service.scores, abs=1e-5)
        assert ask(service.http, "/v2/models/bundle", None, service.token)["versions"] == [service.identity]
        service.project("stop", "serving")
        assert service.project.states("serving") == [("exited", 0)]
        assert "all connections are closed" in service.project.logs("serving")


def test_tritonclient(service: Service, tmp_path: Path) -> None:
    values = {name: [row[name] for row in service.rows] for name in service.columns}
    spec = {name: (kind, values[name]) for name, kind in service.columns.items()}
    python = clients.install(tmp_path / "environment")
    places = [f"127.0.0.1:{port}" for port in (service.http, service.grpc)]
    found = clients.ask(python, places, "bundle", service.token, spec)
    assert [version for version, _ in found] == [service.identity] * 3, "HTTP with binary tensors, with JSON, and gRPC"
    for _, scores in found:
        assert scores == pytest.approx(service.scores, abs=1e-5)


def test_curl(service: Service, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(service.rows))
    (tmp_path / "token").write_text(f"Authorization: Bearer {service.token}\n")

    def curl(path: str, *words: str) -> subprocess.CompletedProcess[str]:
        address = f"http://127.0.0.1:{service.http}{path}"
        command = ["curl", "--silent", "--show-error", "--fail", *words, address]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    body, bearer = ["--data", f"@{tmp_path / 'rows.json'}"], ["--header", f"@{tmp_path / 'token'}"]
    assert json.loads(curl("/v2/health/ready").stdout) == {"ready": True}
    refused = curl("/score", *body)
    assert refused.returncode == 22 and "401" in refused.stderr, refused
    found = json.loads(curl("/score", *body, *bearer).stdout)
    assert found["bundle"] == service.identity
    assert found["scores"] == pytest.approx(service.scores, abs=1e-5)
    metrics = curl("/metrics").stdout
    assert f'persia_serving_bundle{{bundle="{service.identity}"}} 1.0' in metrics
    assert "persia_serving_ready 1.0" in metrics


def test_grpc_reflection(service: Service) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        def reflect(asked: Any, token: str) -> Any:
            call = stub.ServerReflectionInfo(
                iter([asked]), metadata=(("authorization", f"Bearer {token}"),), timeout=30
            )
            return next(call)

        names = reflect(reflection_pb2.ServerReflectionRequest(list_services=""), service.token)
        assert "inference.GRPCInferenceService" in {each.name for each in names.list_services_response.service}
        symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
        (content,) = reflect(symbol, service.token).file_descriptor_response.file_descriptor_proto
        file = descriptor_pb2.FileDescriptorProto.FromString(content)
        methods = {method.name for each in file.service for method in each.method}
        assert {"ModelInfer", "ModelMetadata", "ServerReady"} <= methods
        with pytest.raises(grpc.RpcError) as refused:
            reflect(symbol, "wrong")
        error: Any = refused.value
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_folder_without_a_bundle_is_named(image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # the container has another user
    run = ("run", "--rm", "--volume", f"{tmp_path}:/bundle:ro", "--env", "PERSIA_BUNDLE=/bundle", image)
    result = docker(*run, "launch_serving.sh", check=False)
    assert result.returncode == 4, result.stderr
    assert "/bundle: no bundle" in result.stderr and "persia export" in result.stderr


def test_the_image_has_no_requirement_of_training(image: str) -> None:
    listed = docker("run", "--rm", "--entrypoint", "cat", image, "/sbom.json").stdout
    names = {each["purl"].removeprefix("pkg:pypi/").split("@")[0] for each in json.loads(listed)["components"]}
    assert not {*TRAINING} & names
    assert {"msgspec", "torch", "uvicorn"} <= names
