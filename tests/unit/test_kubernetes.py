"""The manifests in deploy/kubernetes match the schemas of the API, each other, and the code."""

import json
import re
import shlex
import shutil
import subprocess
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from persia.launch.supervision import SAVING_GRACE
from persia.runtime.exit_codes import ExitCode

pytestmark = pytest.mark.clone

FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.29", "1.31", "1.33")
"""Versions of Kubernetes whose schemas the manifests must fit."""
SERVICES = {
    "nats": "persia_nats_service",
    "server": "emb_server",
    "middleware": "middleware",
    "data-compose": "data_compose",
    "trainer": "trainer",
    "serving": "serving",
}
"""The workloads, and the services of the compose files that run the same."""

Document = dict[str, Any]


KUSTOMIZE = (5, 3)
"""The oldest Kustomize that builds the manifests. kubectl 1.31 has 5.4, kubectl 1.30 has 5.0."""


def read(*names: str) -> list[Document]:
    return [document for name in names for document in yaml.safe_load_all((FOLDER / name).read_text())]


def base() -> list[Document]:
    names = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["resources"]
    assert {*names, "kustomization.yaml", "persia.env"} == {path.name for path in (FOLDER / "base").iterdir()}
    return read(*(f"base/{name}" for name in names), "serving/serving.yaml")


def workloads(documents: list[Document]) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in documents if "template" in each.get("spec", {})}


def pod(workload: Document) -> Document:
    spec: Document = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Document) -> Document:
    (only,) = pod(workload)["containers"]
    assert only["name"] == workload["metadata"]["name"], "the patch of sizing.yaml names the container"
    found: Document = only
    return found


@cache
def manifests() -> dict[str, Document]:
    """Return the workloads of the base and of serving. An image has none, but pytest collects this file there too."""
    return workloads(base())


@pytest.fixture(params=sorted(SERVICES))
def workload(request: pytest.FixtureRequest) -> Document:
    return manifests()[request.param]


def validate(document: Document, version: str) -> None:
    import kubernetes_validate  # imported here, because no image contains it

    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_fits_the_schema(version: str) -> None:
    documents = [*base(), *read("storage.yaml")]
    assert len(documents) == 17
    for document in documents:
        validate(document, version)


@pytest.mark.parametrize(
    ("path", "value"),
    [(("replica",), 2), (("template", "spec", "containers", 0, "resources", "limits", "memory"), [1])],
    ids=["an unknown field", "a wrong type"],
)
def test_a_wrong_document_does_not_fit(path: tuple[Any, ...], value: Any) -> None:
    from kubernetes_validate import ValidationError

    document = deepcopy(manifests()["server"])
    place = document["spec"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValidationError):
        validate(document, VERSIONS[0])


def test_each_service_of_compose_has_a_workload() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]
    composed |= yaml.safe_load((ROOT / "docker-compose.serving.yaml").read_text())["services"]
    assert set(composed) == set(SERVICES.values()) and set(manifests()) == set(SERVICES)
    kinds = {name: each["kind"] for name, each in manifests().items()}
    assert kinds == {
        "nats": "Deployment",
        "server": "StatefulSet",
        "middleware": "Deployment",
        "data-compose": "Job",
        "trainer": "Job",
        "serving": "Deployment",
    }
    for name, service in SERVICES.items():
        assert container(manifests()[name])["image"] == re.sub(r"\$\{\w+:-(\w+)\}", r"\1", composed[service]["image"])
        command = composed[service]["command"].split()[0]
        words = container(manifests()[name])["args"]
        assert words == [command] or words == ["persia-launcher", "data-loader", "--until-finished"]
        targets = {each["mountPath"] for each in container(manifests()[name])["volumeMounts"]}
        listed = [each if isinstance(each, str) else each["target"] for each in composed[service]["volumes"]]
        mounted = {re.sub(r"^.*?:(/[a-z/_-]+)(:ro)?$", r"\1", each.replace(":-", "")) for each in listed}
        without = {"/third_party", "/workspace"} if name == "serving" else {"/third_party"}
        shared_memory = {"/dev/shm"} if "shm_size" in composed[service] else set()  # noqa: S108
        assert targets == mounted - without | shared_memory, name


