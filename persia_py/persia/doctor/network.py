"""The network: interfaces, names and addresses, and why an address cannot be reached."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil

from persia.doctor import ports
from persia.doctor.check import Check
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import settings, variable

_CONNECT_S = 2.0
"""Seconds in which an address has to answer; a firewall that drops packets lets it pass."""
_NATS_PORT = 4222

Outcome = Literal["reached", "unresolved", "refused", "filtered", "unreachable"]


_INFORMATIVE: tuple[Outcome, ...] = ("reached", "filtered", "refused", "unreachable", "unresolved")
"""Outcomes, the most informative one first: of the addresses of a name, one may be refused and another filtered."""


@dataclass(frozen=True)
class Reached:
    """What became of a connection.

    Attributes:
        outcome: ``unresolved``: the name has no address. ``refused``: the host answers, nothing listens on the port.
            ``filtered``: no answer in time. ``unreachable``: there is no route, or another error.
        address: The numeric address.
        reason: The error.
        others: What became of the other addresses of the name, as ``ADDRESS OUTCOME``.
    """

    outcome: Outcome
    address: str = ""
    reason: str = ""
    others: tuple[str, ...] = ()


def reach(host: str, port: int, seconds: float = _CONNECT_S) -> Reached:
    """Connect to a TCP port, and tell apart why it fails. The addresses of a name are tried in turn.

    Args:
        host: A name or a number.
        port: The port.
        seconds: How long to wait for an answer of each address.
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
        what: What should listen there.
        start: How it is started.
    """
    shown = f"{host}:{port}"
    found = reach(host, port)
    code = ExitCode.UNREACHABLE
    others = f"; its other addresses: {', '.join(found.others)}" if found.others else ""
    if found.outcome == "reached":
        return Check(name, "ok", f"{shown} ({found.address}) answers")
    if found.outcome == "unresolved":
        why = f"the name {host} has no address here: {found.reason}"
        return Check(name, "fail", f"{shown}: unresolved", why, f"getent hosts {host}", code)
    if found.outcome == "refused":
        why = f"the host {found.address} answers, but {what} does not listen on port {port}{others}"
        return Check(name, "fail", f"{shown}: refused", why, start, code)
    if found.outcome == "filtered":
        why = f"{found.reason}: a firewall drops the packets, or the host {found.address} is off{others}"
        return Check(name, "fail", f"{shown}: filtered", why, f"let TCP port {port} of {host} through", code)
    return Check(
        name, "fail", f"{shown}: unreachable", f"{found.reason}{others}", f"ip route get {found.address}", code
    )


def checks() -> Iterator[Check]:
    """Yield the checks of the network."""
    yield interfaces()
    yield from rendezvous()
    for name, what in (("PERSIA_LISTEN", "the gRPC port"), ("PERSIA_METRICS_LISTEN", "the port of metrics")):
        value = variable(name)
        if value is not None and not value.startswith("unix:"):
            yield ports.listening(name, value, what)


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
    if (loopback := _loopback(given)) is not None:
        return loopback
    named = ", ".join(f"{name}={value}" for name, value in given.items())
    return Check("interfaces", "ok", f"{named or 'none is named'}; have {have}")


def _loopback(given: dict[str, str]) -> Check | None:
    """Return the check of the first variable that names a loopback interface although NATS is on another host."""
    from persia.distributed import network

    nats = _other_host()
    if nats is None:
        return None
    addresses = psutil.net_if_addrs()
    for name, value in given.items():
        matched = network.matching(name, value, sorted(addresses))
        numbers = [each.address for one in matched for each in addresses[one] if each.family == socket.AF_INET]
        if not numbers or not all(network.is_loopback(number) for number in numbers):
            continue
        found = f"{name}={value}: {numbers[0]} is a loopback address, and NATS is on another host, {nats}"
        if name == "PERSIA_SOCKET_IFNAME":
            why = "this process would announce an address that other hosts and containers cannot reach"
            return Check("interfaces", "fail", found, why, _remedy(name, nats), ExitCode.UNREACHABLE)
        why = "ranks on other hosts and in other containers cannot reach this one; ranks of one host can"
        return Check("interfaces", "warn", found, why, _remedy(name, nats))
    return None


def _remedy(name: str, nats: str) -> str:
    return f"unset {name} (in containers: docker compose config), or name the interface of: ip route get {nats}"


def _other_host() -> str | None:
    """Return the host of NATS, if it has an address and is not this host."""
    try:
        host, _ = nats_address(settings.nats_url or "")
        number = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (ValueError, OSError):
        return None
    return None if is_here(host) else number


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
        yield ports.free("rendezvous", int(port), "MASTER_PORT")
        return
    start = "start rank 0 first; it listens there"
    yield endpoint("rendezvous", host, int(port), what="rank 0", start=start)


def is_here(host: str) -> bool:
    """Whether a name or a number is an address of this host."""
    try:
        numbers = {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    here = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    return bool(numbers & here) or any(number.startswith("127.") for number in numbers)


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
