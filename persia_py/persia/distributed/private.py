"""Refuse to connect ranks over a public network: their connections are neither encrypted nor authenticated."""

import ipaddress
import socket
from collections.abc import Iterator

import psutil

from persia.distributed import network
from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings, variable

_logger = get_logger("distributed")

ALLOW = "PERSIA_ALLOW_PUBLIC"
"""The variable that allows public addresses."""
_NAMED = "PERSIA_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, if it is set)"


def check(address: str, *, rank: int, backend: str) -> None:
    """Check the addresses at which other ranks reach this rank. With ``PERSIA_ALLOW_PUBLIC=1``, only log a warning.

    Args:
        address: The host that this rank announces: a host name or an IP address.
        rank: This rank. The other ranks connect to rank 0.
        backend: The torch backend that connects the ranks: ``gloo`` or ``nccl``.

    Raises:
        UsageError: An address is public; the message names the address and what selected it.
    """
    error = problem(address, rank=rank, backend=backend)
    if error is None:
        return
    if not settings.allow_public:
        raise error
    _logger.warning("%s; the ranks connect nevertheless, because %s=1 is set", error, ALLOW)


def problem(address: str, *, rank: int, backend: str) -> UsageError | None:
    """Return the error of :func:`check` regardless of ``PERSIA_ALLOW_PUBLIC``; None if all addresses are private."""
    public: dict[str, str] = {}
    for selected_by, number in _addresses(address, rank=rank, backend=backend):
        if is_public(number):
            public.setdefault(number, selected_by)
    if not public:
        return None
    listed = ", ".join(f"{selected_by} has {number}" for number, selected_by in public.items())
    what = f"ranks would connect over a public network: {listed}"
    why = "connections between ranks are not encrypted, and torch does not authenticate them"
    return UsageError(
        f"{what}; {why}",
        hint=f"{_private_interfaces()}; if this network is private although its addresses are not, set {ALLOW}=1",
    )


def is_public(number: str) -> bool:
    """Whether an IP address can be reached from the Internet (IANA's special-purpose registries: ``is_global``)."""
    try:
        address = ipaddress.ip_address(number.strip("[]").partition("%")[0])
    except ValueError:
        return False
    inner = getattr(address, "ipv4_mapped", None)
    return bool((inner or address).is_global)


def _addresses(address: str, *, rank: int, backend: str) -> Iterator[tuple[str, str]]:
    """Yield the addresses of this rank, each with what selected it."""
    variables = ("PERSIA_ADVERTISE", "PERSIA_SOCKET_IFNAME")
    given = next((f"{name}={value}" for name in variables if (value := variable(name)) is not None), None)
    numbers = _numbers(address)
    for number in numbers:
        yield given or "the interface of the route to NATS", number
    names = sorted(psutil.net_if_addrs())
    variable_name = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    value, own = variable(variable_name), network.of_address(address)
    if value is not None:
        used = {
            f"interface {each} of {variable_name}={value}": each
            for each in network.matching(variable_name, value, names)
        }
    elif own is not None:  # RemoteBackend selects this interface; gloo and NCCL may use any of its addresses
        used = {f"interface {own}": own}
    elif backend == "nccl":
        used = {f"interface {each}, which NCCL may choose,": each for each in names}
    else:  # gloo binds to the address of the host name if possible
        used = {}
        for number in _numbers(socket.gethostname()):
            yield f"host name {socket.gethostname()}", number
    for what, interface in used.items():
        for number in _numbers_of(interface, backend):
            yield what, number
    if rank == 0 and not any(number in _all_numbers(each) for each in names for number in numbers):
        for interface in names:  # rank 0 then listens at all addresses (rendezvous.py)
            for number in _all_numbers(interface):
                yield f"interface {interface}, where rank 0 listens,", number


def _numbers(host: str) -> list[str]:
    """Return the IP addresses of a host name; none if it cannot be resolved."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _numbers_of(interface: str, backend: str = "gloo") -> list[str]:
    """Return the addresses of an interface that ranks use: the IPv4 addresses, or the IPv6 addresses if there are none.

    With ``NCCL_SOCKET_FAMILY=AF_INET6``, NCCL uses the IPv6 addresses.
    """
    six = backend == "nccl" and variable("NCCL_SOCKET_FAMILY") == "AF_INET6"
    found = psutil.net_if_addrs().get(interface, [])
    numbers = [] if six else [each.address for each in found if each.family == socket.AF_INET]
    return numbers or [each.address for each in found if each.family == socket.AF_INET6]


def _all_numbers(interface: str) -> list[str]:
    """Return the addresses of an interface."""
    found = psutil.net_if_addrs().get(interface, [])
    return [each.address.partition("%")[0] for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]


def _private_interfaces() -> str:
    """Return the next step, which names the interfaces of this host that have a private address."""
    private = {
        name: next((number for number in _numbers_of(name) if not is_public(number)), "")
        for name, status in psutil.net_if_stats().items()
        if status.isup
    }
    usable = [f"{name} ({number})" for name, number in private.items() if number and not network.is_loopback(number)]
    if not usable:
        return f"connect the hosts by a private network, such as a VLAN or WireGuard, and set {_NAMED} to its interface"
    return f"set {_NAMED} to the interface of a private network, here {' or '.join(usable)}"