def test_the_variables_are_those_of_compose() -> None:
    text = (ROOT / "services" / "persia.env").read_text()
    fixed = dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE))
    given = dict(re.findall(r"^([A-Z_]+)=(.*)$", (FOLDER / "base" / "persia.env").read_text(), re.MULTILINE))
    services = {each["metadata"]["name"]: each["spec"] for each in base() if each["kind"] == "Service"}
    assert {name for name in fixed if name not in given} == {"THIRD_PARTY_PATH"}
    assert {name for name in fixed if given.get(name, fixed[name]) != fixed[name]} == {"PERSIA_NATS_URL"}
    host, port = re.fullmatch(r"nats://(.*):(\d+)", given["PERSIA_NATS_URL"]).groups()  # type: ignore[union-attr]
    assert [each["port"] for each in services[host]["ports"]] == [int(port)]


def test_no_pod_has_rights(workload: Document) -> None:
    spec, only = pod(workload), container(workload)
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", "a volume may have millions of files"
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert only["resources"]["requests"].keys() == {"cpu", "memory"} and "memory" in only["resources"]["limits"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)


def test_what_a_pod_names_exists(workload: Document) -> None:
    """The test covers volumes, ConfigMaps, claims and ports. Users create the Secret of the token themselves."""
    spec, only = pod(workload), container(workload)
    generated = yaml.safe_load((FOLDER / "job" / "kustomization.yaml").read_text())["configMapGenerator"]
    sizes = {entry.split("=")[0] for entry in generated[0]["literals"]}
    maps = {each["name"] for each in generated} | {"persia-env"}
    claims = {each["metadata"]["name"] for each in read("storage.yaml")}
    templates = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])}
    volumes = {each["name"] for each in spec["volumes"]} | templates
    assert {each["name"] for each in only["volumeMounts"]} == volumes
    for volume in spec["volumes"]:
        assert volume.get("configMap", {"name": "persia-config"})["name"] in maps
        assert volume.get("secret", {"secretName": "persia-token"})["secretName"] == "persia-token"
        assert volume.get("persistentVolumeClaim", {"claimName": "persia-data"})["claimName"] in claims
    for source in only.get("envFrom", []):
        assert source["configMapRef"]["name"] in maps
    for each in only.get("env", []):
        if "configMapKeyRef" in each.get("valueFrom", {}):
            assert each["valueFrom"]["configMapKeyRef"]["name"] == "persia-size"
            assert each["valueFrom"]["configMapKeyRef"]["key"] in sizes
    ports = {each["name"] for each in only.get("ports", [])}
    probes = [only[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in only]
    assert {probe[kind]["port"] for probe in probes for kind in ("httpGet", "tcpSocket") if kind in probe} <= ports
    assert bool(probes) is (workload["kind"] != "Job")


def test_selectors_match_pods() -> None:
    labels = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in manifests().items()}
    for name, each in manifests().items():
        if each["kind"] != "Job":  # the API server selects the pods of a Job
            assert each["spec"]["selector"]["matchLabels"] == labels[name]
        for spread in pod(each).get("topologySpreadConstraints", []):
            assert spread["labelSelector"]["matchLabels"] == labels[name]

    def selected(selector: Document) -> set[str]:
        return {name for name, given in labels.items() if selector.items() <= given.items()}

    everywhere = {"persia": set(SERVICES), "persia-metrics": set(SERVICES), "persia-serving": {"serving"}}
    budgets = set()
    for document in base():
        name, spec = document["metadata"]["name"], document.get("spec", {})
        if document["kind"] == "NetworkPolicy":
            assert selected(spec["podSelector"]["matchLabels"]) == everywhere.pop(name)
        if document["kind"] == "PodDisruptionBudget":
            assert selected(spec["selector"]["matchLabels"]) == {name}
            assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "a pod that never gets ready stops no drain"
            budgets.add(name)
        if document["kind"] == "Service":
            (target,) = selected(spec["selector"])
            ports = {each["name"] for each in container(manifests()[target])["ports"]}
            assert {each["targetPort"] for each in spec["ports"]} <= ports
    assert not everywhere and budgets == {"server", "middleware", "serving"}


