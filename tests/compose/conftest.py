"""Tests on a real Docker engine. Each project has a unique name, and is removed completely."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from waiting import wait_until

Result = subprocess.CompletedProcess[str]

BASE = "debian:trixie-slim"
TEST_OVERLAY = {"COMPOSE_FILE": "docker-compose.yaml:docker-compose.test.yaml"}
ENGINE = os.environ.get("ENGINE", "build")
"""Where images get their engine from; ``prebuilt``, as in ``make test``, means the engine of the other tests."""
BUILD = 2400.0
"""Seconds that building all images may take, including the download of PyTorch and the compilation of the engine."""

# The time-outs in these tests only end hangs. They are long, because `import torch` takes more than a minute if a
# container reads it for the first time from a slow disk.


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "docker: needs a Docker engine; every test in tests/compose")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in tests/compose. Their time-out is that of a training run. Builds have a separate time-out."""
    for item in items:
        if "compose" in item.path.parts:
            item.add_marker("docker")
            item.add_marker(pytest.mark.timeout(900, func_only=True))


def docker(*arguments: str, timeout: float = 300.0, check: bool = True, env: Mapping[str, str] | None = None) -> Result:
    """Run docker in the root of the clone, with ``env`` instead of the shell's settings for the stack."""
    chosen = re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env").read_text(), re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    result = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env=environment | {"ENGINE": ENGINE} | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert not check or result.returncode == 0, f"docker {' '.join(arguments)}\n{result.stdout}\n{result.stderr}"
    return result


