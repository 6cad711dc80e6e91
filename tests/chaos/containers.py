"""A ledger run on the compose stack: the container engine restarts killed processes.

This module needs root on the engine's host. Processes are killed from outside their containers, because an engine does
not restart a container that it was asked to kill.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compose.conftest import Project, docker
from supervisor import CHAOS, RANKS, STACK, STEP, Run
from typing_extensions import Self

SERVICES = {
    "nats": "persia_nats_service",
    "server": "emb_server",
    "middleware": "middleware",
    "data": "data_compose",
    "trainer": "trainer",
}
KILLED = 128 + signal.SIGKILL
AGAIN = {75, KILLED}
"""The exit codes after which trainers and data-compose are restarted."""

_LITTLE = "64m"
"""The memory of a container that is to run out of memory."""


@dataclass
class Log:
    """The output of one container over all its restarts, as kept by the engine."""

    path: Path
    read: int = 0

    def new_lines(self) -> list[str]:
        """Return the lines since the last call."""
        with self.path.open("rb") as file:
            file.seek(self.read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.read += len(whole)
        return [json.loads(line)["log"] for line in whole.splitlines()]


def missing() -> str | None:
    """Return the reason why no containers can be killed here, or None."""
    if os.geteuid() != 0:
        return "killing what runs in containers needs root"
    if shutil.which("docker") is None or docker("version", check=False).returncode != 0:
        return "no Docker engine answers here"
    return None


class Containers(Run):
    """A ledger run of two servers, two middlewares, a data-compose and two trainers of one rank each.

    Args:
        plan: The plan for ``ledger_train.py``.
    """

    tick = 0.5
    patience = 300.0

    def __init__(self, plan: Mapping[str, Any]) -> None:
        super().__init__(plan)
        self._folder = tempfile.TemporaryDirectory(prefix="persia-chaos-")
        self._workspace = Path(self._folder.name, "workspace")
        (self._workspace / "config").mkdir(parents=True)
        for script in ("ledger_train.py", "ledger_data.py"):
            shutil.copy(CHAOS / script, self._workspace)
        slots = STACK["slots"].replace("\n", "\n  ")
        (self._workspace / "config" / "embedding_config.yml").write_text(f"slots_config:\n  {slots}\n")
        (self._workspace / "config" / "global_config.yml").write_text(
            "embedding_parameter_server_config: {capacity: 100000}\n"
        )
        for path in (self._workspace, *self._workspace.rglob("*")):  # containers have another user
            path.chmod(0o777 if path.is_dir() else 0o666)
        train = ["ledger_train.py", "/workspace", json.dumps(self.plan)]
        data = ["ledger_data.py", json.dumps({"count": self.plan["steps"] * RANKS})]
        self._project = Project(
            f"persia-chaos-{os.getpid()}",
            self._workspace,
            PERSIA_RESTART="on-failure",
            PERSIA_NN_WORKER_ENTRY=shlex.join(train),
            PERSIA_DATALOADER_ENTRY=shlex.join(data),
            SERVER_REPLICA="2",
            MIDDLEWARE_REPLICA="2",
            COMPOSE_REPLICA="1",
            TRAINER_REPLICA=str(RANKS),
        )
        self._ids: dict[str, str] = {}
        self._logs: list[Log] = []
        self._ends = Path(self._folder.name, "ends")
        self._events: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Build missing images, and start all containers."""
        form = '{{index .Actor.Attributes "com.docker.compose.service"}} {{.Actor.Attributes.exitCode}}'
        wanted = ["--filter", f"label=com.docker.compose.project={self._project.name}", "--filter", "event=die"]
        with self._ends.open("wb") as out:
            self._events = subprocess.Popen(["docker", "events", *wanted, "--format", form], stdout=out)
        self._project("up", "--detach", timeout=2400)
        for part, service in SERVICES.items():
            for number, container in enumerate(self._project.containers(service)):
                self._ids[f"{part}-{number}"] = container
        self._logs = [Log(Path(self._inspect(f"trainer-{rank}", "{{.LogPath}}"))) for rank in range(RANKS)]
        return self

    def _inspect(self, name: str, form: str) -> str:
        return docker("inspect", "--format", form, self._ids[name]).stdout.strip()

    @property
    def finished(self) -> bool:
        """Whether every trainer has ended with exit code 0, and the result exists."""
        if not self.ledger_file.exists():
            return False
        return all(
            self._inspect(f"trainer-{rank}", "{{.State.Status}} {{.State.ExitCode}}") == "exited 0"
            for rank in range(RANKS)
        )

    def look_after(self) -> None:
        """Record the steps that were done. Fail if a container ended in a way that is not allowed."""
        for log in self._logs:
            self.saw(log.new_lines())
        for line in self._ends.read_text().splitlines():
            service, code = line.split()
            may = AGAIN | {0} if service in {SERVICES["trainer"], SERVICES["data"]} else {KILLED}
            assert int(code) in may, f"a container of {service} ended with {code}\n{self.logs()}"

    @property
    def checkpoints(self) -> Path:
        """The folder in which servers and trainers store checkpoints."""
        volume = f"{self._project.name}_checkpoints"
        return Path(docker("volume", "inspect", "--format", "{{.Mountpoint}}", volume).stdout.strip())

    @property
    def ledger_file(self) -> Path:
        """The file into which rank 0 writes the result of its comparison."""
        return self._workspace / "ledger.json"

    def kill(self, name: str) -> None:
        """Send SIGKILL to all processes of a container as soon as it runs. The engine restarts the container."""
        name = "nats-0" if name == "nats" else name

        def struck() -> bool:
            pid = int(self._inspect(name, "{{.State.Pid}}"))
            with suppress(ProcessLookupError):  # the process has just ended on its own, because another part is missing
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    return True
            return False

        self.wait(f"{name} to run", struck, self.patience)
        self.note_fault()

    def exhaust_memory(self, name: str) -> None:
        """Limit the memory of a container, and fill the memory until the system has killed the largest process."""
        started = self._inspect(name, "{{.State.StartedAt}}")
        self.note_fault()
        docker("update", "--memory", _LITTLE, "--memory-swap", _LITTLE, self._ids[name])
        fill = ["sh", "-c", "head -c 64M /dev/zero >/tmp/filler"]

        def killed() -> bool:
            docker("exec", self._ids[name], *fill, check=False)  # the system may kill this process
            return self._inspect(name, "{{.State.StartedAt}}") != started

        self.wait(f"{name} to be killed", killed, self.patience)

    def kill_rank(self, rank: int) -> None:
        """Send SIGKILL to the processes in the container of a rank."""
        self.kill(f"trainer-{rank}")

    def logs(self) -> str:
        """Return the output of every part, without the steps."""
        return "\n".join(line for line in self._project.logs().splitlines() if not STEP.search(line))

    def close(self) -> None:
        """End and remove all containers, networks and volumes."""
        self._project.remove()
        if self._events is not None:
            self._events.terminate()
            self._events.wait()
        self._folder.cleanup()
