"""The whole stack in containers: it trains, ends with the right exit code, and reports what went wrong."""

import hashlib
import json
import re
import shutil
import subprocess
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
    done = project.train()
    assert done.returncode == 0, done.stdout + done.stderr
    summary = finished(project)
    assert summary["world_size"] == 2
    assert summary["result"]["test"]["labels"]["label"]["auc"] > 0.6
    assert "rows are sent" in project.logs("data_compose")


@pytest.mark.row("S0-12", "S0-17", "S0-20")
def test_reverse_order_and_a_restart_of_nats_change_nothing(stacks: Stacks) -> None:
    project = stacks(EXAMPLE, **SHORT)
    for service in ("data_compose", "trainer", "middleware", "emb_server"):
        project.up(service)
    project.says("emb_server", "NATS")  # it waits, and reports for what
    project.up("persia_nats_service")
    project.says("trainer", "generation 1")
    project("restart", "--timeout", "1", "persia_nats_service")
    assert project.ended("trainer") == [0, 0]
    assert finished(project)["world_size"] == 2
    # All other services run until they are stopped.
    for service in ("persia_nats_service", "emb_server", "middleware", "data_compose"):
        assert {status for status, _ in project.states(service)} == {"running"}, service


@pytest.mark.parametrize("end", ["a server is killed", "down"])
def test_an_aborted_run_never_looks_finished(stacks: Stacks, end: str) -> None:
    project = stacks(
        EXAMPLE, PERSIA_NN_WORKER_ENTRY="train.py --epochs 50", PERSIA_DATALOADER_ENTRY="data_compose.py --epochs 50"
    )
    project("up", "--detach", "--no-build")
    project.says("trainer", "first step done")
    if end == "down":
        project("stop", "--timeout", "60", timeout=180)
        assert all(code == 75 for _, code in project.states("trainer"))
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
    """With certificates as described in SECURITY.md."""
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


@pytest.mark.row("S0-11", "S0-13", "S0-14")
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
    """As in README.md: compose starts the servers, and the run ends within the promised five minutes."""
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