def test_processes_have_the_time_that_they_take_to_stop(workload: Document) -> None:
    """Servers keep connections open, ranks save, and serving responds to the requests that have arrived."""
    flag = (ROOT / "rust_core" / "server" / "src" / "args.rs").read_text()
    grace = re.search(r'"PERSIA_STOP_GRACE", value_name = "SECONDS", default_value_t = (\d+)', flag)
    variables = {each["name"]: each.get("value") for each in container(workload).get("env", [])}
    assert grace is not None
    needed = max(SAVING_GRACE, float(grace[1]), float(variables.get("PERSIA_SERVE_DRAIN") or 0) + 30)
    assert needed < pod(workload)["terminationGracePeriodSeconds"] <= needed + 15


@pytest.mark.parametrize("name", ["trainer", "data-compose"])
def test_exit_codes_that_ask_for_a_restart_are_no_failures(name: str) -> None:
    spec = manifests()[name]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert pod(manifests()[name])["restartPolicy"] == "Never"  # the podFailurePolicy requires Never
    actions: dict[str, set[int]] = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None:
            assert codes["containerName"] == name and codes["operator"] == "In"
            assert codes["values"] == sorted(set(codes["values"]))
            actions.setdefault(rule["action"], set()).update(codes["values"])
        else:
            assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert actions == {
        "FailJob": {ExitCode.CONFIG, ExitCode.CORRUPT, ExitCode.REFUSED},
        "Ignore": {ExitCode.AGAIN},
    }


