"""Checks of the network: interfaces, names and addresses, and why an address cannot be reached."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil

from persia.doctor import ports
from persia.doctor.check import Check
from persia.runtime.errors import PersiaError, UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import settings, variable

_CONNECT_S = 2.0
"""Seconds within which an address must respond; a firewall that drops packets causes the full wait."""
_NATS_PORT = 4222
_ADVERTISE = "PERSIA_ADVERTISE"
_DRIVER = Path("/proc/driver/nvidia")
"""A path that exists on a host with NVIDIA's driver. This path is tested instead of torch, because importing torch
takes seconds."""

Outcome = Literal["reached", "unresolved", "refused", "filtered", "unreachable"]


_INFORMATIVE: tuple[Outcome, ...] = ("reached", "filtered", "refused", "unreachable", "unresolved")
"""Outcomes, the most informative one first. The addresses of one name may have different outcomes."""


@dataclass(frozen=True)
class Reached:
    """The result of a connection.

    Attributes:
        outcome: ``unresolved``: the name has no address. ``refused``: the host responds, but nothing listens on the
            port. ``filtered``: no response in time. ``unreachable``: there is no route, or another error.
        address: The IP address.
        reason: The error message.
        others: The results of the other addresses of the name, as ``ADDRESS OUTCOME``.
    """

    outcome: Outcome
    address: str = ""
    reason: str = ""
    others: tuple[str, ...] = ()


def reach(host: str, port: int, seconds: float = _CONNECT_S) -> Reached:
    """Connect to a TCP port, and classify the failure. The addresses of a name are tried one after another.

    Args:
        host: A host name or an IP address.
        port: The port.
        seconds: The time limit for each address, in seconds.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Reached("unresolved", reason=str(error))
    tried: list[Reached] = []
    for family, _, _, _, address in found:
        one = _connect(family, address, seconds)
        if one.outcome == "reached":
            return one
        tried.append(one)
    best = min(tried, key=lambda one: _INFORMATIVE.index(one.outcome))
    others = tuple(f"{one.address} {one.outcome}" for one in tried if one is not best)
    return Reached(best.outcome, best.address, best.reason, others)


