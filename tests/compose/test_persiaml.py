"""A compose file in PersiaML's style, with PersiaML's image and variable names, and without settings of Persia."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from waiting import wait_until

from compose.conftest import BUILD, docker

PAIR = ROOT / "tests" / "persiaml_style"
EQUAL = re.compile(r"test auc: ([0-9.]+) rows: ([0-9]+)")
IMAGE = "persiaml/persia-cuda-runtime:latest"
NATS = "nats:latest"
NAME = f"persiaml-test-{os.getpid()}"
FILES = {"COMPOSE_FILE": "docker-compose.yaml:docker-compose.persiaml.yaml"}
AS_PUBLISHED = 'FROM persia/nats:dev\nENTRYPOINT ["nats-server"]\nCMD []\n'
"""An image like NATS's own, with the packaged program: without a secret, and listening on every address."""


@pytest.fixture(scope="module")
def persiaml_images(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The images that the compose file names."""
    docker("compose", "build", "trainer", timeout=BUILD, env=FILES)
    if docker("image", "inspect", NATS, check=False).returncode == 0:
        yield
        return
    context = tmp_path_factory.mktemp("nats")
    (context / "Dockerfile").write_text(AS_PUBLISHED)
    docker("build", "--tag", NATS, str(context))
    yield
    docker("image", "rm", "--force", NATS, check=False)


@pytest.fixture
def folder(persiaml_images: None, tmp_path: Path) -> Iterator[Path]:
    """A folder with the scripts and the compose file. Files that containers write belong to root."""
    copy = Path(shutil.copytree(PAIR, tmp_path / "workspace", ignore=shutil.ignore_patterns("__pycache__", "runs")))
    yield copy
    docker("run", "--rm", "--volume", f"{copy}:/workspace", IMAGE, "sh", "-c", "rm -rf .persia runs __pycache__")


@pytest.fixture
def embedded(folder: Path) -> tuple[str, str]:
    """AUC and number of rows of the embedded mode, in the same image."""
    given = ["--env-file", str(folder / ".docker.env"), "--volume", f"{folder}:/workspace"]
    done = docker("run", "--rm", *given, IMAGE, "python", "train.py", timeout=600)
    found = EQUAL.search(done.stdout)
    assert found, done.stdout
    return found[1], found[2]


def compose(folder: Path, *arguments: str, check: bool = True) -> str:
    """Run ``docker compose`` as a user of the folder does, and return all output."""
    done = docker("compose", "--project-directory", str(folder), "--project-name", NAME, *arguments, check=check,
                  env={"COMPOSE_FILE": str(folder / "docker-compose.yml"), "COMPOSE_ANSI": "never"})  # fmt: skip
    return done.stdout + done.stderr


def test_it_trains_as_the_embedded_mode_does(folder: Path, embedded: tuple[str, str]) -> None:
    try:
        compose(folder, "up", "--detach", "--no-build", "--pull", "never")
        wait_until(
            "nn_worker to end with 0",
            lambda: "Exited (0)" in compose(folder, "ps", "--all", "--format", "{{.Status}}", "nn_worker"),
            600,
            evidence=lambda: compose(folder, "logs", "--no-color", check=False),
            interval=1,
        )
        assert EQUAL.findall(compose(folder, "logs", "nn_worker")) == [embedded]
        secret = docker("compose", "--project-name", NAME, "exec", "-T", "data_loader", "stat", "-c", "%a", ".persia",
                        env={"COMPOSE_FILE": str(folder / "docker-compose.yml")})  # fmt: skip
        assert secret.stdout == "700\n", "other users of the host cannot read the secret"
    finally:
        compose(folder, "down", "--timeout", "5", "--volumes", check=False)


def test_its_image_has_what_its_examples_import(persiaml_images: None) -> None:
    docker("run", "--rm", IMAGE, "python", "-c", "import pandas, sklearn, tqdm, persia")
    assert (ROOT / "docs" / "from-persiaml.md").read_text().count(IMAGE)
