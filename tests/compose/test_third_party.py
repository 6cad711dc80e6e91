"""User builds in third_party/: the development image makes them, containers prefer them, and results are equal."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT
from waiting import wait_until

from compose.conftest import BUILD, Result, Stacks, docker
from compose.test_images import docker_context
from compose.test_stack import EXAMPLE, SHORT, digests, finished

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("images"), pytest.mark.timeout(900, func_only=True)]

FILES = {"persia_core.so", "persia-embedding-sharded-server", "persia-embedding-sharded-middleware"}
SECTIONS = ["Embedding server", "Middleware", "Engine (`persia_core`)", "Python package"]
"""The sections of docs/troubleshooting.md that have commands."""
PROJECT = {"COMPOSE_PROJECT_NAME": f"persia-dev-{os.getpid()}"}
MINE = {"PERSIA_UID": str(os.getuid()), "PERSIA_GID": str(os.getgid())}


@pytest.fixture(scope="module")
def clone(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of this clone with a debug build in its third_party/."""
    copy = tmp_path_factory.mktemp("clone")
    copy.chmod(0o755)
    for name in [*docker_context(), ".env"]:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    run(copy, "make", "third-party", "PROFILE=dev")
    yield copy
    docker("compose", "down", "--volumes", "--timeout", "5", env=PROJECT)
    docker("compose", "-f", "docker-compose.dev.yaml", "down", "--volumes", env=PROJECT)


def run(clone: Path, *command: str) -> Result:
    """Run a command as a user would in the clone."""
    environment = {**os.environ, **PROJECT}
    result = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=BUILD)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


def cargo(clone: Path, *arguments: str) -> Result:
    options = ("-f", "docker-compose.dev.yaml", "--project-directory", str(clone), "run", "--rm", "--no-TTY", "dev")
    return docker("compose", *options, "cargo", *arguments, timeout=800, env=PROJECT | MINE)


@pytest.mark.row("S0-02", "S0-05")
def test_everything_is_there_under_its_name(clone: Path) -> None:
    folder = clone / "third_party"
    assert {path.name for path in folder.iterdir()} == FILES | {"BUILD_INFO", "README.md"}
    lines = (folder / "BUILD_INFO").read_text().splitlines()
    assert len(lines) == len(FILES)
    for line in lines:
        assert re.fullmatch(r"[0-9a-f]{64}  \S+ build=\S+ dev rustc \d+\.\d+\.\d+", line), line


@pytest.mark.row("S0-03")
def test_the_engine_builds_for_gpus_without_a_toolkit(clone: Path) -> None:
    cargo(clone, "build", "--package", "persia-core", "--features", "cuda", "--target-dir", "/opt/target")
    assert "libpersia_core.so" in built()


@pytest.mark.row("S0-04")
def test_one_package_gives_both_binaries(clone: Path) -> None:
    cargo(clone, "build", "--package", "persia-embedding-sharded-server")
    assert FILES - {"persia_core.so"} <= built()


def built() -> set[str]:
    """Return the names of the debug builds of the development image's cargo."""
    volume = f"{PROJECT['COMPOSE_PROJECT_NAME']}_target:/opt/target"
    return set(docker("run", "--rm", "--volume", volume, "persia/dev:dev", "ls", "/opt/target/debug").stdout.split())


@pytest.mark.slow
@pytest.mark.row("S0-07", "S0-08", "S0-16", "S0-23")
def test_overrides_run_and_compute_the_same(clone: Path, stacks: Stacks, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    found = []
    hashes: dict[tuple[str, str], set[str]] = {}
    for third_party in (tmp_path / "nothing", clone / "third_party"):
        project = stacks(EXAMPLE, THIRD_PARTY=str(third_party), REPRODUCIBLE="1", **SHORT)
        result = project.train()
        assert result.returncode == 0, result.stdout + result.stderr
        kind = "override" if third_party == clone / "third_party" else "packaged"
        for service, file in (
            ("emb_server", "persia-embedding-sharded-server"),
            ("middleware", "persia-embedding-sharded-middleware"),
            ("trainer", "persia_core"),
        ):
            lines = re.findall(rf"running \S*{file}\S*: (\w+) sha256=", project.logs(service))
            assert lines == [kind] * 2, project.logs(service)
            hashes[kind, service] = set(re.findall(rf"running \S*{file}\S*: \w+ sha256=(\w+)", project.logs(service)))
        found.append((digests(project), finished(project)["result"]["auc"]))
    for service in ("emb_server", "middleware", "trainer"):
        assert hashes["packaged", service].isdisjoint(hashes["override", service]), "two builds were compared"
    assert any(name.startswith("shard-") for name in found[0][0]), found[0]
    assert found[0] == found[1]


@pytest.mark.row("S0-16")
def test_the_engine_of_third_party_wins_under_run(clone: Path, stacks: Stacks) -> None:
    project = stacks(EXAMPLE, THIRD_PARTY=str(clone / "third_party"))
    result = project.run("python", "-c", "import persia_core; print(persia_core.__file__)")
    assert result.stdout == "/third_party/persia_core.so\n"
    assert "running /third_party/persia_core.so: override sha256=" in result.stderr


def blocks() -> dict[str, str]:
    """Return the commands in each section of docs/troubleshooting.md."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    return {
        section.split("\n", 1)[0]: commands[0]
        for section in text.split("\n## ")[1:]
        if (commands := re.findall(r"```sh\n(.*?)```", section, re.DOTALL))
    }


@pytest.mark.row("S0-01")
@pytest.mark.parametrize("section", SECTIONS)
def test_troubleshooting(clone: Path, section: str) -> None:
    commands = blocks()[section]
    assert 1 <= len(commands.strip().splitlines()) <= 4
    run(clone, "sh", "-eux", "-c", commands)


@pytest.mark.row("S0-01")
def test_each_component_has_a_section() -> None:
    assert list(blocks()) == SECTIONS


@pytest.mark.row("S1-06", "S1-11", "S1-13", "S1-14", "S1-24")
def test_the_commands_for_containers(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the table for containers in docs/troubleshooting.md run one after the other in the clone."""
    commands = table_commands("With containers")
    assert len(commands) == 11 and commands[-1] == "docker compose down --volumes"
    persia = f"{sys.executable} -m persia"
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'persia_py'}:{os.environ.get('PYTHONPATH', '')}")
    for command in commands:
        if "trainer persia status" in command or "--stack" in command:  # all processes must have started
            wait_until("the stack", partial(succeeds, clone, re.sub("^persia", persia, command)), 300)
        else:
            assert succeeds(clone, re.sub("^persia", persia, command)), command
    (clone / "mine").mkdir()
    for words in (
        "data synth mine/clicks.parquet --rows 5000",
        "data inspect mine/clicks.parquet -o mine/persia.yml",
        "debug shell --context mine -- persia train persia.yml --test --local",
        "debug shell --context mine -- python -m persia.testing persia.yml",
    ):
        assert succeeds(clone, f"{persia} {words}"), words


def succeeds(clone: Path, command: str) -> bool:
    """Whether a command ends with exit code 0 in the clone."""
    environment = {**os.environ, **PROJECT}
    done = subprocess.run(["sh", "-c", command], cwd=clone, env=environment, capture_output=True, timeout=BUILD)
    return done.returncode == 0


def table_commands(before: str) -> list[str]:
    """Return the commands of the table in docs/troubleshooting.md that follows a text."""
    table = (ROOT / "docs" / "troubleshooting.md").read_text().partition(before)[2].split("\n\n")[1]
    return re.findall(r"\| `([^`]+)` \|$", table, re.MULTILINE)