def test_each_pod_of_several_knows_its_index() -> None:
    for name, field in (
        ("server", "metadata.labels['apps.kubernetes.io/pod-index']"),
        ("trainer", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
        ("data-compose", "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
    ):
        variables = {each["name"]: each for each in container(manifests()[name])["env"]}
        assert variables["POD_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"] == field
    variables = {each["name"]: each for each in container(manifests()["middleware"])["env"]}
    assert (variables["REPLICA_INDEX"]["value"], variables["REPLICA_SIZE"]["value"]) == ("1", "1")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the folder that a user would edit."""
    if shutil.which("kubectl") is None:
        pytest.skip("the program kubectl (1.31 or later) is not on PATH: no manifest was built by Kustomize")
    command = ["kubectl", "version", "--client", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    version = json.loads(done.stdout)["kustomizeVersion"]
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < KUSTOMIZE:
        pytest.skip(
            f"kubectl has Kustomize {version}, which cannot build the manifests: kubectl 1.31 or later is needed"
        )
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    return tmp_path / "kubernetes" / "job"


def build(folder: Path) -> list[Document]:
    """Build a kustomization, and check every document of it."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    documents = [*yaml.safe_load_all(done.stdout)]
    for document in documents:
        assert document["metadata"]["namespace"] == "persia"
        validate(document, VERSIONS[-1])
    return documents


def test_the_job_is_built_from_the_base(copy: Path) -> None:
    documents = build(copy)
    found = workloads(documents)
    assert set(found) == set(SERVICES) - {"serving"}
    sizes = {each["metadata"]["name"]: each for each in yaml.safe_load_all((copy / "sizing.yaml").read_text())}
    for name, size in sizes.items():
        wanted = container(size)["resources"]
        resources = container(found[name])["resources"]
        assert resources["requests"]["memory"] == wanted["requests"]["memory"]
        assert resources["limits"] == wanted["limits"]
        assert "cpu" in resources["requests"]
    configs = {each["metadata"]["name"].rpartition("-")[0]: each for each in documents if each["kind"] == "ConfigMap"}
    assert configs.keys() == {"persia-config", "persia-size", "persia-env"}
    assert configs["persia-config"]["data"].keys() == {"persia.yml", "global_config.yml"}
    assert {"PERSIA_NATS_URL", "LOG_LEVEL"} <= configs["persia-env"]["data"].keys()


def test_a_changed_file_number_or_variable_restarts_the_pods_that_read_it(copy: Path) -> None:
    """The template of a pod names its ConfigMaps. The name of a ConfigMap contains a hash of its content."""
    config, job = copy / "persia.yml", copy / "kustomization.yaml"
    readers = {"server", "middleware", "trainer", "data-compose"}
    for path, before, after, changed in (
        (config, "batch_size: 256", "batch_size: 512", readers),
        (job, "SERVER_REPLICA=2", "SERVER_REPLICA=4", readers - {"middleware"}),
        (job, "LOG_LEVEL=info", "LOG_LEVEL=debug", readers),
    ):
        first = workloads(build(copy))
        text = path.read_text()
        assert text.count(before) == 1, before
        path.write_text(text.replace(before, after))
        documents = build(copy)
        second = workloads(documents)
        templates = [{name: each["spec"]["template"] for name, each in found.items()} for found in (first, second)]
        assert {name for name in first if templates[0][name] != templates[1][name]} == changed
        maps = {each["metadata"]["name"] for each in documents if each["kind"] == "ConfigMap"}
        named = set(re.findall(r"persia-(?:config|size|env)[\w-]*", json.dumps([*second.values()])))
        assert named == maps, "every workload names the maps that are built"


def test_an_upgrade_applies_everything_but_the_jobs_first(copy: Path) -> None:
    """docs/kubernetes.md selects objects by label. `notin` also selects objects without the label."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    found = re.search(r"--selector 'app\.kubernetes\.io/component notin \(([a-z-]+), ([a-z-]+)\)'", text)
    assert found is not None
    later = [
        each
        for each in build(copy)
        if each["metadata"].get("labels", {}).get("app.kubernetes.io/component") in found.groups()
    ]
    assert {(each["kind"], each["metadata"]["name"]) for each in later} == {("Job", "trainer"), ("Job", "data-compose")}


def test_the_command_of_the_memory_is_that_of_the_job() -> None:
    """The command is in a comment, in the documentation, and in the committed patch."""
    sizes = yaml.safe_load((FOLDER / "job" / "kustomization.yaml").read_text())["configMapGenerator"][0]["literals"]
    number = dict(entry.split("=") for entry in sizes)
    servers, trainers, ranks = number["SERVER_REPLICA"], number["TRAINER_REPLICA"], max(int(number["GPU_NUM"]), 1)
    for path in (FOLDER / "job" / "kustomization.yaml", ROOT / "docs" / "kubernetes.md"):
        (line,) = re.findall(r"persia config sizing persia\.yml (--[^\n\\]*)", path.read_text())
        words = shlex.split(line)[:6]
        assert words == ["--servers", servers, "--trainers", trainers, "--ranks", str(ranks)], path
    first = (FOLDER / "job" / "sizing.yaml").read_text().splitlines()[0]
    assert f" on {servers} servers," in first and f" {int(trainers) * ranks} ranks," in first


def test_the_numbers_of_a_job_are_in_one_place(copy: Path) -> None:
    path = copy / "kustomization.yaml"
    text = path.read_text()
    for before, after in {
        "SERVER_REPLICA=2": "SERVER_REPLICA=7",
        "MIDDLEWARE_REPLICA=2": "MIDDLEWARE_REPLICA=3",
        "COMPOSE_REPLICA=1": "COMPOSE_REPLICA=4",
        "TRAINER_REPLICA=2": "TRAINER_REPLICA=5",
        "GPU_NUM=0": "GPU_NUM=8",
        "# components:": "components:",
        "#   - ../serving": "  - ../serving",
        "#   - ../gpu": "  - ../gpu",
        "newName: persia/server, newTag: dev": "newName: registry.example/persia/server, newTag: v2",
    }.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path.write_text(text)
    found = workloads(build(copy))
    assert set(found) == set(SERVICES)
    assert found["server"]["spec"]["replicas"] == 7 and found["middleware"]["spec"]["replicas"] == 3
    for name, number in (("data-compose", 4), ("trainer", 5)):
        assert found[name]["spec"]["completions"] == found[name]["spec"]["parallelism"] == number
    assert container(found["trainer"])["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in container(found["data-compose"])["resources"]["limits"]
    images = {name: container(each)["image"] for name, each in found.items()}
    assert images["server"] == images["middleware"] == "registry.example/persia/server:v2"
    assert images["trainer"] == "persia/runtime:dev"
