"""The images: their content, and the inputs of their build."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from compose.conftest import ENGINE, Stacks, docker

BUILDS = ("hatchling", "maturin", "ruff", "uv")
"""Packages that build or check the project, which no runtime image has."""
TESTS = ("flask", "moto", "mypy", "pytest-xdist")
"""Packages that only the test image has."""
SERVER = "/usr/local/bin/persia-embedding-sharded-server"
EXTENSION = "/opt/venv/lib/*/site-packages/persia_core/*.so"
"""The files of the compiled extension in the runtime image."""
SERVER_LIMIT = 60_000_000
"""The number of bytes that the server image may add to its base."""


compiled = pytest.mark.skipif(ENGINE == "prebuilt", reason="the images contain the debug build of the other tests")


def size(image: str) -> int:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image).stdout)


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables that build tests/compose/probe.Dockerfile in place of the server image."""
    overlay = tmp_path / "overlay.yaml"
    build = {"dockerfile": "tests/compose/probe.Dockerfile", "target": "", "args": {"BUILD_ID": str(uuid.uuid4())}}
    overlay.write_text(json.dumps({"version": "3.8", "services": {"emb_server": {"build": build}}}))
    variables = {
        "COMPOSE_FILE": f"{ROOT}/docker-compose.yaml:{overlay}",
        "COMPOSE_PROJECT_NAME": f"persia-probe-{os.getpid()}",
        "PERSIA_IMAGE": f"persia-probe-{os.getpid()}",
    }
    yield variables
    docker("image", "rm", "--force", f"{variables['PERSIA_IMAGE']}/server:dev", check=False)


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("image", ["server", "runtime"])
def test_an_image_that_connects_to_an_object_store_has_certificates(image: str) -> None:
    command = ("run", "--rm", "--entrypoint", "grep", f"persia/{image}:dev", "--count", "BEGIN CERTIFICATE")
    assert int(docker(*command, "/etc/ssl/certs/ca-certificates.crt").stdout) > 100


@pytest.mark.row("S0-06")
def test_proxy_and_network_of_the_host_reach_the_build_but_not_the_image(probe: dict[str, str]) -> None:
    docker("compose", "build", "emb_server", env=probe | {"HTTP_PROXY": "http://x"})
    image = f"{probe['PERSIA_IMAGE']}/server:dev"
    seen = docker("run", "--rm", image, "cat", "/proxy", "/interfaces").stdout.split()
    assert hashlib.sha256(b"http://x").hexdigest() in seen
    assert {"docker0", "lo"} <= set(seen)
    assert "http://x" not in docker("image", "inspect", image).stdout
    assert "http://x" not in docker("history", "--no-trunc", image).stdout


@compiled
@pytest.mark.usefixtures("images")
def test_the_server_image_is_small_and_has_no_python() -> None:
    assert size("persia/server:dev") - size("debian:trixie-slim") <= SERVER_LIMIT
    found = docker(
        "run", "--rm", "--entrypoint", "sh", "persia/server:dev", "-c", "command -v python3 python perl cargo pip; true"
    )
    assert found.stdout.replace("/usr/bin/perl\n", "") == ""  # Perl is part of the base


@pytest.mark.usefixtures("images")
def test_the_runtime_image_runs_as_any_user_on_a_read_only_disk() -> None:
    command = "nats-server --version; python -c 'import torch, pytest, persia, persia_core; print(persia.__file__)'"
    result = docker("run", "--rm", "--read-only", "--user", "4711", "persia/runtime:dev", "sh", "-euc", command)
    assert result.stdout.startswith("nats-server")
    assert "/opt/venv/lib/" in result.stdout
    assert "packaged sha256=" in result.stderr and "build=unknown" not in result.stderr


