"""Checks the network interfaces and GPUs that the environment names, because a wrong name makes a collective hang."""

import ipaddress
import os
import socket
from urllib.parse import urlsplit

import psutil

from persia.runtime import environment, settings
from persia.runtime.errors import UsageError

VARIABLES = ("PERSIA_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that may name network interfaces."""


def check() -> None:
    """Check every variable of :data:`VARIABLES`, and ``CUDA_VISIBLE_DEVICES``.

    Raises:
        UsageError: A variable names something that does not exist; the message lists what exists.
    """
    names = sorted(psutil.net_if_addrs())
    for variable in VARIABLES:
        value = settings.variable(variable)
        if value is not None and not matching(variable, value, names):
            given = value.lstrip("=^")
            problem = f"none of the interfaces {given} exists" if "," in value else f"interface {given} does not exist"
            if variable == "NCCL_SOCKET_IFNAME" and value.startswith("^"):
                problem = "every interface of this host is excluded"
            raise UsageError(
                f"{variable}={value}: {problem}; this host has {', '.join(names)}",
                hint=f"correct the variable, or dist.interface and nccl.socket_ifname of persia.yml; {suggestion()}",
            )
    environment.check_files()
    _check_gpus()


def matching(variable: str, value: str, names: list[str]) -> list[str]:
    """Return the matching interfaces. NCCL accepts prefixes, ``=`` for exact names, and ``^`` for names to exclude.

    Args:
        variable: One of :data:`VARIABLES`.
        value: The value of the variable.
        names: The names of the interfaces of this host.
    """
    nccl = variable == "NCCL_SOCKET_IFNAME"
    avoid, exact = nccl and value.startswith("^"), not nccl or "=" in value[:2]
    wanted = [part.strip() for part in value.lstrip("^=").split(",") if part.strip()]

    def named(name: str) -> bool:
        return any(name == part if exact else name.startswith(part) for part in wanted)

    return [name for name in names if named(name) != avoid]


def suggestion() -> str:
    """Suggest an interface: that of the route to NATS or to ``MASTER_ADDR``, otherwise one that is up."""
    up = {
        name: next((each.address for each in psutil.net_if_addrs().get(name, []) if each.family == socket.AF_INET), "")
        for name, status in psutil.net_if_stats().items()
        if status.isup
    }
    usable = {name: number for name, number in up.items() if number and not is_loopback(number)}
    for peer in (urlsplit(settings.settings.nats_url or "").hostname, settings.variable("MASTER_ADDR")):
        name = None if peer is None else _of_route(peer)
        if name in usable:
            given = f"PERSIA_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
            return f"the route to {peer} is {name} ({usable[name]}): {given}"
    real = [name for name in usable if not name.startswith(_VIRTUAL)] or [*usable]
    if not real:
        return "this host has no interface but loopback"
    listed = ", ".join(f"{name} ({usable[name]})" for name in real)
    return f"this host has {listed}: for example PERSIA_SOCKET_IFNAME={real[0]} NCCL_SOCKET_IFNAME={real[0]}"


_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel")
"""Prefixes of the names of interfaces that lead only to containers on this host."""


def _of_route(peer: str) -> str | None:
    """Return the interface of the route to a host name or IP address; None if no route exists."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends no packet: connecting a UDP socket only selects the route
            return of_address(str(probe.getsockname()[0]))
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    """Whether a numeric address is a loopback address."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def _check_gpus() -> None:
    """Check the devices for the ranks of this host: ``LOCAL_WORLD_SIZE``, or ``GPU_NUM`` without a launcher."""
    for variable, option in (("LOCAL_WORLD_SIZE", "GPU_NUM or --nproc-per-node"), ("GPU_NUM", "GPU_NUM")):
        count = os.environ.get(variable, "").strip()
        if count.isdecimal():
            environment.check_devices(int(count), option)
            return


def of_address(address: str) -> str | None:
    """Return the interface that has the IPv4 address of a host name or IP address; None if no interface has it."""
    try:
        number = socket.gethostbyname(address)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.family == socket.AF_INET and found.address == number for found in addresses):
            return str(name)
    return None
