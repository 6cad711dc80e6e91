"""``persia doctor --only network``: ports and their users, and addresses that cannot be reached, with the reason."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from persia.doctor import job_status, network, ports, services
from persia.doctor.job_status import Cause, Problem, Process, Status
from persia.runtime.exit_codes import ExitCode


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        yield server


@contextmanager
def listening(*argv: str, folder: Path, env: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Run ``python ARGV``, which prints the port that it listens on, and yield its pid and the port."""
    process = subprocess.Popen(
        [sys.executable, *argv], cwd=folder, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


PROGRAM = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.mark.row("S3-11")
def test_a_port_in_use_names_the_program(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    found = ports.free("port", port, "PERSIA_LISTEN")
    assert found.status == "fail"
    assert f"port {port} is in use by pid {os.getpid()} ({psutil.Process().name()})" in found.found
    assert f"ps -fp {os.getpid()}" in found.next and "set PERSIA_LISTEN to another port" in found.next
    listener.close()
    assert ports.free("port", port, "PERSIA_LISTEN").status == "ok"


@pytest.mark.row("S3-11")
def test_the_service_of_the_variable_is_told_from_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the service itself uses its port, as in its own container, the port is no problem."""
    program = tmp_path / "persia-embedding-sharded-server"
    program.write_text(PROGRAM)
    stranger = tmp_path / "other.py"
    stranger.write_text(PROGRAM)
    monkeypatch.setenv("PERSIA_LISTEN", "127.0.0.1:0")
    for path, value, status in ((program, "same", "ok"), (program, "other", "fail"), (stranger, "same", "fail")):
        with listening(str(path), folder=tmp_path, env={"PERSIA_LISTEN": value}) as (pid, port):
            monkeypatch.setenv("PERSIA_LISTEN", "same")
            found = ports.free("PERSIA_LISTEN", port, "PERSIA_LISTEN", "127.0.0.1")
        assert found.status == status and f"port {port} is in use by pid {pid} (" in found.found, found
        assert "kill" not in found.why + found.next
        assert ("a program of Persia" in found.why) == (value == "other"), found


def test_rank_0_that_runs_already_is_no_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "chosen"}
    for rank, status in (("0", "ok"), ("1", "fail")):
        with listening("-c", PROGRAM, folder=tmp_path, env=place | {"RANK": rank}) as (pid, port):
            for name, value in place.items():
                monkeypatch.setenv(name, value)
            found = ports.free("rendezvous", port, "MASTER_PORT")
        assert found.status == status and f"in use by pid {pid}" in found.found, found


@pytest.mark.parametrize(
    ("value", "status", "text"),
    [
        ("127.0.0.1:0", "ok", "is chosen when the process starts"),
        ("localhost", "fail", "expected HOST:PORT"),
        ("0.0.0.0:99999", "fail", "expected HOST:PORT"),
        ("203.0.113.7:8888", "fail", "203.0.113.7 is not an address of this host"),
        ("no-such-host.invalid:8888", "fail", "the name no-such-host.invalid has no address on this host"),
    ],
)
def test_an_address_to_listen_at(value: str, status: str, text: str) -> None:
    found = ports.listening("PERSIA_LISTEN", value, "the gRPC port")
    assert found.status == status and text in f"{found.found} {found.why}", found


def test_a_port_that_is_free_on_another_address(listener: socket.socket) -> None:
    """A service that listens at one address only does not conflict with a program at another address."""
    port = listener.getsockname()[1]
    assert ports.listening("PERSIA_LISTEN", f"127.0.0.2:{port}", "the gRPC port").status == "ok"
    assert ports.listening("PERSIA_LISTEN", f"localhost:{port}", "the gRPC port").status == "fail"


def test_refused_filtered_and_unresolved_are_told_apart(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert network.reach("127.0.0.1", port).outcome == "reached"
    clients = [socket.socket() for _ in range(4)]
    try:
        for client in clients:  # with a full queue the kernel drops the packets, as a firewall does
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert network.reach("127.0.0.1", port, 0.3).outcome == "filtered"
    finally:
        for client in clients:
            client.close()
    listener.close()
    assert network.reach("127.0.0.1", port).outcome == "refused"
    assert network.reach("no-such-host.invalid", port).outcome == "unresolved"


def test_an_address_of_rank_0_is_checked_from_both_sides(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = str(listener.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    (alone,) = network.rendezvous()
    assert alone.status == "fail" and alone.found == "MASTER_PORT not set"
    monkeypatch.setenv("MASTER_PORT", port)
    (rank_0,) = network.rendezvous()
    assert rank_0.status == "fail" and "in use by pid" in rank_0.found and "kill" not in rank_0.next
    monkeypatch.setenv("RANK", "1")
    (rank_1,) = network.rendezvous()
    assert rank_1.status == "ok"
    listener.close()
    (rank_1,) = network.rendezvous()
    assert (rank_1.code, rank_1.status) == (ExitCode.UNREACHABLE, "fail") and "rank 0" in rank_1.why + rank_1.next


@pytest.mark.row("S4-04")
def test_who_sets_the_address_of_rank_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not [*network.rendezvous()], "one rank needs none"
    monkeypatch.setenv("WORLD_SIZE", "2")
    (missing,) = network.rendezvous()
    assert missing.status == "fail" and missing.found == "MASTER_ADDR and MASTER_PORT not set"
    assert "torchrun and `persia debug run` set MASTER_ADDR and MASTER_PORT on every rank" in missing.why
    assert "persia-launcher does not, because ranks of a job meet through PERSIA_NATS_URL" in missing.why
    assert "torchrun --master-addr HOST --master-port 29500" in missing.next
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:4222")
    assert not [*network.rendezvous()], "ranks of a job meet through NATS"


@pytest.mark.row("S4-06")
def test_what_resolves_a_name_is_told(tmp_path: Path, listener: socket.socket) -> None:
    hosts, resolver = tmp_path / "hosts", tmp_path / "resolv.conf"
    hosts.write_text("127.0.0.1 localhost\n10.0.0.7 Db.local db # extra_hosts\n# 10.0.0.8 old\n")
    resolver.write_text("search x\nnameserver 127.0.0.11\nnameserver 10.0.0.1\n")
    found = [network.resolved_by(name, hosts, resolver) for name in ("db", "db.local", "old", "10.0.0.7", "::1")]
    assert found == [str(hosts), str(hosts), "DNS 127.0.0.11", "", ""]
    check = network.endpoint("nats", "localhost", listener.getsockname()[1], what="NATS", start="start it")
    assert check.status == "ok" and ("from /etc/hosts) answers" in check.found or "from DNS" in check.found)


@pytest.mark.row("S4-21")
def test_mtu_and_rp_filter_are_advice(tmp_path: Path) -> None:
    net, conf = tmp_path / "net", tmp_path / "conf"
    for name, mtu, own in (("eth0", 1500, 1), ("eth1", 9000, 0), ("lo", 65536, 0)):
        for folder, file, value in ((net, "mtu", mtu), (conf, "rp_filter", own)):
            (folder / name).mkdir(parents=True)
            (folder / name / file).write_text(f"{value}\n")
    (conf / "all").mkdir()
    (conf / "all" / "rp_filter").write_text("0\n")
    one = network.links(net, conf)
    assert one.status == "ok" and one.found == "eth0 mtu 1500, eth1 mtu 9000; rp_filter strict on eth0"
    assert "mtu 9000 costs less" in one.why and "sysctl" not in one.why
    (conf / "all" / "rp_filter").write_text("1\n")  # the larger one of the two values applies
    both = network.links(net, conf)
    assert both.status == "ok" and "strict on eth0, eth1" in both.found and "rp_filter=2" in both.why
    assert network.links().status == "ok" and "mtu" in network.links().found


@pytest.mark.row("S4-54")
def test_the_interface_of_the_route_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    address = SimpleNamespace(family=socket.AF_INET)
    numbers = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "eth1": "10.1.0.5"}
    given = {name: [SimpleNamespace(**vars(address), address=number)] for name, number in numbers.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: given)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(given, SimpleNamespace(isup=True)))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    found = network.interfaces()
    assert found.status == "fail" and "correct or unset NCCL_SOCKET_IFNAME" in found.next
    assert "this host has eth0 (10.0.0.5), eth1 (10.1.0.5): for example PERSIA_SOCKET_IFNAME=eth0" in found.next
    monkeypatch.setenv("MASTER_ADDR", "10.1.0.9")
    monkeypatch.setattr("persia.distributed.network._of_route", {"10.1.0.9": "eth1"}.get)
    assert "the route to 10.1.0.9 is eth1 (10.1.0.5): PERSIA_SOCKET_IFNAME=eth1" in network.interfaces().next


def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.interfaces().status == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    found = network.interfaces()
    assert found.status == "fail" and "interface eth77 does not exist; this host has" in found.found
    assert "unset GLOO_SOCKET_IFNAME" in found.next


def test_every_address_of_a_name_is_tried(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service listens at only one of the two addresses of a name, as with ``localhost``."""
    port = listener.getsockname()[1]

    def resolve(host: str, port: int | None, **options: object) -> list[object]:
        del host, options
        return [(socket.AF_INET, 1, 6, "", (number, port)) for number in ("127.0.0.9", "127.0.0.1")]

    monkeypatch.setattr("persia.doctor.network.socket.getaddrinfo", resolve)
    assert network.reach("localhost", port) == network.Reached("reached", "127.0.0.1")
    assert network.is_here("localhost")
    listener.close()
    found = network.endpoint("nats", "localhost", port, what="NATS", start="start it")
    assert f"localhost:{port}: refused" in found.found and "its other addresses: 127.0.0.1 refused" in found.why


# --- Announced parts


def part(address: str, host: str = "", index: int = 0) -> Process:
    host = host or socket.gethostname()
    return Process(
        "persia-middleware", "j", index, 2, address, "", host, "1", "1", "", "deadline exceeded", None, None, []
    )


@pytest.mark.parametrize(
    ("outcome", "why", "remedy"),
    [
        (
            "filtered",
            "filtered: a firewall or another network drops packets to 10.0.0.9:7401",
            "TCP connections to port 7401 of far",
        ),
        ("refused", "does not serve", "see its log on host far"),
        ("reached", "accepts connections, but the process does not respond", "see its log on host far"),
        ("unreachable", "10.0.0.9 cannot be reached: no route", "ip route get 10.0.0.9"),
    ],
)
def test_why_a_part_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, outcome: network.Outcome, why: str, remedy: str
) -> None:
    tried: list[tuple[str, int]] = []

    def reach(host: str, port: int) -> network.Reached:
        tried.append((host, port))
        return network.Reached(outcome, host, "no route")

    monkeypatch.setattr(network, "reach", reach)
    dead = part("10.0.0.9:7401", "far")
    found = Status([dead], [Problem("health", f"{dead.name} at {dead.address}: {dead.health}")])
    checks = [check for check in services.services(found, "j") if check.name != "persia-server"]
    assert tried == [("10.0.0.9", 7401)]
    (check,) = checks  # a problem that was reported for the process is not reported again for the job
    assert (check.status, check.code) == ("fail", ExitCode.UNREACHABLE)
    assert "persia-middleware 0 at 10.0.0.9:7401" in check.found and why in check.why and remedy in check.next
    assert "persia status" not in check.next


def test_a_loopback_address_of_another_host_is_named(listener: socket.socket) -> None:
    """On this host, another program listens at that address."""
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    here, there = part(address, index=0), part(address, "far", index=1)
    _, near, far = services.services(Status([here, there], []), "j")
    assert "accepts connections" in near.why and "loopback" not in near.why
    assert "loopback address" in far.why and far.next.startswith("on far: unset PERSIA_SOCKET_IFNAME and PERSIA_ADV")


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("missing", "start the missing process"),
        ("duplicate", "stop all but one"),
        ("replicas", "same number of replicas"),
        ("version", "doctor --only versions"),
        ("protocol", "doctor --only versions"),
        ("generation", "restart the trainers"),
    ],
)
def test_parts_that_do_not_fit_have_a_remedy(cause: Cause, remedy: str) -> None:
    """The remedy depends on the cause of the problem, not on its text."""
    found = Status([], [Problem(cause, "persia-server 0 is missing, different values of replicas: …")])
    (job,) = (check for check in services.services(found, "j") if check.name == "job")
    assert job.found == found.problems[0].text and remedy in job.next and "; " not in job.next.partition(" in each ")[0]


