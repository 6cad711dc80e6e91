"""The containers of the stack in this folder: their states, and a probe that runs inside each one.

The images of servers and of NATS have no Python, so the probe is a bash script; all images have bash.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from persia.doctor import compose
from persia.embedding.listed import listed
from persia.runtime.errors import UnreachableError

SERVICES = ("persia_nats_service", "emb_server", "middleware", "data_compose", "trainer", "serving")
"""The services of docker-compose.yaml and its overlays."""
PORTS = {"persia_nats_service": 4222, "emb_server": 8888, "middleware": 7777}
"""The ports of services to which others connect, in each container."""
_LABEL = "com.docker.compose."
_CONNECT_S = 5
"""Seconds within which an address must respond, including the start of bash."""
_PROBE_S = 30.0
_SHOWN = 300
"""The number of characters of a line of a health check that are shown."""
_PROBE = r"""
export LC_ALL=C
seconds=$1
shift
probe() { # NAME HOST PORT
    address=$2 by=- said='' code=0 outcome=
    case $2 in
    *[!0-9.]*)
        by=$(awk '$1 == "nameserver" { print "DNS " $2; exit }' /etc/resolv.conf)
        by=${by:-DNS}
        awk -v host="$2" '{ sub(/#.*/, ""); for (at = 2; at <= NF; at++) if ($at == host) found = 1 }
            END { exit !found }' /etc/hosts && by=/etc/hosts
        address=$(timeout "$seconds" getent ahostsv4 "$2" | awk '{ print $1; exit }')
        ;;
    esac
    if [ -z "$address" ]; then
        printf 'peer|%s|%s|%s|unresolved|-|%s|0\n' "$1" "$2" "$3" "$by"
        return
    fi
    said=$(timeout "$seconds" bash -c 'from=$EPOCHREALTIME
        exec 3<>"/dev/tcp/$0/$1" && to=$EPOCHREALTIME && echo $((${to//[.,]/} - ${from//[.,]/}))' \
        "$address" "$3" 2>&1) || code=$?
    case $code,$said in
    0,*) outcome=reached ;;
    124,*) outcome=filtered ;;
    *'onnection refused'*) outcome=refused ;;
    *) outcome=unreachable ;;
    esac
    [ "$outcome" = reached ] || said=0
    printf 'peer|%s|%s|%s|%s|%s|%s|%s\n' "$1" "$2" "$3" "$outcome" "$address" "$by" "$said"
}
for peer in "$@"; do
    IFS='|' read -r name host port <<<"$peer"
    probe "$name" "$host" "$port" &
done
for file in /proc/[0-9]*/environ; do
    found=$(tr '\0' '\n' <"$file" 2>/dev/null |
        grep -E '^(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|REPLICA_INDEX|REPLICA_SIZE)=' | tr '\n' ' ')
    [ -z "$found" ] || printf 'env|%s\n' "$found"
