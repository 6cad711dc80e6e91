"""The compose files as each of the three programs parses them. Nothing is started."""

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


def test_all_variables_of_tls_reach_the_services(services: dict[str, Any]) -> None:
    for name in REPLICAS:
        assert {f"PERSIA_TLS_{part}" for part in ("CERT", "KEY", "CA", "NAME")} <= set(services[name]["environment"])


def test_an_object_store_is_chosen_for_all_that_read_or_write_it(services: dict[str, Any]) -> None:
    chosen = Project("persia-files", EXAMPLE, PERSIA_CKPT_DIR="s3://bucket/a", AWS_REGION="here").config()["services"]
    for name in ("emb_server", "data_compose", "trainer"):
        assert services[name]["environment"]["PERSIA_CKPT_DIR"] == "/checkpoints", name
        assert chosen[name]["environment"]["PERSIA_CKPT_DIR"] == "s3://bucket/a", name
        assert chosen[name]["environment"]["AWS_REGION"] == "here", name
        keys = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"}
        assert keys <= set(services[name]["environment"]), name


@pytest.mark.row("S0-14", "S0-15")
def test_what_is_chosen_reaches_the_services() -> None:
    folders = {"CUR_DIR": "/one", "DATA_DIR": "/two", "THIRD_PARTY": "/three", "PERSIA_DIR": "/four"}
    files = {"COMPOSE_FILE": "docker-compose.yaml:docker-compose.source.yaml"}
    project = Project("persia-files", ROOT, **dict.fromkeys(REPLICAS.values(), "5"), **folders, **files)
    services = project.config()["services"]
    for name in REPLICAS:
        assert services[name]["deploy"]["replicas"] == 5
        assert services[name]["environment"]["REPLICA_SIZE"] == "5"
    for name in ("trainer", "data_compose"):  # the services that run Python
        sources = {volume["target"]: volume["source"] for volume in services[name]["volumes"] if "source" in volume}
        chosen = [sources[target] for target in ("/workspace", "/data", "/third_party", "/persia")]
        assert chosen == [*folders.values()], name
        assert services[name]["environment"]["PYTHONPATH"] == "/persia"


@pytest.mark.row("S0-14")
def test_every_variable_has_a_default_and_a_line_in_env(services: dict[str, Any]) -> None:
    text = (ROOT / ".env").read_text()
    explained = set(re.findall(r"^#?([A-Z0-9_]+)=", text, re.MULTILINE))
    with_default = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", text, re.MULTILINE))
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


def test_the_address_of_a_collector_reaches_every_process_of_a_step(services: dict[str, Any]) -> None:
    for name in REPLICAS:
        passed = services[name]["environment"]
        wanted = {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "PERSIA_TRACE_EVERY"}
        assert wanted <= {*passed} and all(passed[each] is None for each in wanted), name


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
        assert "PYTHONPATH" not in services[name]["environment"]  # the packaged wheel is used
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


@pytest.mark.row("S4-43")
def test_monitoring_overlays(services: dict[str, Any]) -> None:
    names = ("docker-compose.yaml", "docker-compose.monitor.yaml", "docker-compose.grafana.yaml")
    both = Project("persia-files", EXAMPLE, COMPOSE_FILE=":".join(names)).config()["services"]
    assert both.keys() == SERVICES | {"prometheus", "pushgateway", "grafana"}
    for name in ("prometheus", "pushgateway"):
        for key in ("read_only", "init", "cap_drop", "security_opt", "user", "stop_grace_period", "logging"):
            assert both[name].get(key) == services["emb_server"].get(key), key
        assert both[name]["build"]["target"] == "monitor"
    for name in ("prometheus", "pushgateway", "grafana"):
        assert [port["host_ip"] for port in both[name]["ports"]] == ["127.0.0.1"], name
    gateway = {"PERSIA_METRICS_GATEWAY_ADDR": "http://pushgateway:9091"}
    for name in SERVICES:
        more = gateway if name in ("trainer", "data_compose") else {}
        assert both[name]["environment"] == services[name].get("environment", {}) | more, name
    docker("stack", "config", *(word for name in names for word in ("--compose-file", str(ROOT / name))))


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


SWARM = ("docker-compose.yaml", "docker-compose.swarm.yaml")
SERVING = ("docker-compose.serving.yaml", "docker-compose.swarm-serving.yaml")