@pytest.mark.row("S1-16")
@pytest.mark.usefixtures("images")
def test_a_startup_hook_runs_in_the_container_before_training(stacks: Stacks, tmp_path: Path) -> None:
    """The hook has the folder, the packages and the variables of the training. If it fails, the container ends."""
    folder = tmp_path / "mine"
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "embedding_config.yml").write_text("slots_config: {a: {dim: 4}}\n")
    (folder / "config" / "global_config.yml").write_text("common_config: {}\n")
    (folder / "train.py").write_text("print('trains after', open('/tmp/prepared').read())\n")
    hook = folder / "startup-hook.sh"
    hook.write_text("python -c 'import torch'; pwd >/tmp/prepared; echo $PERSIA_JOB >>/tmp/prepared\n")
    train = ("up", "--no-build", "--no-deps", "--exit-code-from", "trainer", "trainer")
    project = stacks(folder, TRAINER_REPLICA="1", PERSIA_JOB="mine")
    done = project(*train, check=False)
    assert done.returncode == 0 and re.search(r"trains after /workspace\n.*mine", done.stdout), done.stdout
    (project.folder / "startup-hook.sh").write_text("echo preparing; pip install --no-index no-such-package; echo no\n")
    project.remove()
    done = project(*train, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "No matching distribution found for no-such-package" in said, said
    assert "startup-hook.sh ended with exit code 1" in said and "trains after" not in said


@pytest.mark.usefixtures("images")
def test_each_image_says_what_is_in_it() -> None:
    server, runtime = bill("persia/server:dev"), bill("persia/runtime:dev")
    assert {"cargo/tonic", "cargo/persia-store"} <= server.keys() <= runtime.keys()
    assert "cargo/pyo3" not in server and {"cargo/pyo3", "pypi/torch", "pypi/pytest", "pypi/persia"} <= runtime.keys()
    assert not {f"pypi/{name}" for name in (*BUILDS, *TESTS)} & runtime.keys()
    locked = (ROOT / "requirements" / "runtime.txt").read_text()
    for name in ("torch", "grpcio", "protobuf"):
        assert f"\n{name}=={runtime[f'pypi/{name}']} " in locked, name
    assert 'name = "tonic"\nversion = "{}"'.format(server["cargo/tonic"]) in (ROOT / "rust_core/Cargo.lock").read_text()


@pytest.mark.nightly
@pytest.mark.usefixtures("image_of_tests")
def test_the_image_of_the_tests_adds_their_requirements() -> None:
    runtime, test = bill("persia/runtime:dev"), bill("persia/test:dev")
    assert runtime.items() <= test.items()
    assert {f"pypi/{name}" for name in TESTS} <= test.keys() - runtime.keys()
    assert not {f"pypi/{name}" for name in BUILDS} & test.keys()


@compiled
@pytest.mark.usefixtures("images")
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm here (binutils)")
@pytest.mark.parametrize(
    "file", ["/usr/local/bin/persia-embedding-sharded-server", "/opt/venv/lib/*/site-packages/persia_core/*.so"]
)
def test_no_vector_instruction_is_a_function_of_its_own(file: str, tmp_path: Path) -> None:
    """A closure or an iterator around a vector instruction can turn it into a call, which is three times as slow."""
    command = ["docker", "run", "--rm", "--entrypoint", "sh", "persia/runtime:dev", "-c", f"cat {file}"]
    (tmp_path / "binary").write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    symbols = subprocess.run(["nm", "-C", tmp_path / "binary"], check=True, capture_output=True, text=True).stdout
    assert re.search(r" [tT] .*persia_store::", symbols), "want the store's functions among the symbols"
    assert re.findall(r" t (core::core_arch::x86::(?:avx|f16c|fma)\S*)", symbols) == []


def bill(image: str) -> dict[str, str]:
    """Return the versions in an image's bill of materials by kind and name."""
    content = json.loads(docker("run", "--rm", "--entrypoint", "cat", image, "/sbom.json").stdout)
    assert content["bomFormat"] == "CycloneDX"
    return dict(each["purl"].removeprefix("pkg:").split("@") for each in content["components"])


@pytest.mark.nightly
@pytest.mark.usefixtures("images")
def test_a_change_of_the_sources_does_not_install_pytorch_again(tmp_path: Path) -> None:
    context = tmp_path / "clone"
    for name in docker_context():
        target = context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    with (context / "persia_py/persia/env.py").open("a") as file:
        file.write("# changed\n")
    names = {"PERSIA_IMAGE": f"persia-probe-{os.getpid()}", "COMPOSE_PROJECT_NAME": f"persia-probe-{os.getpid()}"}
    image = f"{names['PERSIA_IMAGE']}/runtime:dev"
    try:
        docker("compose", "--project-directory", str(context), "build", "trainer", timeout=800, env=names)
        before, after = layers("persia/runtime:dev"), layers(image)
        assert before != after
        shared = sum(1 for one, other in zip(before, after, strict=True) if one == other)
        # The shared layers are the base, its certificates, Python, PyTorch, the other requirements, and those before
        # the sources.
        assert shared >= 6
    finally:
        docker("image", "rm", "--force", image, check=False)


def layers(image: str) -> list[str]:
    result: list[str] = json.loads(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", image).stdout)
    return result


def docker_context() -> list[str]:
    """Return the files that images are built from: files that git tracks, certificates, and the prebuilt engine."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ignored = [*(ROOT / "services" / "ca").glob("*.crt"), *(ROOT / "services" / "engine").rglob("*")]
    return [name for name in listed if (ROOT / name).exists()] + [
        str(path.relative_to(ROOT)) for path in ignored if path.is_file()
    ]
