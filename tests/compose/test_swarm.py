"""The same compose file on a swarm of one node."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from compose.conftest import docker
from compose.test_persiaml import EQUAL, embedded, folder, persiaml_images
from compose.test_stack import EXAMPLE, SHORT

__all__ = ["embedded", "folder", "persiaml_images"]

pytestmark = pytest.mark.usefixtures("images")

NAME = f"persia-test-{os.getpid()}"


@pytest.fixture
def swarm() -> Iterator[None]:
    """A swarm of this machine only, for the duration of a test."""
    if docker("info", "--format", "{{.Swarm.LocalNodeState}}").stdout.strip() != "inactive":
        pytest.skip("this engine is part of a swarm already")
    docker("swarm", "init", "--advertise-addr", "127.0.0.1")
    yield
    docker("stack", "rm", NAME, check=False)
    # A container that is still ending keeps its volumes and networks.
    mine = ["--filter", f"label=com.docker.stack.namespace={NAME}"]
    wait_until("the stack's containers to end", lambda: not docker("ps", "--all", "--quiet", *mine).stdout, 90)
    docker("swarm", "leave", "--force")
    for volume in docker("volume", "ls", "--quiet", "--filter", f"name={NAME}_").stdout.split():
        docker("volume", "rm", volume)


def logs(service: str) -> str:
    result = docker("service", "logs", f"{NAME}_{service}", check=False)
    return result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.row("S0-12", "S0-13")
@pytest.mark.usefixtures("swarm")
def test_the_stack_trains_on_a_swarm(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    shutil.copytree(EXAMPLE, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    docker(
        "stack", "deploy", "--resolve-image", "never", "--compose-file", "docker-compose.yaml", NAME,
        env=SHORT | {"CUR_DIR": str(folder)},
    )  # fmt: skip

    def states() -> list[str]:
        listed = docker("service", "ps", "--format", "{{.CurrentState}}", f"{NAME}_trainer").stdout
        return [line.split()[0] for line in listed.splitlines()]

    wait_until(
        "two trainers to finish",
        lambda: states().count("Complete") >= 2,
        300,
        evidence=lambda: logs("trainer") + logs("emb_server"),
        interval=1,
    )
    volume = ["--volume", f"{NAME}_runs:/runs", "--entrypoint", "cat", "persia/runtime:dev", "/runs/summary.json"]
    assert json.loads(docker("run", "--rm", *volume).stdout)["status"] == "finished"
    assert "packaged sha256=" in logs("emb_server")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("swarm")
def test_the_overlay_of_several_machines_trains_on_one(tmp_path: Path) -> None:
    """Secret and folders are created as in docs/three-machines.md. No volume of the stack has a secret."""
    workspace = tmp_path / "workspace"
    shutil.copytree(EXAMPLE, workspace)
    for name in ("checkpoints", "runs"):
        (tmp_path / "shared" / name).mkdir(parents=True)
    for path in (workspace, *workspace.rglob("*"), *(tmp_path / "shared").rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    secret = subprocess.run(
        ["docker", "secret", "create", NAME, "-"], input="s" * 64, capture_output=True, text=True, check=True
    )
    chosen = {"CUR_DIR": str(workspace), "SHARED_DIR": str(tmp_path / "shared"), "TOKEN_SECRET": NAME}
    files = ["--compose-file=docker-compose.yaml", "--compose-file=docker-compose.swarm.yaml"]
    try:
        docker("stack", "deploy", "--resolve-image", "never", *files, NAME, env=SHORT | chosen)
        summary = tmp_path / "shared" / "runs" / "summary.json"
        wait_until(
            "the run to finish",
            lambda: summary.exists() and json.loads(summary.read_text())["status"] == "finished",
            600,
            evidence=lambda: logs("trainer") + logs("emb_server"),
            interval=1,
        )
        assert json.loads(summary.read_text())["world_size"] == 2
        assert [*(tmp_path / "shared" / "checkpoints").rglob("MANIFEST.json")]
        assert f"{NAME}_token" not in docker("volume", "ls", "--quiet").stdout.split()
    finally:
        docker("stack", "rm", NAME)
        remove = ("secret", "rm", secret.stdout.strip())
        wait_until("the secret to be free", lambda: docker(*remove, check=False).returncode == 0, 90)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("swarm")
def test_a_compose_file_of_persiaml_trains_on_a_swarm(folder: Path, embedded: tuple[str, str]) -> None:
    """A swarm parses the env file differently from compose."""
    # A kernel may lack the support for the virtual addresses that a swarm assigns to names.
    overlay = folder / "dnsrr.yml"
    overlay.write_text('version: "3.8"\nservices: {persia_nats_service: {deploy: {endpoint_mode: dnsrr}}}\n')
    files = [f"--compose-file={folder / 'docker-compose.yml'}", f"--compose-file={overlay}"]
    docker("stack", "deploy", "--resolve-image", "never", *files, NAME)
    wait_until(
        "the trainer to finish",
        lambda: "Complete" in docker("service", "ps", "--format", "{{.CurrentState}}", f"{NAME}_nn_worker").stdout,
        600,
        evidence=lambda: logs("nn_worker") + logs("embedding_parameter_server"),
        interval=1,
    )
    assert EQUAL.findall(logs("nn_worker")) == [embedded]
