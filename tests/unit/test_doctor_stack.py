"""``persia doctor --stack``: containers, ranks and connections, with a docker that runs the probe on this host."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import Verb

from persia.doctor import containers, stack
from persia.doctor.containers import Container, Inside, Peer, Reached

Engine = Callable[..., None]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        yield server


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Make a fake docker with containers. It runs the commands for a container on this host."""

    def make(inspected: Sequence[dict[str, object]], ports: dict[str, int]) -> None:
        folder = tmp_path / "docker"
        folder.mkdir()
        (folder / "inspect.json").write_text(json.dumps(inspected))
        program = folder / "docker"
        program.write_text(
            "#!/bin/sh\n"
            'case "$*" in\n'
            f"'compose ps --all --quiet') echo {' '.join(str(each['Id']) for each in inspected)} ;;\n"
            f"inspect*) cat {folder}/inspect.json ;;\n"
            "'exec --interactive '*) shift 3; exec \"$@\" ;;\n"
            "'exec --env '*) echo '{\"processes\": []}' ;;\n"
            '*) echo "unexpected: $*" >&2; exit 1 ;;\nesac\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        for service, port in ports.items():
            monkeypatch.setitem(containers.PORTS, service, port)

    return make


def inspect(service: str, name: str, number: int = 1, **state: object) -> dict[str, object]:
    labels = {"com.docker.compose.service": service, "com.docker.compose.container-number": str(number)}
    return {
        "Id": f"{service}{number}",
        "Name": f"/{name}",
        "Config": {"Labels": labels},
        "State": {"Status": "running", "ExitCode": 0, **state},
        "NetworkSettings": {"Networks": {"n": {"IPAddress": "10.0.0.1"}}},
    }


@pytest.mark.row("S4-01", "S4-05", "S4-06")
def test_unresolved_refused_and_filtered_are_told_apart_in_each_direction(
    engine: Engine, listener: socket.socket, verb: Verb
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_port, socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()[1]
        closed.close()
        port = listener.getsockname()[1]
        ports = {"persia_nats_service": open_port.getsockname()[1], "emb_server": port, "middleware": refused}
        engine(
            [
                inspect("persia_nats_service", "localhost"),
                inspect("emb_server", "localhost"),
                inspect("emb_server", "no-such-host.invalid", 2),
                inspect("middleware", "localhost"),
                inspect("trainer", "trainer-of-test"),
            ],
            ports,
        )
        clients = [socket.socket() for _ in range(4)]
        try:
            for client in clients:  # with a full queue the kernel drops the packets, as a firewall does
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
            out, _ = verb("doctor", "--stack", code=3)
        finally:
            for client in clients:
                client.close()
    row = next(line for line in out.splitlines() if line.split()[:1] == ["trainer-1"] and "filtered" in line)
    assert " ms" in row and "unresolved" in row and "refused" in row, out
    assert f"DNS ok, TCP filtered (timeout): trainer-1 -> emb_server-1:{port}" in out
    assert f"DNS ok, TCP refused: trainer-1 -> middleware-1:{refused}" in out
    assert f"DNS failed: trainer-1 -> emb_server-2:{port}" in out
    assert "fail  connections" in out and "ok    names          " in out
    names = next(line for line in out.splitlines() if line.startswith("ok    names"))
    _, _, from_file = names.partition("/etc/hosts: ")
    assert from_file.split(";")[0] == "localhost" and "no-such-host.invalid" in names


@pytest.mark.row("S4-01")
def test_open_connections_have_their_round_trips(engine: Engine) -> None:
    """The check of ranks is omitted, because the probe would read the ranks of other tests on this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"persia_nats_service": server.getsockname()[1]}
        engine([inspect("persia_nats_service", "localhost"), inspect("trainer", "t")], ports)
        there = containers.containers()
        found, _ = stack.connections(containers.inside(there, containers.peers(there)))
    assert found.status == "ok" and "all 1 connections are open" in found.found, found
    row = found.found.splitlines()[-1].split()
    assert row[0] == "trainer-1" and row[2] == "ms" and 0 <= float(row[1]) < 5000


def test_a_stack_that_is_not_there(verb: Verb, engine: Engine) -> None:
    engine([], {})
    out, _ = verb("doctor", "--stack", code=3)
    assert "the stack in this folder has no containers" in out and "next: start it: docker compose up --detach" in out


def test_a_status_of_another_version_names_no_ranks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine([inspect("trainer", "t")], {})
    program = Path(os.environ["PATH"].split(":")[0], "docker")
    for processes in ('[{"name": "x"}]', '[{"service": "persia-trainer", "index": 0}]', "7"):
        text = program.read_text()
        program.write_text(text.replace('{"processes": []}', f'{{"processes": {processes}}}'))
        assert containers.peers(containers.containers()) == []
        program.write_text(text)


def test_containers_that_have_ended_are_named(engine: Engine, verb: Verb) -> None:
    engine([inspect("trainer", "t", Status="exited", ExitCode=137, OOMKilled=True)], {})
    out, _ = verb("doctor", "--stack", code=3)
    assert "trainer-1  10.0.0.1         exited with exit code 137, out of memory" in out
    assert "persia logs --service trainer-1 --tail 50" in out
    assert "skip  ranks          no rank runs" in out


def test_the_last_health_check_of_an_unhealthy_container_is_shown(engine: Engine, verb: Verb) -> None:
    checks = [{"ExitCode": 0, "Output": "older"}, {"ExitCode": 7, "Output": "\n".join(["not serving", "x " * 500] * 9)}]
    bad = {"Status": "unhealthy", "Log": checks}
    good = {"Status": "healthy", "Log": checks[:1]}
    engine([inspect("middleware", "m", Health=bad), inspect("emb_server", "e", Health=good)], {})
    found = stack.states(containers.containers())
    line = next(each for each in found.found.splitlines() if "last health check" in each)
    assert line.startswith("middleware-1: unhealthy, last health check: exit code 7: not serving; x x"), line
    assert line.endswith("and 8 more") and len(line) < 2000 and "older" not in found.found


# --- Ranks


def container(service: str, number: int) -> Container:
    return Container("id", f"p-{service}-{number}", service, number, "running", 0, False, "", ("10.0.0.9",), 0)


def of_trainers(*variables: list[dict[str, str]]) -> list[Inside]:
    return [Inside(container("trainer", number), [], [*own]) for number, own in enumerate(variables, 1)]


def rank(number: int, size: int = 2, **more: str) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(size), **more}


@pytest.mark.row("S4-02")
def test_ranks_of_each_container_are_listed() -> None:
    (check,) = stack.ranks(of_trainers([rank(0), rank(0)], [rank(1)]), [])
    assert check.status == "ok"
    assert check.found.splitlines() == [
        "trainer-1  RANK=0 WORLD_SIZE=2 MASTER=by NATS",
        "trainer-2  RANK=1 WORLD_SIZE=2 MASTER=by NATS",
    ]


@pytest.mark.row("S4-02")
@pytest.mark.parametrize(
    ("variables", "line", "why"),
    [
        (([rank(0)], [rank(0)]), "trainer-2  RANK=0 WORLD_SIZE=2 MASTER=by NATS  DUPLICATE", "in trainer-1, trainer-2"),
        (([rank(0, 3)], [rank(1, 3)]), "MISSING  RANK=2", "no container has rank 2"),
        (([rank(0, 2)], [rank(1, 4)]), "MISSING  RANK=2", "WORLD_SIZE differs: 2, 4"),
        (
            ([rank(0, MASTER_ADDR="a", MASTER_PORT="1")], [rank(1, MASTER_ADDR="b", MASTER_PORT="1")]),
            "trainer-1  RANK=0 WORLD_SIZE=2 MASTER=a:1",
            "MASTER_ADDR and MASTER_PORT differ",
        ),
    ],
)
def test_missing_and_double_ranks_are_marked(variables: tuple[list[dict[str, str]], ...], line: str, why: str) -> None:
    (check,) = stack.ranks(of_trainers(*variables), [])
    assert check.status == "fail" and line in check.found.splitlines() and why in check.why
    assert "TRAINER_REPLICA" in check.next


@pytest.mark.row("S4-02")
def test_the_variables_of_processes_are_read(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """The probe reads the environments of the processes, because the launcher numbers the ranks."""
    place = {"RANK": "41", "WORLD_SIZE": "42", "REPLICA_INDEX": "{{.Task.Slot}}"}
    words, environment = [sys.executable, "-c", "input()"], {**os.environ, **place}
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE) as process:
        engine([inspect("trainer", "t")], {})
        (found,) = containers.inside(containers.containers(), [])
        process.communicate(b"\n")
    assert {"RANK": "41", "WORLD_SIZE": "42"} in found.variables, "and a template is no number"


def test_replicas_with_the_same_number_are_named() -> None:
    same = {"REPLICA_INDEX": "0", "REPLICA_SIZE": "2"}
    found = [Inside(container("emb_server", number), [], [same]) for number in (1, 2)]
    (check,) = stack.replicas(found)
    assert check.found == "emb_server: REPLICA_INDEX twice: 0 in emb_server-1, emb_server-2; missing: 1"


def test_hosts_of_the_compose_file_are_named() -> None:
    one = Reached(Peer("emb_server-1", "db", 1), "reached", "10.0.0.1", "/etc/hosts", 0.001)
    two = Reached(Peer("middleware-1", "m", 1), "reached", "10.0.0.2", "DNS 127.0.0.11", 0.001)
    _, names = stack.connections([Inside(container("trainer", 1), [one, two])])
    assert names.found == "/etc/hosts: db; DNS 127.0.0.11: m" and "extra_hosts" in names.why
