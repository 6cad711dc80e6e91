"""The compose files as each of the three engines reads them. Nothing is started."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from conftest import ROOT

from compose.conftest import Project, docker

BASE = ROOT / "docker-compose.yaml"
EXAMPLE = ROOT / "examples" / "dlrm"
SERVICES = {"persia_nats_service", "emb_server", "middleware", "data_compose", "trainer"}
REPLICAS = {
    "emb_server": "SERVER_REPLICA",
    "middleware": "MIDDLEWARE_REPLICA",
    "data_compose": "COMPOSE_REPLICA",
    "trainer": "TRAINER_REPLICA",
}


@pytest.fixture
def services() -> dict[str, Any]:
    result: dict[str, Any] = Project("persia-files", EXAMPLE).config()["services"]
    return result


def targets(service: dict[str, Any]) -> set[str]:
    return {volume["target"] for volume in service["volumes"]}


@pytest.mark.row("S0-10", "S0-11", "S0-17", "S0-18")
def test_each_service_has_its_keys() -> None:
    raw = yaml.safe_load(BASE.read_text())["services"]
    assert set(raw) == SERVICES
    for name, count in REPLICAS.items():
        keys = {"env_file", "environment", "depends_on", "image", "command", "deploy", "volumes"}
        assert keys <= set(raw[name]), name
        assert raw[name]["environment"]["REPLICA_INDEX"] == "{{.Task.Slot}}"
        assert raw[name]["deploy"]["endpoint_mode"] == "dnsrr"
        assert f"${{{count}:-" in raw[name]["deploy"]["replicas"]


@pytest.mark.row("S0-10")
def test_middleware(services: dict[str, Any]) -> None:
    assert services["middleware"]["command"] == ["launch_middleware.sh"]
    assert set(services["middleware"]["depends_on"]) == {"emb_server", "persia_nats_service"}
    assert {"/workspace", "/third_party"} <= targets(services["middleware"])


@pytest.mark.row("S0-11")
def test_server(services: dict[str, Any]) -> None:
    assert services["emb_server"]["command"] == ["launch_server.sh"]
    assert services["emb_server"]["networks"]["persia"]["aliases"] == ["server"]
    assert {"/workspace", "/third_party"} <= targets(services["emb_server"])


@pytest.mark.row("S0-17")
def test_data_compose(services: dict[str, Any]) -> None:
    assert set(services["data_compose"]["depends_on"]) == {"trainer", "middleware", "persia_nats_service"}
    assert services["data_compose"]["command"] == ["launch_compose.sh"]
    assert {"/workspace", "/third_party", "/data"} <= targets(services["data_compose"])


@pytest.mark.row("S0-18")
def test_trainer(services: dict[str, Any]) -> None:
    assert services["trainer"]["command"] == ["launch_persia.sh"]
    assert services["trainer"]["environment"]["GPU_NUM"] == "0"
    assert "NCCL_SOCKET_IFNAME" in services["trainer"]["environment"]


@pytest.mark.row("S0-14")
def test_what_is_chosen_reaches_the_services() -> None:
    folders = {"CUR_DIR": "/one", "DATA_DIR": "/two", "THIRD_PARTY": "/three", "PERSIA_DIR": "/four"}
    files = {"COMPOSE_FILE": "docker-compose.yaml:docker-compose.source.yaml"}
    project = Project("persia-files", ROOT, **dict.fromkeys(REPLICAS.values(), "5"), **folders, **files)
    services = project.config()["services"]
    for name in REPLICAS:
        assert services[name]["deploy"]["replicas"] == 5
        assert services[name]["environment"]["REPLICA_SIZE"] == "5"
    sources = {volume["target"]: volume["source"] for volume in services["trainer"]["volumes"] if "source" in volume}
    assert {sources[target] for target in ("/workspace", "/data", "/third_party", "/persia")} == set(folders.values())


@pytest.mark.row("S0-14")
def test_every_variable_has_a_default_and_a_line_in_env(services: dict[str, Any]) -> None:
    text = (ROOT / ".env").read_text()
    explained = set(re.findall(r"^#?([A-Z_]+)=", text, re.MULTILINE))
    with_default = dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE))
    used: set[str] = set()
    for path in ROOT.glob("docker-compose*.yaml"):
        content = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.MULTILINE)
        assert not re.search(r"\$[A-Z]|\$\{[A-Z_]+\}", content), f"{path.name}: a variable without a default"
        for name, default in re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", content):
            used.add(name)
            if path == BASE and name in with_default:
                assert with_default[name] == default, name
    passed = {name for name, value in services["trainer"]["environment"].items() if value is None}
    assert used | passed | {"COMPOSE_FILE"} == explained


def test_services_are_hardened(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] and service["init"], name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service["user"].startswith("0")
        assert not {"ports", "privileged", "cap_add", "network_mode", "pid"} & set(service)
        assert service["stop_grace_period"] == "1m0s"
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
        assert {"type": "tmpfs", "target": "/tmp"}.items() <= service["volumes"][-1].items()  # noqa: S108
        assert all("docker.sock" not in str(volume) for volume in service["volumes"])


def test_overlays(services: dict[str, Any]) -> None:
    def overlaid(name: str) -> dict[str, Any]:
        files = f"docker-compose.yaml:docker-compose.{name}.yaml"
        result: dict[str, Any] = Project("persia-files", EXAMPLE, COMPOSE_FILE=files).config()["services"]
        return result

    assert overlaid("debug")["emb_server"]["cap_add"] == ["SYS_PTRACE"]
    gpu = overlaid("gpu")["trainer"]
    assert gpu["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert gpu["image"] == services["trainer"]["image"]  # built for both engines: tests/compose/test_images.py
    test = overlaid("test")
    assert test["trainer"]["image"] == "persia/test:dev" and test["trainer"]["build"]["target"] == "test"
    assert {name for name in SERVICES if test[name] != services[name]} == {"trainer"}
    source = overlaid("source")
    for name in ("data_compose", "trainer"):
        assert targets(source[name]) == targets(services[name]) | {"/persia"}
        assert source[name]["environment"]["PYTHONPATH"] == "/persia"
        assert "PYTHONPATH" not in services[name]["environment"]  # the packaged wheel runs
    assert {name for name in SERVICES if source[name] != services[name]} == {"data_compose", "trainer"}
    serving = overlaid("serving")
    assert all(serving[name] == services[name] for name in SERVICES)
    new = serving.pop("serving")
    assert serving.keys() == SERVICES
    for key in ("read_only", "init", "cap_drop", "security_opt", "user", "stop_grace_period", "logging", "env_file"):
        assert new.get(key) == services["emb_server"].get(key), key
    assert new["build"]["target"] == "serving"
    assert {"/bundle", "/run/persia", "/third_party"} <= targets(new)
    assert [port["host_ip"] for port in new["ports"]] == ["127.0.0.1"] * 2
    for service in overlaid("publish").values():
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1"


def test_compose_1_29_reads_it() -> None:
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("no docker-compose 1.29 here")
    version = subprocess.run([command, "version", "--short"], capture_output=True, text=True, check=True)
    if not version.stdout.startswith("1."):
        pytest.skip("docker-compose is no 1.x here")
    result = subprocess.run([command, "config"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(yaml.safe_load(result.stdout)["services"]) == SERVICES


def test_swarm_reads_it() -> None:
    result = docker("stack", "config", "--compose-file", str(BASE))
    services = yaml.safe_load(result.stdout)["services"]
    assert set(services) == SERVICES
    assert {name: services[name]["deploy"]["replicas"] for name in REPLICAS} == {
        "emb_server": 2,
        "middleware": 2,
        "data_compose": 1,
        "trainer": 2,
    }


def test_images_are_shared(services: dict[str, Any]) -> None:
    assert services["emb_server"]["image"] == services["middleware"]["image"]
    assert services["trainer"]["image"] == services["data_compose"]["image"]
    assert json.dumps(services["emb_server"]["build"]) == json.dumps(services["middleware"]["build"])