def _connect(family: socket.AddressFamily, address: Any, seconds: float) -> Reached:
    number = str(address[0])
    try:
        with socket.socket(family, socket.SOCK_STREAM) as client:
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
        what: The name of the program that should listen at the address.
        start: The command that starts it.
    """
    shown = f"{host}:{port}"
    found = reach(host, port)
    code = ExitCode.UNREACHABLE
    others = f"; its other addresses: {', '.join(found.others)}" if found.others else ""
    if found.outcome == "reached":
        return Check(name, "ok", f"{shown} ({found.address}{_by(host)}) answers")
    if found.outcome == "unresolved":
        why = f"the name {host} has no address on this host: {found.reason}"
        return Check(name, "fail", f"{shown}: unresolved", why, f"getent hosts {host}", code)
    if found.outcome == "refused":
        why = f"the host {found.address}{_by(host)} answers, but {what} does not listen on port {port}{others}"
        return Check(name, "fail", f"{shown}: refused", why, start, code)
    if found.outcome == "filtered":
        why = (
            f"DNS ok, TCP filtered ({found.reason}) from {socket.gethostname()} to {found.address}{_by(host)}, port "
            f"{port}: a firewall drops the packets, or that host is off{others}"
        )
        return Check(name, "fail", f"{shown}: filtered", why, f"allow TCP connections to port {port} of {host}", code)
    return Check(
        name, "fail", f"{shown}: unreachable", f"{found.reason}{others}", f"ip route get {found.address}", code
    )


def _by(host: str) -> str:
    """Return the source of the address of a name, as part of a message; empty for an IP address."""
    source = resolved_by(host)
    return f", from {source}" if source else ""


def resolved_by(host: str, hosts: Path = Path("/etc/hosts"), resolver: Path = Path("/etc/resolv.conf")) -> str:
    """Return what resolves a name: the hosts file (``extra_hosts`` of compose) or DNS; empty for an IP address.

    Args:
        host: The name.
        hosts: The path of the hosts file.
        resolver: The path of the file that lists the DNS servers.
    """
    try:
        ipaddress.ip_address(host.strip("[]"))
        return ""
    except ValueError:
        pass
    names = (line.partition("#")[0].split()[1:] for line in _read(hosts).splitlines())
    if any(host.lower() in map(str.lower, each) for each in names):
        return str(hosts)
    servers = [line.split()[1] for line in _read(resolver).splitlines() if line.startswith("nameserver ")]
    return f"DNS {servers[0]}" if servers else "DNS"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def links(network: Path = Path("/sys/class/net"), filters: Path = Path("/proc/sys/net/ipv4/conf")) -> Check:
    """Return the MTU and reverse-path filtering of each interface. The check only advises; it changes nothing.

    Args:
        network: The folder that lists the interfaces.
        filters: The folder with the settings of interfaces.
    """
    names = sorted(path.name for path in network.iterdir() if path.name != "lo") if network.is_dir() else []
    mtus = {name: _read(network / name / "mtu").strip() for name in names}
    whole = _read(filters / "all" / "rp_filter").strip()
    strict = [name for name in names if max(whole, _read(filters / name / "rp_filter").strip()) == "1"]
    found = ", ".join(f"{name} mtu {mtu or '?'}" for name, mtu in mtus.items()) or "no interface but loopback"
    found += f"; rp_filter strict on {', '.join(strict)}" if strict else "; rp_filter is not strict"
    advice = []
    if len(strict) > 1:
        advice.append(
            "with several interfaces, strict rp_filter drops packets whose answer would use another interface; on the "
            "host: sysctl net.ipv4.conf.all.rp_filter=2"
        )
    if "1500" in mtus.values():
        advice.append("on a network whose switches and hosts all allow it, mtu 9000 costs less processor time per byte")
    return Check("links", "ok", found, "; ".join(advice))


def checks() -> Iterator[Check]:
    """Yield the checks of the network."""
    yield interfaces()
    if settings.nats_url is not None and settings.world_size > 1:
        yield private_network()
    yield links()
    yield from rendezvous()
    for name, what in (("PERSIA_LISTEN", "the gRPC port"), ("PERSIA_METRICS_LISTEN", "the port of metrics")):
        value = variable(name)
        if value is not None and not value.startswith("unix:"):
            yield ports.listening(name, value, what)


def interfaces() -> Check:
    """Check that the interfaces named in the environment exist."""
    from persia.distributed import network

    names = (_ADVERTISE, *network.VARIABLES)
    given = {name: value for name in names if (value := variable(name)) is not None}
    have = ", ".join(sorted(psutil.net_if_addrs()))
    try:
        network.check()
    except UsageError as error:
        name = str(error).partition("=")[0]
        remedy = error.hint or f"correct or unset {name}"
        if name in network.VARIABLES:
            remedy = f"correct or unset {name}; {network.suggestion()}"
            return Check("interfaces", "fail", str(error), "ranks would wait for each other", remedy)
        return Check(name, "fail", str(error), "training does not start", remedy)
    if (loopback := _loopback(given)) is not None:
        return loopback
    named = ", ".join(f"{name}={value}" for name, value in given.items())
    return Check("interfaces", "ok", f"{named or 'no variable names an interface'}; this host has {have}")


def private_network() -> Check:
    """Check that the ranks of a job connect over a private network."""
    from persia.distributed import private
    from persia_core.discovery import advertised_host

    name = "private network"
    try:
        address = advertised_host(settings.nats_url or "")
    except PersiaError as error:
        return Check(name, "skip", "the address of this rank is not known", str(error).splitlines()[0])
    backend = settings.dist_backend
    if backend == "auto":
        backend = "nccl" if _DRIVER.exists() else "gloo"
    public = private.problem(address, rank=settings.rank, backend=backend)
    if public is None:
        return Check(name, "ok", f"other ranks reach this one at {address}")
    found, _, why = str(public).partition("; ")
    if settings.allow_public:
        return Check(name, "warn", found, why, f"unset {private.ALLOW}")
    return Check(name, "fail", found, why, str(public.hint))


def _loopback(given: dict[str, str]) -> Check | None:
    """Return the check of the first variable that names loopback although NATS is on another host."""
    from persia.distributed import network

    nats = _other_host()
    if nats is None:
        return None
    addresses = psutil.net_if_addrs()
    for name, value in given.items():
        if name == "PERSIA_SOCKET_IFNAME" and _ADVERTISE in given:
            continue  # PERSIA_SOCKET_IFNAME has no effect if PERSIA_ADVERTISE is set
        matched = [] if name == _ADVERTISE else network.matching(name, value, sorted(addresses))
        numbers = [each.address for one in matched for each in addresses[one] if each.family == socket.AF_INET]
        numbers = [value] if name == _ADVERTISE else numbers
        if not numbers or not all(network.is_loopback(number) for number in numbers):
            continue
        found = f"{name}={value}: {numbers[0]} is a loopback address, and NATS is on another host, {nats}"
        what = "the address" if name == _ADVERTISE else "the interface"
        remedy = (
            f"unset {name} (docker compose config shows the variables of containers), or set this variable to {what} "
            f"that ip route get {nats} prints"
        )
        if name in (_ADVERTISE, "PERSIA_SOCKET_IFNAME"):
            why = "this process would announce an address that other hosts and containers cannot reach"
            return Check("interfaces", "fail", found, why, remedy, ExitCode.UNREACHABLE)
        why = "ranks on other hosts and in other containers cannot reach this one; ranks of one host can"
        return Check("interfaces", "warn", found, why, remedy)
    return None


def _other_host() -> str | None:
    """Return the host of NATS, if it has an address and is not this host."""
    try:
        host, _ = nats_address(settings.nats_url or "")
        number = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (ValueError, OSError):
        return None
    return None if is_here(host) else number


WHO_SETS = (
    "torchrun and `persia debug run` set MASTER_ADDR and MASTER_PORT on every rank; persia-launcher does not, because "
    "ranks of a job meet through PERSIA_NATS_URL"
)
"""The text that explains which programs set the variables of torch's rendezvous."""
SET_MASTER = (
    "start the ranks with torchrun --master-addr HOST --master-port 29500, with the host of rank 0; or set both "
    "variables on every rank; or set PERSIA_NATS_URL, and unset both"
)
"""The next step if the variables of torch's rendezvous are missing or wrong."""


