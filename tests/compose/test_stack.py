"""The whole stack in containers: it trains, ends with the right exit code, and reports what went wrong."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from compose.conftest import TEST_OVERLAY, Project, Stacks, docker, make_project
from persia.data import synth

pytestmark = pytest.mark.usefixtures("images")

EXAMPLE = ROOT / "examples" / "dlrm"
SHORT = {"PERSIA_NN_WORKER_ENTRY": "train.py --epochs 1", "PERSIA_DATALOADER_ENTRY": "data_compose.py --epochs 1"}
SMALL = {"SERVER_REPLICA": "1", "MIDDLEWARE_REPLICA": "1", "TRAINER_REPLICA": "1"} | SHORT

EMBEDDED_AUC, TOLERANCE = 0.9568, 0.002
"""The AUC of the embedded mode (examples/dlrm/README.md), and the tolerance of the stack."""


def finished(project: Project) -> dict[str, Any]:
    summary = project.summary()
    assert summary is not None and summary["status"] == "finished"
    return summary


@pytest.mark.slow
@pytest.mark.row("S0-10", "S0-11", "S0-17", "S0-18")
def test_the_example_trains_once(stacks: Stacks) -> None:
    project = stacks(EXAMPLE)
    first = project.train()
    assert first.returncode == 0, first.stdout + first.stderr
    summary = finished(project)
    assert summary["world_size"] == 2
    assert abs(summary["result"]["auc"] - EMBEDDED_AUC) <= TOLERANCE
    assert f"{summary['result']['auc']:.4f}" in first.stdout  # rank 0 prints it

    second = project.train()
    assert second.returncode == 0, second.stdout + second.stderr
    assert "this run is finished" in second.stdout
    assert finished(project) == summary


TABLE = """\
data: {train: /data/*.parquet, batch_size: 200}
features:
  id0: {type: id, dim: 4}
  id1: {type: id, dim: 4}
  dense0: {type: dense, standardise: true}
labels: {label: {}}
"""


def test_a_mounted_table_trains_without_a_script(stacks: Stacks, tmp_path: Path) -> None:
    data, table = tmp_path / "data", tmp_path / "table"
    data.mkdir()
    table.mkdir()
    synth.write(data / "rows.parquet", 5000, synth.Teacher((40, 30), 1))
    (table / "persia.yml").write_text(TABLE)
    chosen = {"PERSIA_CONFIG": "persia.yml", "DATA_DIR": str(data), "SERVER_REPLICA": "2", "MIDDLEWARE_REPLICA": "1"}
    project = stacks(table, **chosen, COMPOSE_REPLICA="2", TRAINER_REPLICA="2")
    project.up("persia_nats_service", "emb_server", "middleware", "data_compose")
    project.healthy("emb_server", "middleware")
    # The environment of `docker exec` lacks what the entry point sets.
    status = ("entrypoint.sh", "persia", "status", "--json")
    asked = docker("exec", project.containers("data_compose")[0], *status, check=False)
    assert asked.stdout, asked.stderr
    services = {each["service"] for each in json.loads(asked.stdout)["processes"]}
    assert {"persia-server", "persia-middleware"} <= services, asked
    done = project.train()
    assert done.returncode == 0, done.stdout + done.stderr
    summary = finished(project)
    assert summary["world_size"] == 2
    assert summary["result"]["test"]["labels"]["label"]["auc"] > 0.6
    assert "rows read and transformed" in project.logs("data_compose")
    for service in ("emb_server", "middleware"):  # 1: the service does not serve yet, or has stopped
        probes = project.inspect(service, "{{range .State.Health.Log}}{{.ExitCode}} {{end}}")
        assert all(codes and {*codes.split()} <= {"0", "1"} for codes in probes), probes


@pytest.mark.row("S0-12", "S0-17", "S0-20")
def test_reverse_order_and_a_restart_of_nats_change_nothing(stacks: Stacks) -> None:
    project = stacks(EXAMPLE, **SHORT)
    for service in ("data_compose", "trainer", "middleware", "emb_server"):
        project.up(service)
    project.says("emb_server", "NATS")  # the server logs that it waits for NATS
    project.up("persia_nats_service")
    project.says("trainer", "generation 1")
    project("restart", "--timeout", "1", "persia_nats_service")
    assert project.ended("trainer") == [0, 0]
    assert finished(project)["world_size"] == 2
    # All other services run until they are stopped.
    for service in ("persia_nats_service", "emb_server", "middleware", "data_compose"):
        assert {status for status, _ in project.states(service)} == {"running"}, service


@pytest.mark.parametrize("end", [pytest.param("a server is killed", marks=pytest.mark.nightly), "down"])
def test_an_aborted_run_never_looks_finished(stacks: Stacks, end: str) -> None:
    project = stacks(
        EXAMPLE, PERSIA_NN_WORKER_ENTRY="train.py --epochs 50", PERSIA_DATALOADER_ENTRY="data_compose.py --epochs 50"
    )
    project("up", "--detach", "--no-build")
    project.says("trainer", "first step done")
    if end == "down":
        project("stop", "--timeout", "60", timeout=180)
        assert all(code == 75 for _, code in project.states("trainer"))
        assert [code for _, code in project.states("persia_nats_service")] == [0]
        project("up", "--detach", "--no-build")
        project.says("trainer", "training resumes after step")
    else:
        docker("kill", project.containers("emb_server")[0])
        assert all(code not in (0, -1) for code in project.ended("trainer", timeout=150))
    assert project.summary() is None
    project.remove(volumes=False, grace=5)
    assert project.summary() is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_the_stack_speaks_tls(stacks: Stacks) -> None:
    """The certificates are made as SECURITY.md describes."""
    files = {"CERT": "cert.pem", "KEY": "key.pem", "CA": "ca.pem"}
    chosen = {f"PERSIA_TLS_{name}": f"/workspace/tls/{file}" for name, file in files.items()}
    project = stacks(EXAMPLE, **SMALL, **chosen)
    commands = (ROOT / "SECURITY.md").read_text().split("```bash\n")[1].split("```")[0]
    subprocess.run(["bash", "-euc", commands], cwd=project.folder, check=True, capture_output=True)
    (project.folder / "tls" / "key.pem").chmod(0o644)
    project.up("persia_nats_service", "emb_server", "middleware")
    project.healthy("emb_server", "middleware")
    assert project.run("persia", "status").returncode == 0
    assert project.run("env", "--unset=PERSIA_TLS_CA", "persia", "status", check=False).returncode == 1, "in clear"
    done = project.train()
    assert done.returncode == 0, done.stdout + done.stderr
    assert finished(project)["world_size"] == 1


def test_what_is_missing_is_named(stacks: Stacks) -> None:
    project = stacks(EXAMPLE, **SMALL)
    missing = "/workspace/config/none.yml"
    project("up", "--detach", "--no-build", env={"PERSIA_EMBEDDING_CONFIG": missing})
    for service in ("emb_server", "trainer"):
        assert project.ended(service) == [2]
        assert missing in project.logs(service)
    assert project.summary() is None


@pytest.fixture(scope="module")
def serving(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A stack of three servers and a middleware without trainers, for tests that only read its state."""
    copy = tmp_path_factory.mktemp("serving") / "workspace"
    project = make_project("serving", EXAMPLE, copy, SERVER_REPLICA="3", MIDDLEWARE_REPLICA="1")
    project.up("persia_nats_service", "emb_server", "middleware")
    yield project
    project.remove()


@pytest.mark.row("S0-10", "S0-11", "S0-13", "S0-14")
def test_counts_come_from_env(serving: Project) -> None:
    project = serving
    assert len(project.containers("emb_server")) == 3
    assert len(project.containers("middleware")) == 1
    for name in ("server", "emb_server"):
        addresses = project("exec", "--no-TTY", "middleware", "getent", "ahosts", name).stdout.split("\n")
        assert len({line.split()[0] for line in addresses if line}) == 3
    project.healthy("persia_nats_service", "emb_server", "middleware")
    found = json.loads(project.run("persia", "status", "--json").stdout)
    assert found["problems"] == []
    services = [process["service"] for process in found["processes"]]
    assert sorted(services) == ["persia-middleware"] + ["persia-server"] * 3
    project.up("--scale", "middleware=2", "middleware")
    project.wait("two middlewares", lambda: {state for state, _ in project.states("middleware")} == {"running"})
    assert len(project.containers("middleware")) == 2


def persia(project: Project, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a verb on this host, in the folder of the stack."""
    environment = {**os.environ, **project.variables, "LOG_LEVEL": "", "COLUMNS": "200"}
    command = [sys.executable, "-m", "persia", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=400)


@pytest.mark.row("S4-01", "S4-06")
def test_each_container_connects_to_its_peers(serving: Project) -> None:
    serving.healthy("persia_nats_service", "emb_server", "middleware")
    done = persia(serving, "doctor", "--stack")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0] for line in done.stdout.splitlines() if re.search(r"\d ms", line)}
    assert {"emb_server-1", "emb_server-2", "emb_server-3", "persia_nats_service-1"} <= rows, done.stdout
    assert "connections are open" in done.stdout and "DNS 127.0.0.11: " in done.stdout


@pytest.mark.row("S4-05")
def test_packets_that_are_dropped_are_named_with_their_direction(serving: Project) -> None:
    serving.healthy("persia_nats_service", "emb_server", "middleware")
    pid = serving.inspect("middleware", "{{.State.Pid}}")[0]
    address = serving.inspect("emb_server", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")[0]
    inside = ["nsenter", "--target", pid, "--net", "iptables"]
    rule = ["OUTPUT", "--destination", address, "--protocol", "tcp", "--dport", "8888", "--jump", "DROP"]
    if shutil.which("nsenter") is None or subprocess.run([*inside, "-L"], capture_output=True, check=False).returncode:
        pytest.skip("packets of a container cannot be dropped here: no root, nsenter or iptables")
    subprocess.run([*inside, "-I", *rule], check=True)
    try:
        done = persia(serving, "doctor", "--stack")
    finally:
        subprocess.run([*inside, "-D", *rule], check=True)
    assert done.returncode == 3, done.stdout
    assert "DNS ok, TCP filtered (timeout): middleware-1 -> emb_server-1:8888" in done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("fail  connection ")]
    assert len(failed) == 1, "in this direction only"


@pytest.mark.row("S4-46", "S4-58", "S4-59")
def test_logs_and_a_dump_of_the_stack(serving: Project, tmp_path: Path) -> None:
    serving.healthy("persia_nats_service", "emb_server", "middleware")
    done = persia(serving, "logs", "--json", "--tail", "1000")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    sources = {each["source"] for each in found}
    assert {"emb_server-1", "emb_server-3", "middleware-1", "persia_nats_service-1"} <= sources
    times = [each["ts"][:23] for each in found if "run_id" not in each]
    assert times == sorted(times) and any(each.get("run_id") for each in found)
    path = tmp_path / "dump.tar.gz"
    done = persia(serving, "dump", "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert path.stat().st_size < 20_000_000
    with tarfile.open(path) as tar:
        files = {each.name.partition("/")[2]: tar.extractfile(each) for each in tar.getmembers() if each.isfile()}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    token = serving("exec", "--no-TTY", "emb_server", "cat", "/run/persia/token").stdout.strip()
    password = hashlib.sha256(f"persia role nats {token}".encode()).hexdigest()
    assert not [name for name, text in texts.items() if token in text or password in text]
    wanted = ["stack/config.json", "stack/doctor.txt", "stack/nats-varz.json", "logs/emb_server-2.log", "SUMMARY.md"]
    wanted += ["inside/status.json", "inside/metrics/persia-server-2.txt", "inside/versions.txt"]
    assert [name for name in wanted if name not in texts] == [], texts["MANIFEST.json"]
    assert json.loads(texts["inside/status.json"])["problems"] == []


@pytest.mark.row("S0-12", "S0-14")
def test_a_replica_beyond_the_count_is_refused(stacks: Stacks) -> None:
    project = stacks(EXAMPLE, SERVER_REPLICA="1")
    project.up("--scale", "emb_server=2", "emb_server")
    project.wait("the second server to end", lambda: project.states("emb_server")[1][0] == "exited")
    assert project.states("emb_server")[1] == ("exited", 2)
    assert "this is replica 2, but there are 1" in project.logs("emb_server")


@pytest.mark.row("S0-15")
def test_an_edit_of_the_python_sources_counts_at_the_next_start(stacks: Stacks) -> None:
    project = stacks(ROOT / "persia_py")
    project.variables |= {"CUR_DIR": str(EXAMPLE), "PERSIA_DIR": str(project.folder)}
    command = ("python", "-c", "import persia.env; print(persia.__file__)")
    assert re.fullmatch(r"/opt/venv/lib/\S+/persia/__init__\.py\n", project.run(*command).stdout)
    project.variables["COMPOSE_FILE"] = "docker-compose.yaml:docker-compose.source.yaml"
    assert project.run(*command).stdout == "/persia/persia/__init__.py\n"
    with (project.folder / "persia" / "env.py").open("a") as file:
        file.write('print("edited")\n')
    assert project.run(*command).stdout == "edited\n/persia/persia/__init__.py\n"
    # An engine in third_party/ still comes first.
    path = project.run("python", "-c", "import sys; print(sys.path[1:3])").stdout
    assert path.splitlines()[-1] == "['/third_party', '/persia']"


@pytest.mark.row("S0-03", "S0-21")
def test_the_packaged_engine_needs_no_gpu(stacks: Stacks) -> None:
    project = stacks(EXAMPLE)
    code = "import persia_core; print(persia_core.FEATURES, persia_core.__file__)"
    result = project.run("sh", "-euc", f'python -c "{code}"; sha256sum /opt/venv/lib/*/site-packages/persia_core/*.so')
    features, summed = result.stdout.splitlines()
    assert re.fullmatch(r"\['cuda'\] /opt/venv/lib/\S+/persia_core/persia_core\.abi3\.so", features)
    digest = re.search(r"running (\S+): packaged sha256=([0-9a-f]{64}) build=\S+", result.stderr)
    assert digest is not None
    assert summed.split() == [digest[2], digest[1]]


def test_containers_have_no_rights(serving: Project) -> None:
    project = serving
    for service in ("persia_nats_service", "emb_server"):
        status = project("exec", "--no-TTY", service, "cat", "/proc/1/status").stdout
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split() == ["1000"] * 4
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        written = project("exec", "--no-TTY", service, "sh", "-c", "touch /etc/x", check=False)
        assert "Read-only file system" in written.stderr
    token = project("exec", "--no-TTY", "emb_server", "cat", "/run/persia/token").stdout
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert token not in project.logs()
    assert hashlib.sha256(f"persia role nats {token}".encode()).hexdigest() not in project.logs()


@pytest.mark.slow
def test_pytest_passes_in_the_trainer(stacks: Stacks) -> None:
    """Compose starts the servers, and the run ends within five minutes, as README.md promises."""
    project = stacks(EXAMPLE)
    result = project("run", "--rm", "--no-TTY", "trainer", "pytest", timeout=300, check=False)
    assert result.returncode == 0, result.stdout[-6000:]
    count = re.search(r"^([1-9]\d+) ran, ", result.stdout, re.MULTILINE)
    assert count is not None and " SKIPPED " not in result.stdout, result.stdout[-6000:]
    for name, number in (("", "1"), ("", count[1]), ("test_live.py::test_a_run_resumes", r"\d+")):
        assert re.search(rf"{name}\S* PASSED +\[ *{number}/{count[1]}\]$", result.stdout, re.MULTILINE), name


def test_pytest_all_names_the_image_that_it_needs(stacks: Stacks) -> None:
    result = stacks(EXAMPLE).run("pytest", "--all", check=False)
    assert result.returncode == 2
    assert "error: pytest --all needs flask, flask_cors, moto, mypy, xdist" in result.stderr
    assert "next: COMPOSE_FILE=docker-compose.yaml:docker-compose.test.yaml docker compose run" in result.stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("image_of_tests")
@pytest.mark.timeout(5400, func_only=True)
def test_every_test_passes_in_the_trainer(stacks: Stacks) -> None:
    project = stacks(EXAMPLE, **TEST_OVERLAY)
    options = ("--all", "--numprocesses", "3", "--dist", "worksteal")
    result = project("run", "--rm", "--no-TTY", "trainer", "pytest", *options, timeout=5000, check=False)
    assert result.returncode == 0, result.stdout[-6000:]
    assert re.search(r"^[1-9]\d{2,} ran, \d+ skipped", result.stdout, re.MULTILINE)


def digests(project: Project) -> dict[str, str]:
    """Return the hash of every file of the run's last checkpoint, except Python's own random state."""
    text = project.read("checkpoints", "cat $(find . -name MANIFEST.json | sort | tail -n 1)")
    files: list[dict[str, Any]] = json.loads(text)["files"]
    return {file["name"]: file["blake3"] for file in files if not re.fullmatch(r"rank-\d+\.state", file["name"])}
