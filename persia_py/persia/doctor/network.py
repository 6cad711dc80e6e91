"""The network: interfaces, names, addresses and ports; who uses a port; and why an address cannot be reached."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import psutil

from persia.doctor.check import Check
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import variable

_CONNECT_S = 2.0
"""Seconds in which an address has to answer; a firewall that drops packets lets it pass."""
_NATS_PORT = 4222

Outcome = Literal["reached", "unresolved", "refused", "filtered", "unreachable"]


@dataclass(frozen=True)
class Reached:
    """What became of a connection.

    Attributes:
        outcome: ``unresolved``: the name has no address. ``refused``: the host answers, nothing listens on the port.
            ``filtered``: no answer in time. ``unreachable``: there is no route, or another error.
        address: The numeric address.
        reason: The error.
    """

    outcome: Outcome
    address: str = ""
    reason: str = ""


def reach(host: str, port: int, seconds: float = _CONNECT_S) -> Reached:
    """Connect to a TCP port, and tell apart why it fails.

    Args:
        host: A name or a number.
        port: The port.
        seconds: How long to wait for an answer.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Reached("unresolved", reason=str(error))
    family, kind, protocol, _, address = found[0]
    number = str(address[0])
    try:
        with socket.socket(family, kind, protocol) as client:
            client.settimeout(seconds)
            client.connect(address)
    except ConnectionRefusedError as error:
        return Reached("refused", number, str(error.strerror))
    except TimeoutError:
        return Reached("filtered", number, f"no answer in {seconds:g} s")
    except OSError as error:
        return Reached("unreachable", number, str(error.strerror or error))
    return Reached("reached", number)


def endpoint(name: str, host: str, port: int, *, what: str, start: str) -> Check:
    """Check that something listens at an address.

    Args:
        name: The name of the check.
        host: The host.
        port: The port.
        what: What should listen there.
        start: How it is started.
    """
    shown = f"{host}:{port}"
    found = reach(host, port)
    code = ExitCode.UNREACHABLE
    if found.outcome == "reached":
        return Check(name, "ok", f"{shown} ({found.address}) answers")
    if found.outcome == "unresolved":
        why = f"the name {host} has no address here: {found.reason}"
        return Check(name, "fail", f"{shown}: unresolved", why, f"getent hosts {host}", code)
    if found.outcome == "refused":
        why = f"the host {found.address} answers, but {what} does not listen on port {port}"
        return Check(name, "fail", f"{shown}: refused", why, start, code)
    if found.outcome == "filtered":
        why = f"{found.reason}: a firewall drops the packets, or the host {found.address} is off"
        return Check(name, "fail", f"{shown}: filtered", why, f"let TCP port {port} of {host} through", code)
    return Check(name, "fail", f"{shown}: unreachable", found.reason, f"ip route get {found.address}", code)


def checks() -> Iterator[Check]:
    """Yield the checks of the network."""
    yield interfaces()
    yield from rendezvous()
    for name, what in (("PERSIA_LISTEN", "the gRPC port"), ("PERSIA_METRICS_LISTEN", "the port of metrics")):
        value = variable(name)
        if value is not None and not value.startswith("unix:"):
            yield listening(name, value, what)


def interfaces() -> Check:
    """Check that the interfaces exist that the environment names."""
    from persia.distributed import network

    given = {name: value for name in network.VARIABLES if (value := variable(name)) is not None}
    have = ", ".join(sorted(psutil.net_if_addrs()))
    try:
        network.check()
    except UsageError as error:
        name = next((each for each in given if str(error).startswith(each)), "CUDA_VISIBLE_DEVICES")
        return Check("interfaces", "fail", str(error), "ranks would wait for each other", f"correct or unset {name}")
    named = ", ".join(f"{name}={value}" for name, value in given.items())
    return Check("interfaces", "ok", f"{named or 'none is named'}; have {have}")


def rendezvous() -> Iterator[Check]:
    """Yield the check of ``MASTER_ADDR`` and ``MASTER_PORT``, where a script of one's own uses torch's rendezvous."""
    host, port = variable("MASTER_ADDR"), variable("MASTER_PORT")
    if host is None and port is None:
        return
    if host is None or port is None or not port.isdecimal() or not 0 < int(port) < 65536:
        found = f"MASTER_ADDR={host or ''} MASTER_PORT={port or ''}"
        yield Check("rendezvous", "fail", found, "both are needed, the port from 1 to 65535", "set both, or unset both")
        return
    rank = variable("RANK")
    if rank in (None, "0") and is_here(host):
        yield free_port("rendezvous", int(port), "MASTER_PORT")
        return
    start = "start rank 0 first; it listens there"
    yield endpoint("rendezvous", host, int(port), what="rank 0", start=start)


def is_here(host: str) -> bool:
    """Whether a name or a number is an address of this host."""
    try:
        number = socket.gethostbyname(host)
    except OSError:
        return False
    here = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    return number in here or number.startswith("127.")


def listening(name: str, value: str, what: str) -> Check:
    """Check that the port of an address to listen at is free."""
    port = urlsplit(f"//{value}").port if value.rpartition(":")[2].isdecimal() else None
    if port is None:
        return Check(name, "fail", f"{name}={value}", "want HOST:PORT", f"{name}=0.0.0.0:8888")
    if port == 0:
        return Check(name, "ok", f"{value}: {what} is chosen when it starts")
    return free_port(name, port, name)


def free_port(name: str, port: int, origin: str) -> Check:
    """Check that nothing listens on a port of this host; else say which program does.

    Args:
        name: The name of the check.
        port: The port.
        origin: The variable that has the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - it is closed at once
        except PermissionError:
            why = "ports below 1024 need root"
            return Check(name, "fail", f"port {port} cannot be bound", why, f"give {origin} a port above 1023")
        except OSError:
            user = owner(port)
            why = "a second program cannot listen there"
            stop = f"kill {user.split()[1]}" if user.startswith("pid") else f"give {origin} another port"
            return Check(name, "fail", f"port {port} in use by {user}", why, f"{stop}, or give {origin} another port")
    return Check(name, "ok", f"port {port} is free")


def owner(port: int) -> str:
    """Return who listens on a port, as ``pid N (program)``."""
    try:
        found = [one for one in psutil.net_connections(kind="tcp") if one.laddr and one.laddr.port == port]
    except psutil.AccessDenied:
        found = []
    listens = next((one for one in found if one.status == psutil.CONN_LISTEN), None)
    if listens is None or listens.pid is None:
        return "a process of another user"
    try:
        return f"pid {listens.pid} ({psutil.Process(listens.pid).name()})"
    except psutil.Error:
        return f"pid {listens.pid}"


def nats_address(url: str) -> tuple[str, int]:
    """Return host and port of a URL of NATS.

    Raises:
        ValueError: It is no such URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"nats", "tls"} or not parts.hostname:
        raise ValueError(f"want nats://HOST:PORT or tls://HOST:PORT, found {url.rpartition('@')[2]!r}")
    return parts.hostname, parts.port or _NATS_PORT


def environment() -> list[tuple[str, str]]:
    """Return the host's name and its interfaces with their IPv4 addresses."""
    listed = [
        f"{name} {each.address}"
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if each.family == socket.AF_INET
    ]
    return [("host", socket.gethostname()), ("interfaces", ", ".join(listed)), ("processors", str(os.cpu_count()))]