def rendezvous() -> Iterator[Check]:
    """Yield the check of ``MASTER_ADDR`` and ``MASTER_PORT``, for scripts that use torch's rendezvous themselves."""
    host, port = variable("MASTER_ADDR"), variable("MASTER_PORT")
    if host is None and port is None and (settings.nats_url is not None or variable("WORLD_SIZE") in (None, "1")):
        return  # ranks of a job find each other through NATS, and a single rank has no others to find
    if host is None or port is None:
        missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if variable(name) is None)
        yield Check("rendezvous", "fail", f"{missing} not set", WHO_SETS, SET_MASTER)
        return
    if not port.isdecimal() or not 0 < int(port) < 65536:
        found = f"MASTER_ADDR={host} MASTER_PORT={port}"
        yield Check("rendezvous", "fail", found, "expected a port from 1 to 65535", SET_MASTER)
        return
    rank = variable("RANK")
    if rank in (None, "0") and is_here(host):
        yield ports.free("rendezvous", int(port), "MASTER_PORT")
        return
    start = "start rank 0 first; it listens there"
    yield endpoint("rendezvous", host, int(port), what="rank 0", start=start)


def is_here(host: str) -> bool:
    """Whether a host name or IP address is an address of this host."""
    try:
        numbers = {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    here = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    return bool(numbers & here) or any(number.startswith("127.") for number in numbers)


def nats_address(url: str) -> tuple[str, int]:
    """Return host and port from a NATS URL.

    Raises:
        ValueError: The URL is not a NATS URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"nats", "tls"} or not parts.hostname:
        raise ValueError(f"expected nats://HOST:PORT or tls://HOST:PORT, found {url.rpartition('@')[2]!r}")
    return parts.hostname, parts.port or _NATS_PORT


def environment() -> list[tuple[str, str]]:
    """Return the name of the host, its interfaces with their IPv4 addresses, and its number of processors."""
    listed = [
        f"{name} {each.address}"
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if each.family == socket.AF_INET
    ]
    return [("host", socket.gethostname()), ("interfaces", ", ".join(listed)), ("processors", str(os.cpu_count()))]