def test_the_causes_of_what_is_wrong_with_a_job() -> None:
    def of(service: str, index: int = 0, replicas: int = 1, health: str = "serving", **more: Any) -> Process:
        values = {"version": "1", "protocol": "1", "generation": None} | more
        return Process(
            service=service, job="j", index=index, replicas=replicas, address="h:1", metrics="", host="h",
            started="", health=health, rows=None, tables=[], **values,
        )  # fmt: skip

    sound = [of("persia-server"), of("persia-middleware")]
    assert job_status.problems_of(sound) == []
    for more, cause in (
        ([of("persia-trainer", 1, 2)], "missing"),
        ([of("persia-server")], "duplicate"),
        ([of("persia-trainer", 0, 2), of("persia-trainer", 1, 3)], "replicas"),
        ([of("persia-trainer", version="2")], "version"),
        ([of("persia-trainer", protocol="2")], "protocol"),
        ([of("persia-data", generation=1), of("persia-trainer", generation=2)], "generation"),
        ([of("persia-trainer", health="unavailable")], "health"),
    ):
        assert [problem.cause for problem in job_status.problems_of([*sound, *more])] == [cause]
    assert [problem.cause for problem in job_status.problems_of([])] == ["absent", "absent"]


def test_a_loopback_interface_reaches_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_SOCKET_IFNAME", "lo")
    for here in ("nats://127.0.0.1:4222", "nats://no-such-host.invalid:4222"):
        monkeypatch.setenv("PERSIA_NATS_URL", here)
        assert network.interfaces().status == "ok"
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://203.0.113.7:4222")
    found = network.interfaces()
    assert (found.status, found.code) == ("fail", ExitCode.UNREACHABLE)
    assert "PERSIA_SOCKET_IFNAME=lo: 127.0.0.1 is a loopback address" in found.found
    assert "unset PERSIA_SOCKET_IFNAME" in found.next and "ip route get 203.0.113.7" in found.next
    monkeypatch.delenv("PERSIA_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    assert network.interfaces().status == "warn", "ranks of one host reach each other"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo")
    others = {name for name in psutil.net_if_addrs() if name != "lo"}
    assert not others or network.interfaces().status == "ok"


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_address_that_is_announced_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("PERSIA_ADVERTISE", address)
    own = [each.address for one in psutil.net_if_addrs().values() for each in one if each.family == socket.AF_INET]
    for here in own:  # NATS on this host, at any of its addresses
        monkeypatch.setenv("PERSIA_NATS_URL", f"nats://{here}:4222")
        assert network.interfaces().status == "ok", here
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://203.0.113.7:4222")
    found = network.interfaces()
    assert (found.status, found.code) == ("fail", ExitCode.UNREACHABLE)
    assert f"PERSIA_ADVERTISE={address}: {address} is a loopback address" in found.found
    assert "unset PERSIA_ADVERTISE" in found.next and "ip route get 203.0.113.7" in found.next
    monkeypatch.setenv("PERSIA_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("PERSIA_ADVERTISE", "10.1.2.3")
    assert network.interfaces().status == "ok", "PERSIA_ADVERTISE wins"
