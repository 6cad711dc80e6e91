"""Check the network interfaces and GPUs that the environment names, before a wrong one makes a collective hang."""

import ipaddress
import os
import socket

import psutil

from persia.runtime import environment, settings
from persia.runtime.errors import UsageError

VARIABLES = ("PERSIA_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables in which the user may name an interface."""


def check() -> None:
    """Check every variable of :data:`VARIABLES`, and ``CUDA_VISIBLE_DEVICES``.

    Raises:
        UsageError: One names something that does not exist; the message lists what exists.
    """
    names = sorted(psutil.net_if_addrs())
    for variable in VARIABLES:
        value = settings.variable(variable)
        if value is not None and not matching(variable, value, names):
            plural = "interface" if "," not in value else "none of the interfaces"
            verb = "does not exist" if "," not in value else "exists"
            error = UsageError(f"{variable}={value}: {plural} {value.lstrip('=^')} {verb}; have {', '.join(names)}")
            error.hint = "correct the variable, or dist.interface and nccl.socket_ifname of persia.yml"
            raise error
    environment.check_files()
    _check_gpus()


def matching(variable: str, value: str, names: list[str]) -> list[str]:
    """Return the interfaces that match. NCCL takes prefixes, ``=`` for exact names, and ``^`` for names to exclude.

    Args:
        variable: One of :data:`VARIABLES`.
        value: Its value.
        names: The names of the interfaces of this host.
    """
    nccl = variable == "NCCL_SOCKET_IFNAME"
    avoid, exact = nccl and value.startswith("^"), not nccl or "=" in value[:2]
    wanted = [part.strip() for part in value.lstrip("^=").split(",") if part.strip()]

    def named(name: str) -> bool:
        return any(name == part if exact else name.startswith(part) for part in wanted)

    return [name for name in names if named(name) != avoid]


def is_loopback(address: str) -> bool:
    """Whether an address, a number, is a loopback address."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def _check_gpus() -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = os.environ.get("GPU_NUM", "").strip()
    if visible is None or not count.isdecimal() or int(count) == 0:
        return
    given = [part for part in visible.split(",") if part.strip()]
    if len(given) < int(count):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={visible} lists {len(given)} GPUs, but GPU_NUM={count} ranks need one each"
        )


def of_address(address: str) -> str | None:
    """Return the interface with the IPv4 address of ``address``, a name or a number; None if there is none."""
    try:
        number = socket.gethostbyname(address)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.family == socket.AF_INET and found.address == number for found in addresses):
            return str(name)
    return None
