"""The service `serving`: a bundle that this host has exported, served by the serving image."""

import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from compose.conftest import BUILD, Project, docker
from persia.data import synth
from persia.serving import Bundle
from persia.utils import find_free_port

OVERLAY = {"COMPOSE_FILE": "docker-compose.serving.yaml"}
TRAINING = ("cloudpickle", "matplotlib", "nats-python", "obstore", "psutil", "pytest", "torchmetrics")
"""Packages that only training needs."""


@pytest.fixture(scope="module")
def image(engine: None) -> str:
    """Build the image, as the page says."""
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


def test_the_service_gives_the_scores_of_the_bundle_and_ends_with_zero(image: str, models: Path) -> None:
    port = find_free_port()
    variables = {
        **OVERLAY,
        "BUNDLE_DIR": str(models),
        "SERVING_HTTP": f"127.0.0.1:{port}",
        "SERVING_GRPC": "127.0.0.1:0",
    }
    project = Project(f"persia-serving-{port}", ROOT / "examples" / "dlrm", **variables)
    rows = pq.read_table(models.parent / "clicks.parquet").slice(0, 20).drop(["label"]).to_pylist()
    with Bundle.open(models / "1") as bundle:
        wanted, identity = bundle.score(rows), bundle.identity
    try:
        project.up()
        project.healthy("serving")
        token = project("exec", "--no-TTY", "serving", "persia", "serve", "--show-token").stdout.strip()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(port, "/score", rows)
        found = ask(port, "/score", rows, token)
        assert found["bundle"] == identity
        assert found["scores"] == pytest.approx(wanted.tolist(), abs=1e-5)
        assert ask(port, "/v2/models/bundle", None, token)["versions"] == [identity]
        project("stop", "serving")
        assert project.states("serving") == [("exited", 0)]
        assert "every request has its response" in project.logs("serving")
    except BaseException:
        print(project.logs())  # noqa: T201
        raise
    finally:
        project.remove()


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