class Project:
    """The stack with a unique project name, and with the variables that a user would write into .env."""

    def __init__(self, name: str, folder: Path, **variables: str) -> None:
        self.name = name
        self.folder = folder
        self.variables = {
            "COMPOSE_PROJECT_NAME": name,
            "COMPOSE_ANSI": "never",
            "CUR_DIR": str(folder),
            "PERSIA_RESTART": "no",
            **variables,
        }

    def __call__(
        self, *arguments: str, timeout: float = 300.0, check: bool = True, env: Mapping[str, str] | None = None
    ) -> Result:
        """Run ``docker compose ARGUMENTS``. ``env`` overrides the project's variables."""
        return docker("compose", *arguments, timeout=timeout, check=check, env=self.variables | dict(env or {}))

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration."""
        result: dict[str, Any] = json.loads(self("config", "--format", "json").stdout)
        return result

    def up(self, *options: str) -> None:
        """Start services in the background, without their dependencies."""
        self("up", "--detach", "--no-build", "--no-deps", *options)

    def train(self, *, timeout: float = 600.0, env: Mapping[str, str] | None = None) -> Result:
        """Run the whole stack until a trainer ends. The result has the exit code of the trainer."""
        return self("up", "--no-build", "--exit-code-from", "trainer", timeout=timeout, check=False, env=env)

    def run(self, *command: str, timeout: float = 300.0, check: bool = True) -> Result:
        """Run a command in a container of the trainer, without starting other services."""
        return self("run", "--rm", "--no-deps", "--no-TTY", "trainer", *command, timeout=timeout, check=check)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, running or not, in order of their numbers."""
        labels = {"project": self.name, "service": service, "oneoff": "False"}
        wanted = [f"--filter=label=com.docker.compose.{label}={value}" for label, value in labels.items()]
        listed = docker("ps", "--all", "--no-trunc", *wanted, "--format", "{{.Names}} {{.ID}}").stdout
        return [line.split()[1] for line in sorted(listed.splitlines())]

    def inspect(self, service: str, form: str) -> list[str]:
        """Return the output of ``docker inspect --format`` for each container of a service, in order of numbers."""
        containers = self.containers(service)
        return docker("inspect", "--format", form, *containers).stdout.splitlines() if containers else []

    def states(self, service: str) -> list[tuple[str, int]]:
        """Return ``(status, exit code)`` of each of a service's containers."""
        answers = [line.split() for line in self.inspect(service, "{{.State.Status}} {{.State.ExitCode}}")]
        return [(status, int(code)) for status, code in answers]

    def healthy(self, *services: str, timeout: float = 180.0) -> None:
        """Wait until each of the services' containers is ready to serve."""

        def states() -> set[str]:
            return {state for service in services for state in self.inspect(service, "{{.State.Health.Status}}")}

        self.wait(f"{', '.join(services)} to be healthy", lambda: states() == {"healthy"}, timeout=timeout)

    def logs(self, *services: str) -> str:
        """Return the output of services."""
        result = self("logs", "--no-color", *services, check=False)
        return result.stdout + result.stderr

    def wait(self, what: str, condition: Callable[[], object], *, timeout: float = 180.0) -> None:
        """Wait until the condition holds."""
        wait_until(what, condition, timeout, evidence=self.logs, interval=0.2)

    def says(self, service: str, text: str, *, times: int = 1, timeout: float = 180.0) -> None:
        """Wait until a service has written ``text``."""
        self.wait(f"{service} to say {text!r}", lambda: self.logs(service).count(text) >= times, timeout=timeout)

    def ended(self, service: str, *, timeout: float = 600.0) -> list[int]:
        """Wait for all containers of a service to end and return their exit codes."""
        self.wait(
            f"{service} to end", lambda: all(state == "exited" for state, _ in self.states(service)), timeout=timeout
        )
        return [code for _, code in self.states(service)]

    def read(self, volume: str, command: str) -> str:
        """Return the output of a shell command in a folder, which is one of the project's volumes."""
        mounted = f"{self.name}_{volume}:/{volume}:ro"
        options = ["--rm", "--network", "none", "--volume", mounted, "--workdir", f"/{volume}"]
        return docker("run", *options, BASE, "sh", "-euc", command).stdout

    def summary(self) -> dict[str, Any] | None:
        """Return ``summary.json`` of the run, if it exists."""
        text = self.read("runs", "if [ -e summary.json ]; then cat summary.json; fi")
        return json.loads(text) if text else None

    def remove(self, *, volumes: bool = True, grace: int = 0) -> None:
        """Stop and remove everything of this project. Containers have ``grace`` seconds to end on their own."""
        options = ["--volumes"] if volumes else []
        self("down", "--timeout", str(grace), "--remove-orphans", *options, check=False)


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    """Skip if no engine responds. Ensure that `docker compose` and the base image exist."""
    if shutil.which("docker") is None:
        pytest.skip("no docker command here")
    answer = docker("version", "--format", "{{.Server.Version}}", check=False)
    if answer.returncode != 0:
        pytest.skip("no Docker engine answers here")
    for tool in ("compose_plugin.sh", "base_image.sh"):
        subprocess.run([ROOT / "tools" / tool], check=True, timeout=300)


@pytest.fixture(scope="session")
def images(engine: None) -> None:
    """Build the images of the stack, as `docker compose build` does in a fresh clone."""
    docker("compose", "build", timeout=BUILD)


@pytest.fixture(scope="session")
def image_of_tests(images: None) -> None:
    """Build the trainer's image with the requirements of all tests."""
    docker("compose", "build", "trainer", timeout=BUILD, env=TEST_OVERLAY)


Stacks = Callable[..., Project]


def make_project(name: str, folder: Path, copy: Path, **variables: str) -> Project:
    """Return a project of a copy of ``folder`` that any user, such as that of a container, may read and write."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    return Project(re.sub(r"[^a-z0-9-]", "-", f"persia-test-{os.getpid()}-{name.lower()}"), copy, **variables)


@pytest.fixture
def stacks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stacks]:
    """Create projects from folders of scripts: ``stacks(folder, SERVER_REPLICA="1")``. On failure, show their logs."""
    made: list[Project] = []

    def make(folder: Path, **variables: str) -> Project:
        name = f"{request.node.name[:20]}-{len(made)}"
        made.append(make_project(name, folder, tmp_path / f"workspace-{len(made)}", **variables))
        return made[-1]

    failed = request.session.testsfailed
    yield make
    for project in made:
        if request.session.testsfailed > failed:
            print(project.logs())  # noqa: T201
        project.remove()
