"""The stack on a swarm of three machines: one is drained, one is lost, and the result is that of one machine."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_server import BUCKET, Server
from waiting import wait_until

from compose import nodes
from compose.conftest import Stacks
from compose.nodes import GATEWAY, Swarm
from compose.test_stack import EXAMPLE, finished

pytestmark = [pytest.mark.usefixtures("images"), pytest.mark.nightly, pytest.mark.slow]

RUN = {"REPRODUCIBLE": "1", "MIDDLEWARE_REPLICA": "1"}
SAVE_EVERY = 100
"""Steps between checkpoints, in train.py."""
NAME = "persia"
FILES = ("--compose-file=docker-compose.yaml", "--compose-file=docker-compose.swarm.yaml")
MINUTES = 600.0
URL = f"s3://{BUCKET}/census"


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    why = nodes.unusable()
    if why is not None:
        pytest.skip(why)
    found = Swarm()
    try:
        found.start()
        yield found
    finally:
        found.remove()


class Job:
    """The demo on the swarm, and its shared folder. With a ``store``, the checkpoints are in this object store."""

    def __init__(self, swarm: Swarm, folder: Path, store: Server | None) -> None:
        self.swarm, self.shared, self._store = swarm, folder / "shared", store
        shutil.copytree(EXAMPLE, folder / "workspace")
        for name in ("checkpoints", "runs"):
            (self.shared / name).mkdir(parents=True)
        for path in (folder / "workspace", *folder.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        folder.chmod(0o755)
        self._variables = {
            **RUN,
            "CUR_DIR": str(folder / "workspace"),
            "SHARED_DIR": str(self.shared),
            "PERSIA_START_TIMEOUT": "300",
            "PERSIA_RPC_TIMEOUT": "20",
        }
        if store is not None:
            keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
            port = store.address.rsplit(":", 1)[1]
            self._variables |= keys | {"PERSIA_CKPT_DIR": URL, "AWS_ENDPOINT_URL": f"http://{GATEWAY}:{port}"}

    def deploy(self) -> None:
        first = self.swarm.machines[0]
        secret = "s" * 64
        (self.shared / "secret").write_text(secret)
        first("secret", "create", "persia_token", str(self.shared / "secret"))
        first("stack", "deploy", "--resolve-image", "never", *FILES, NAME, env=self._variables)

    def saved(self) -> int:
        """Return the step of the newest automatic checkpoint, or 0."""
        if self._store is None:
            folder = self.shared / "checkpoints"
            names = [path.relative_to(folder).as_posix() for path in folder.glob("**/MANIFEST.json")]
        else:
            names = self._store.keys()
        return max(
            (int(step) for name in names for step in re.findall(r"/step-(\d+)/MANIFEST\.json$", name)), default=0
        )

    def trained(self) -> int:
        """Return the last step of the newest attempt, which rank 0 records when it ends."""
        path = max((self.shared / "runs").glob("*-seed0/summary.json"))
        return int(json.loads(path.read_text())["steps"])

    def summary(self) -> dict[str, Any]:
        path = self.shared / "runs" / "summary.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def wait(self, what: str, condition: Any, seconds: float = MINUTES) -> None:
        def evidence() -> str:
            services = [f"{NAME}_{name}" for name in ("trainer", "data_compose", "emb_server", "middleware")]
            first = self.swarm.machines[0]
            listed = first("stack", "ps", "--no-trunc", NAME, check=False).stdout
            return f"{listed}\nnewest checkpoint: {self.saved()}\n{self.swarm.logs(*services)}"

        wait_until(what, condition, seconds, evidence=evidence, interval=0.5)

    def scale_trainers(self, count: int) -> None:
        self.swarm.machines[0]("service", "scale", "--detach", f"{NAME}_trainer={count}")


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server | None]:
    if request.param == "a shared folder":
        yield None
        return
    found = Server(tmp_path / "moto.log", host="0.0.0.0")  # noqa: S104 (the machines reach it through their gateway)
    try:
        found.empty()
        yield found
    finally:
        found.close()


@pytest.mark.timeout(3000, func_only=True)
@pytest.mark.parametrize("store", ["a shared folder", "an object store"], indirect=True)
def test_a_drained_machine_costs_no_step_and_a_lost_one_changes_no_result(
    swarm: Swarm, stacks: Stacks, store: Server | None, tmp_path: Path
) -> None:
    first = swarm.machines[0]
    job = Job(swarm, tmp_path / "job", store)
    job.deploy()
    job.wait("a checkpoint", lambda: job.saved() >= SAVE_EVERY)
    services = [f"{NAME}_{name}" for name in ("emb_server", "trainer", "data_compose")]
    used = {task["node"] for service in services for task in swarm.tasks(service)}
    assert used == {swarm.node(machine) for machine in swarm.machines}, "the job is on three machines"

    # Drain the machine as docs/three-machines.md does.
    job.scale_trainers(0)
    job.wait("the trainers to save", lambda: not swarm.tasks(f"{NAME}_trainer") and trainers_ended(swarm))
    step = job.saved()
    assert job.trained() == step, "no step is lost"
    drained = swarm.node(swarm.machines[2])
    first("node", "update", "--availability", "drain", drained)
    job.wait("the machine to be empty", lambda: swarm.running_on(drained) == 0)
    first("node", "update", "--availability", "active", drained)
    job.scale_trainers(2)
    said = f"training resumes after step {step},"
    job.wait("the run to resume", lambda: said in swarm.logs(f"{NAME}_trainer"))

    job.wait("another checkpoint", lambda: job.saved() > step)
    before = job.saved()
    hosts = {task["node"] for task in swarm.tasks(f"{NAME}_emb_server")}
    victim = next(machine for machine in swarm.machines[1:] if swarm.node(machine) in hosts)
    lost = swarm.node(victim)
    victim.lose()
    state = ("node", "inspect", "--format", "{{.Status.State}}", lost)
    job.wait("the machine to be down", lambda: first(*state).stdout.strip() == "down")
    assert job.summary().get("status") != "finished", "the run was not over when the machine was lost"
    job.wait("the run to finish", lambda: job.summary().get("status") == "finished", 900)
    resumed = re.findall(r"training resumes after step (\d+),", swarm.logs(f"{NAME}_trainer"))
    assert max(map(int, resumed)) >= before
    if store is not None:
        assert not list((job.shared / "checkpoints").iterdir()), "no checkpoint is in the shared folder"

    alone = stacks(EXAMPLE, **RUN)
    done = alone.train()
    assert done.returncode == 0, done.stdout + done.stderr
    expected = finished(alone)
    found = job.summary()
    for key in ("result", "world_size"):
        assert found[key] == expected[key], key


def trainers_ended(swarm: Swarm) -> bool:
    """Whether no container of a trainer runs on any machine."""
    label = f"label=com.docker.swarm.service.name={NAME}_trainer"
    return not any(machine("ps", "--quiet", "--filter", label).stdout for machine in swarm.machines)