done
wait
"""


@dataclass(frozen=True)
class Container:
    """A container of the stack.

    Attributes:
        id: The id of the container.
        full_name: Its name, which Docker's DNS resolves.
        service: The service to which it belongs.
        number: Its index in the service, from 1.
        status: ``running``, ``exited``, or another status of Docker.
        exit_code: Its exit code, if it has ended.
        out_of_memory: Whether the kernel has killed it because memory ran out.
        health: ``healthy``, ``unhealthy``, ``starting``; empty without a health check.
        addresses: Its IP addresses.
        restarts: The number of times that the engine has restarted it.
        last_check: The exit code and the first lines of the last health check; empty if the container is healthy, or
            has had none.
    """

    id: str
    full_name: str
    service: str
    number: int
    status: str
    exit_code: int
    out_of_memory: bool
    health: str
    addresses: tuple[str, ...]
    restarts: int
    last_check: str = ""

    @property
    def name(self) -> str:
        """The service and index of the container, as in the log of compose."""
        return f"{self.service}-{self.number}"

    @property
    def state(self) -> str:
        """The state of the container in words."""
        if self.status == "running":
            return self.health or "running"
        memory = ", out of memory" if self.out_of_memory else ""
        return f"{self.status} with exit code {self.exit_code}{memory}" if self.status == "exited" else self.status


@dataclass(frozen=True)
class Peer:
    """An address to which containers connect: a name, a host and a port."""

    name: str
    host: str
    port: int


@dataclass(frozen=True)
class Reached:
    """The result of a connection from a container.

    Attributes:
        peer: The address that was tried.
        outcome: The outcome, as in :class:`persia.doctor.network.Reached`.
        address: The IP address of the name; ``-`` if the name did not resolve.
        by: The source that resolved the name; ``-`` if the host is an IP address.
        seconds: The duration of connecting: a round trip.
    """

    peer: Peer
    outcome: str
    address: str
    by: str
    seconds: float


@dataclass
class Inside:
    """The result of a probe inside a container.

    Attributes:
        container: The container.
        reached: The results of its connections.
        variables: The variables about rank and replica, for each process that has any.
        problem: Why the probe did not run; empty if it ran.
    """

    container: Container
    reached: list[Reached] = field(default_factory=list)
    variables: list[dict[str, str]] = field(default_factory=list)
    problem: str = ""


def containers() -> list[Container]:
    """Return the containers of the stack in this folder, including ended ones, sorted by name.

    Raises:
        UnreachableError: No stack exists, or the Docker engine does not respond.
    """
    listed = compose.ask("compose", "ps", "--all", "--quiet")
    if listed.returncode != 0:
        raise UnreachableError(f"docker compose ps: {compose.last_line(listed)}", hint=compose.FOLDER_OR_ENGINE)
    ids = listed.stdout.split()
    if not ids:
        raise UnreachableError(
            "the stack in this folder has no containers", hint="start it: docker compose up --detach"
        )
    inspected = compose.ask("inspect", *ids)
    found = [_container(each) for each in json.loads(inspected.stdout or "[]")]
    return sorted((each for each in found if each.service in SERVICES), key=lambda each: (each.service, each.number))


def _container(inspected: Mapping[str, Any]) -> Container:
    labels, state = inspected["Config"].get("Labels") or {}, inspected["State"]
    networks = (inspected.get("NetworkSettings") or {}).get("Networks") or {}
    return Container(
        id=inspected["Id"],
        full_name=inspected["Name"].lstrip("/"),
        service=labels.get(f"{_LABEL}service", ""),
        number=int(labels.get(f"{_LABEL}container-number") or 0),
        status=state["Status"],
        exit_code=int(state.get("ExitCode") or 0),
        out_of_memory=bool(state.get("OOMKilled")),
        health=(state.get("Health") or {}).get("Status", ""),
        addresses=tuple(each["IPAddress"] for each in networks.values() if each.get("IPAddress")),
        restarts=int(inspected.get("RestartCount") or 0),
        last_check=_last_check(state.get("Health") or {}),
    )


def _last_check(health: Mapping[str, Any]) -> str:
    if health.get("Status") == "healthy" or not (log := health.get("Log")):
        return ""
    said = str(log[-1].get("Output") or "").split("\n")
    lines = [textwrap.shorten(line, _SHOWN, placeholder=" …") for line in said if line.strip()]
    return f"exit code {log[-1].get('ExitCode')}: {listed(lines, separator='; ') if lines else 'no output'}"


def peers(there: Sequence[Container]) -> list[Peer]:
    """Return the addresses to which containers connect: NATS, each server and middleware, and each announced rank."""
    found = [
        Peer(each.name, each.full_name, PORTS[each.service])
        for each in there
        if each.status == "running" and each.service in PORTS
    ]
    return found + _announced(there)


def _announced(there: Sequence[Container]) -> list[Peer]:
    """Return the addresses of ranks, queried in a container that has Python; none if there is no such container."""
    asked = next((each for each in there if each.service in ("trainer", "data_compose") and _runs(each)), None)
    if asked is None:
        return []
    words = ("exec", asked.id, "entrypoint.sh", "persia", "status", "--json")  # with the environment of the container
    try:
        done = compose.ask(*words, seconds=_PROBE_S)
        processes = json.loads(done.stdout)["processes"]
        ranks = [(each["index"], str(each["address"])) for each in processes if each["service"] == "persia-trainer"]
    except (UnreachableError, ValueError, KeyError, TypeError):  # the job does not respond, or has another version
        return []
    found = []
    for index, address in ranks:
        host, _, port = address.rpartition(":")
        if port.isdecimal():
            found.append(Peer(f"rank-{index}", host.strip("[]"), int(port)))
    return found


def _runs(container: Container) -> bool:
    return container.status == "running"


def inside(there: Sequence[Container], targets: Sequence[Peer]) -> list[Inside]:
    """Run the probe inside all running containers at the same time.

    Args:
        there: The containers of the stack.
        targets: The addresses to connect to. A container does not connect to itself.
    """
    running = [each for each in there if _runs(each)]
    with ThreadPoolExecutor(max(1, len(running))) as pool:
        return [*pool.map(lambda each: _inside(each, targets), running)]


def _inside(container: Container, targets: Sequence[Peer]) -> Inside:
    others = {each.name: each for each in targets if each.host != container.full_name}
    words = [f"{each.name}|{each.host}|{each.port}" for each in others.values()]
    shell = ["exec", "--interactive", container.id, "bash", "-s", "--", str(_CONNECT_S)]
    try:
        done = compose.ask(*shell, *words, given=_PROBE, seconds=_PROBE_S)
    except UnreachableError as error:
        return Inside(container, problem=str(error))
    found = Inside(container)
    for line in done.stdout.splitlines():
        kind, _, rest = line.partition("|")
        if kind == "peer":
            name, _, _, outcome, address, by, micros = rest.split("|")
            found.reached.append(Reached(others[name], outcome, address, by, int(micros or 0) / 1e6))
        elif kind == "env":
            pairs = (each.partition("=") for each in rest.split())
            found.variables.append({name: value for name, _, value in pairs if "{{" not in value})
    if not found.reached and words:
        found.problem = f"the probe failed: {compose.last_line(done)}"
    found.reached.sort(key=lambda each: [*others].index(each.peer.name))
    return found
