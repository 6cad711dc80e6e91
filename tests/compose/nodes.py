"""Three machines for a swarm: Docker engines on this host, each in its own network namespace, with one store of images.

A copy of the images would take 6 GB and minutes for each engine. Instead, each engine has a copy of the image store's
metadata, which is small, and links to the layers of this host's engine, which are only read.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from waiting import is_running, wait_until

from compose.conftest import Result, docker

TOOLS = ("dockerd", "ip", "iptables", "nsenter", "umount")
STORE = ("imagedb", "distribution", "layerdb", "repositories.json")
"""What an engine has below ``image/DRIVER``."""
GATEWAY = "10.200.0.254"
"""The address of this host in the network of the machines."""


def unusable() -> str | None:
    """Return the reason why this host cannot have several engines, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        return f"several engines need root and {', '.join(missing) or 'no more tools'}"
    driver, root = docker("info", "--format", "{{.Driver}} {{.DockerRootDir}}").stdout.split()
    if not Path(root, "image", driver, "layerdb").is_dir() or not Path(root, driver, "l").is_dir():
        return f"the image store of this engine cannot be shared: {driver} in {root}"
    return None


def shell(*command: str, check: bool = True) -> None:
    """Run a command of the system."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Machine:
    """A machine: an engine and its containers.

    Attributes:
        number: The number of the machine, from 1.
        address: The address of the machine in the network of the machines.
        name: The name of its network namespace.
    """

    def __init__(self, number: int, folder: Path, tag: str) -> None:
        self.number = number
        self.address = f"10.200.0.{number}"
        self.name = f"{tag}n{number}"
        self._veth = f"{tag}v{number}"
        self._bridge = f"{tag}br"
        self._folder = folder / f"m{number}"
        self._engine: subprocess.Popen[bytes] | None = None

    def __call__(self, *arguments: str, check: bool = True, env: Mapping[str, str] | None = None) -> Result:
        """Run ``docker ARGUMENTS`` on this machine."""
        return docker("--host", f"unix://{self._folder}/s", *arguments, check=check, env=env)

    def start(self) -> None:
        """Connect the machine to the others, and start its engine."""
        shell("ip", "netns", "add", self.name)
        shell("ip", "link", "add", self._veth, "type", "veth", "peer", "name", "e0", "netns", self.name)
        shell("ip", "link", "set", self._veth, "master", self._bridge, "up")
        inside = ("ip", "-n", self.name)
        shell(*inside, "addr", "add", f"{self.address}/24", "dev", "e0")
        shell(*inside, "link", "set", "e0", "up")
        shell(*inside, "link", "set", "lo", "up")
        shell(*inside, "route", "add", "default", "via", GATEWAY)
        self._folder.mkdir(parents=True)
        driver = self._share_images()
        # The empty file replaces the configuration of this host's engine, which sets another data folder.
        (self._folder / "empty.json").write_text("{}")
        # `ip netns exec` mounts a new /sys, in which the engine finds no cgroups.
        command = ["nsenter", f"--net=/run/netns/{self.name}", "dockerd", "--config-file", f"{self._folder}/empty.json"]
        command += ["--data-root", f"{self._folder}/root", "--exec-root", f"{self._folder}/x"]
        command += ["--pidfile", f"{self._folder}/pid", "--host", f"unix://{self._folder}/s"]
        command += ["--storage-driver", driver]
        with (self._folder / "log").open("wb") as log:
            self._engine = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_until(
            f"the engine of machine {self.number}",
            lambda: self("version", check=False).returncode == 0,
            60,
            evidence=(self._folder / "log").read_text,
            interval=0.2,
        )

    def _share_images(self) -> str:
        """Give the engine the images of this host's engine. Return the storage driver."""
        driver, root = docker("info", "--format", "{{.Driver}} {{.DockerRootDir}}").stdout.split()
        store = self._folder / "root" / "image" / driver
        store.mkdir(parents=True)
        for name in STORE:
            source = Path(root, "image", driver, name)
            if source.is_dir():  # `mounts` has the layers of that engine's containers
                shutil.copytree(source, store / name, ignore=shutil.ignore_patterns("mounts", "tmp"))
            elif source.exists():
                shutil.copy(source, store / name)
        layers = self._folder / "root" / driver
        layers.mkdir()
        for path in Path(root, driver).iterdir():
            if path.name == "l":
                shutil.copytree(path, layers / "l", symlinks=True)
            elif path.name not in {"metadata", "tempdirs"}:
                (layers / path.name).symlink_to(path)
        return driver

    @property
    def is_up(self) -> bool:
        """Whether the engine of the machine runs."""
        return self._engine is not None and self._engine.poll() is None

    def containers(self) -> list[int]:
        """Return the process ids of the running containers."""
        listed = self("ps", "--quiet").stdout.split()
        found = self("inspect", "--format", "{{.State.Pid}}", *listed).stdout if listed else ""
        return [int(pid) for pid in found.split()]

    def lose(self) -> None:
        """Lose the machine: block all its packets, then kill its engine and its containers."""
        pids = self.containers()
        shell("ip", "link", "set", self._veth, "down")
        self._kill(pids)

    def remove(self) -> None:
        """Kill the remaining processes, and remove the machine."""
        self._kill(self.containers() if self.is_up else [])
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((each for each in mounts if each.startswith(f"{self._folder}/")), reverse=True):
            shell("umount", "--lazy", mount, check=False)
        shell("ip", "netns", "del", self.name, check=False)

    def _kill(self, containers: list[int]) -> None:
        """Kill the engine and all processes that it started, whose command lines have the engine's folder."""
        engines = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if any(f"{self._folder}/" in word for word in process.info["cmdline"] or ())
        ]
        for pid in [*engines, *containers]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._engine is not None:
            self._engine.wait(30)
        wait_until("the machine to end", lambda: not any(map(is_running, [*engines, *containers])), 30)