def on_a_swarm(*names: str, **variables: str) -> dict[str, Any]:
    """Return the stack as `docker stack deploy` reads it."""
    files = [word for name in names for word in ("--compose-file", str(ROOT / name))]
    result: dict[str, Any] = yaml.safe_load(docker("stack", "config", *files, env=variables).stdout)
    return result


@pytest.mark.parametrize("files", [SWARM, SWARM + SERVING, SERVING], ids=["job", "job and serving", "serving"])
def test_the_overlay_of_a_swarm_has_one_secret_and_no_volume_for_it(files: tuple[str, ...]) -> None:
    stack = on_a_swarm(*files, TOKEN_SECRET="persia_token_2")  # noqa: S106
    assert stack["secrets"] == {"token": {"name": "persia_token_2", "external": True}}
    job, serving = SERVICES if SWARM[0] in files else set(), {"serving"} if SERVING[0] in files else set()
    assert set(stack["services"]) == job | serving
    for name, service in stack["services"].items():
        mounted = {volume["target"]: volume for volume in service["volumes"]}
        assert mounted["/run/persia"]["type"] == "tmpfs", name
        assert service["secrets"] == [{"source": "token"}]
        assert service["environment"]["PERSIA_TOKEN_FILE"] == "/run/secrets/token"  # noqa: S105
        assert service["deploy"]["placement"]["preferences"] == [{"spread": "node.labels.zone"}]
        assert service["stop_grace_period"] == "1m0s" and service["read_only"] and service["cap_drop"] == ["ALL"]


def test_the_overlay_of_a_swarm_shares_checkpoints_and_spreads() -> None:
    plain = on_a_swarm("docker-compose.yaml")["services"]
    shared = {"SHARED_TYPE": "nfs", "SHARED_OPTIONS": "addr=10.0.0.9,nfsvers=4", "SHARED_DIR": ":/export/persia"}
    stack = on_a_swarm(*SWARM, **shared, SERVERS_PER_NODE="1")
    services = stack["services"]
    for name, folder in (("checkpoints", "checkpoints"), ("runs", "runs")):
        options = {"type": "nfs", "o": "addr=10.0.0.9,nfsvers=4", "device": f":/export/persia/{folder}"}
        assert stack["volumes"][name] == {"driver_opts": options}
    for name, service in services.items():
        assert targets(service) - targets(plain[name]) <= {"/run/persia", "/dev/shm"}  # noqa: S108
        assert targets(plain[name]) <= targets(service)
        mounted = {volume["target"]: volume for volume in service["volumes"]}
        for target in {"/checkpoints", "/runs"} & set(mounted):
            assert mounted[target] == {
                "type": "volume", "source": target[1:], "target": target, "volume": {"nocopy": True},
            }  # fmt: skip
        for key in ("image", "command", "networks"):
            assert service.get(key) == plain[name].get(key), (name, key)
        patient = {"start_period": "30m0s"} if name == "middleware" else {}  # it waits until all servers are replaced
        assert service.get("healthcheck") == (
            plain[name]["healthcheck"] | patient if "healthcheck" in plain[name] else None
        )
        assert service["deploy"]["restart_policy"] == plain[name]["deploy"]["restart_policy"]
    orders = {name: service["deploy"]["update_config"]["order"] for name, service in services.items()}
    assert orders == dict.fromkeys(SERVICES, "stop-first") | {"middleware": "start-first"}
    assert services["middleware"]["deploy"]["update_config"]["failure_action"] == "pause", (
        "the old one has the old secret"
    )
    steps = {name: service["deploy"]["update_config"].get("parallelism") for name, service in services.items()}
    assert steps == {"persia_nats_service": None, "emb_server": 1, "middleware": 1, "data_compose": 0, "trainer": 0}
    assert services["emb_server"]["deploy"]["placement"]["max_replicas_per_node"] == 1
    assert services["emb_server"]["deploy"]["placement"]["constraints"] == ["node.labels.persia.server != false"]
    assert services["trainer"]["deploy"]["placement"]["constraints"] == ["node.labels.persia.trainer != false"]
    serving = on_a_swarm(*SERVING, SERVING_REPLICA="3")["services"]["serving"]
    assert serving["deploy"]["replicas"] == 3 and serving["deploy"]["update_config"]["order"] == "start-first"
