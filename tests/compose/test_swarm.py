"""The same compose file on a swarm of one node."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
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


class Overlay:
    """The example on a swarm of one machine, with the overlay, a secret and folders as in docs/three-machines.md."""

    def __init__(self, folder: Path) -> None:
        self._secrets: list[str] = []
        self.shared, workspace = folder / "shared", folder / "workspace"
        shutil.copytree(EXAMPLE, workspace)
        for name in ("checkpoints", "runs"):
            (self.shared / name).mkdir(parents=True)
        for path in (workspace, *workspace.rglob("*"), *self.shared.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        self._chosen = {"CUR_DIR": str(workspace), "SHARED_DIR": str(self.shared)}

    def deploy(self, secret: str, **chosen: str) -> None:
        """Create a secret, and deploy the stack with it."""
        create = ["docker", "secret", "create", secret, "-"]
        made = subprocess.run(create, input=secret.ljust(64, "s"), capture_output=True, text=True, check=True)
        self._secrets.append(made.stdout.strip())
        files = ["--compose-file=docker-compose.yaml", "--compose-file=docker-compose.swarm.yaml"]
        variables = self._chosen | chosen | {"TOKEN_SECRET": secret}
        docker("stack", "deploy", "--resolve-image", "never", *files, NAME, env=variables)

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        def evidence() -> str:
            return logs("trainer") + logs("middleware") + logs("emb_server")

        wait_until(what, condition, 600, evidence=evidence, interval=1)

    def remove(self) -> None:
        docker("stack", "rm", NAME)
        remove = ("secret", "rm", *self._secrets)
        wait_until("the secrets to be free", lambda: docker(*remove, check=False).returncode == 0, 90)


@pytest.fixture
def overlay(swarm: None, tmp_path: Path) -> Iterator[Overlay]:
    found = Overlay(tmp_path)
    yield found
    found.remove()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_overlay_of_several_machines_trains_on_one(overlay: Overlay) -> None:
    """No volume of the stack has a secret."""
    overlay.deploy(NAME, **SHORT)
    summary = overlay.shared / "runs" / "summary.json"
    overlay.wait(
        "the run to finish", lambda: summary.exists() and json.loads(summary.read_text())["status"] == "finished"
    )
    assert json.loads(summary.read_text())["world_size"] == 2
    assert [*(overlay.shared / "checkpoints").rglob("MANIFEST.json")]
    assert f"{NAME}_token" not in docker("volume", "ls", "--quiet").stdout.split()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1500, func_only=True)
def test_an_update_of_all_services_replaces_every_process(overlay: Overlay) -> None:
    """The servers are replaced one after another. Middlewares wait for them, and are not rolled back."""
    long = {"PERSIA_NN_WORKER_ENTRY": "train.py --epochs 50", "PERSIA_DATALOADER_ENTRY": "data_compose.py --epochs 50"}
    overlay.deploy(NAME, **long)
    overlay.wait("a step", lambda: "first step done" in logs("trainer"))
    overlay.deploy(f"{NAME}-2", **long)
    state = ("service", "inspect", "--format", "{{.UpdateStatus.State}}", f"{NAME}_middleware")
    overlay.wait("the update to end", lambda: docker(*state).stdout.strip() != "updating")
    assert docker(*state).stdout.strip() == "completed", logs("middleware")
    overlay.wait("a step with the new secret", lambda: "first step done" in newest_logs("trainer"))


def newest_logs(service: str) -> str:
    """Return the logs of the running containers of a service."""
    running = ["--filter", f"name={NAME}_{service}", "--filter", "status=running"]
    return "".join(docker("logs", each).stderr for each in docker("ps", "--quiet", *running).stdout.split())


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