class Swarm:
    """Three machines, all of them managers of one swarm."""

    def __init__(self) -> None:
        self._tag = f"p{os.getpid() % 100_000}"
        self._folder = Path(tempfile.mkdtemp(prefix="persia-"))
        self.machines = [Machine(number, self._folder, self._tag) for number in (1, 2, 3)]

    def start(self) -> None:
        """Start the machines, and join them."""
        bridge = f"{self._tag}br"
        shell("ip", "link", "add", bridge, "type", "bridge")
        shell("ip", "addr", "add", f"{GATEWAY}/24", "dev", bridge)
        shell("ip", "link", "set", bridge, "up")
        # The engine of this host makes the kernel drop forwarded packets, including frames of a bridge.
        shell("iptables", "-I", "FORWARD", "-i", bridge, "-o", bridge, "-j", "ACCEPT")
        for machine in self.machines:
            machine.start()
        first, *others = self.machines
        first("swarm", "init", "--advertise-addr", first.address)
        token = first("swarm", "join-token", "--quiet", "manager").stdout.strip()
        for machine in others:
            machine("swarm", "join", "--advertise-addr", machine.address, "--token", token, f"{first.address}:2377")

    def remove(self) -> None:
        """Remove everything that was started."""
        bridge = f"{self._tag}br"
        for machine in self.machines:
            machine.remove()
        shell("iptables", "-D", "FORWARD", "-i", bridge, "-o", bridge, "-j", "ACCEPT", check=False)
        shell("ip", "link", "del", bridge, check=False)
        shutil.rmtree(self._folder)

    def node(self, machine: Machine) -> str:
        """Return the id of a machine in the swarm."""
        return machine("info", "--format", "{{.Swarm.NodeID}}").stdout.strip()

    def tasks(self, service: str) -> list[dict[str, Any]]:
        """Return the tasks of a service that should run, with their state and the id of their node."""
        first = self.machines[0]
        wanted = ("--quiet", "--no-trunc", "--filter", "desired-state=running")
        ids = first("service", "ps", *wanted, service).stdout.split()
        if not ids:
            return []
        return [
            {"node": task.get("NodeID", ""), "state": task["Status"]["State"], "slot": task["Slot"]}
            for task in json.loads(first("inspect", *ids).stdout)
        ]

    def running_on(self, node: str) -> int:
        """Return the number of containers that have not ended on a node."""
        listed = self.machines[0]("node", "ps", "--format", "{{.CurrentState}}", node).stdout.splitlines()
        return sum(line.split()[0] in {"Running", "Starting", "Preparing"} for line in listed)

    def logs(self, *services: str) -> str:
        """Return the output of services on the machines that are not lost.

        `docker service logs` would wait for a lost machine.
        """
        found = []
        for machine in (each for each in self.machines if each.is_up):
            for service in services:
                label = f"label=com.docker.swarm.service.name={service}"
                listed = machine("ps", "--all", "--quiet", "--filter", label).stdout.split()
                found += [machine("logs", container, check=False) for container in listed]
        return "".join(each.stdout + each.stderr for each in found)
