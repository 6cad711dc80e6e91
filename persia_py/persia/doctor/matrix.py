"""The connections of ranks: each rank listens, connects to each other one, and all learn which connections fail."""

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from persia import __version__
from persia.doctor import network
from persia.doctor.check import Check
from persia.runtime import tokens
from persia.runtime.errors import UnreachableError, UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.job import job_name
from persia.runtime.settings import reload_env, settings, variable

if TYPE_CHECKING:
    from persia.distributed.control_plane import Peers
    from persia.distributed.handshake import Introduction

_PERIOD_S = 0.2
"""Seconds between two attempts to find rank 0."""
_SUFFIX = "-doctor"
"""What the job in which the ranks of this check find each other has in addition: no rank that trains is disturbed."""


@dataclass(frozen=True)
class Seat:
    """Where a rank is.

    Attributes:
        host: The name of its host.
        address: The address at which other ranks reach it.
        port: A port on which it listens, chosen by the kernel, as those of gloo and NCCL.
    """

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Matrix:
    """What became of each connection.

    Attributes:
        seats: Where the ranks are, by rank.
        rows: For each rank, its connections to the ranks: an outcome and a reason; empty for itself.
    """

    seats: list[Seat]
    rows: list[list[tuple[str, str]]]


def here(size: int) -> Iterator[Check]:
    """Yield the checks of one rank, ``RANK``, whose other ranks run the same check.

    Args:
        size: The number of ranks.

    Raises:
        UsageError: ``WORLD_SIZE`` is another number, the rank is not below it, or ranks have no place to meet.
        UnreachableError: The ranks do not find each other; the message names those that are missing.
    """
    if (given := variable("WORLD_SIZE")) not in (None, str(size)):
        raise UsageError(f"--matrix {size}: found WORLD_SIZE={given}; give all ranks, --matrix {given}")
    os.environ["WORLD_SIZE"] = str(size)
    reload_env()
    yield network.interfaces()
    if settings.nats_url is None and settings.rank == 0:
        yield from _rendezvous()
    yield from of(connected(settings.rank, size))


def on_this_host(size: int, *, as_json: bool) -> int:
    """Run the check with all ranks on this host; rank 0 prints. Return its exit code.

    Args:
        size: The number of ranks.
        as_json: Print JSON.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PERSIA_NATS_URL": "", "WORLD_SIZE": str(size)}
    words = [sys.executable, "-m", "persia", "doctor", "--matrix", str(size), *(["--json"] if as_json else [])]
    with ExitStack() as opened:
        started = [
            opened.enter_context(
                subprocess.Popen(
                    words,
                    env={**os.environ, **place, "RANK": str(rank)},
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=None if rank == 0 else subprocess.DEVNULL,
                )
            )
            for rank in range(size)
        ]
        try:
            return started[0].wait()
        finally:
            for each in started:
                each.terminate()


def _rendezvous() -> Iterator[Check]:
    """Yield the check of the port on which rank 0 will listen.

    Raises:
        UsageError: It cannot.
    """
    host = variable("MASTER_ADDR")
    if host is not None and not network.is_here(host):
        error = UsageError(f"--matrix: rank 0 listens at MASTER_ADDR={host}, which is not an address of this host")
        error.hint = "give all ranks the address of the host of rank 0 as MASTER_ADDR; or run RANK=0 on that host"
        raise error
    for check in network.rendezvous():
        yield check
        if check.status == "fail" or "in use" in check.found:
            error = UsageError(f"--matrix: rank 0 cannot listen: {check.found}")
            error.hint = check.next or "end the run that uses the port, or give MASTER_PORT another one"
            raise error


def connected(rank: int, size: int) -> Matrix:
    """Meet the other ranks, connect to each, and return the connections of all.

    Args:
        rank: This one.
        size: The number of ranks.

    Raises:
        UsageError: There is neither a job nor a rendezvous.
        UnreachableError: The ranks do not find each other.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=max(128, size), dualstack_ipv6=dual) as server:
        peers = _met(rank, size)
        try:
            mine = [socket.gethostname(), address(), server.getsockname()[1]]
            seats = [Seat(*each) for each in peers.all_gather("doctor: addresses", mine)]
            row = [_outcome(seat) if other != rank else ["", ""] for other, seat in enumerate(seats)]
            rows = peers.all_gather("doctor: connections", row)
            peers.all_gather("doctor: end", None)  # no rank stops listening before
        except BaseException as error:
            peers.leave(f"{type(error).__name__}: {error}")
            raise
        peers.leave(None)
    return Matrix(seats, [[(str(one), str(why)) for one, why in row] for row in rows])


def _outcome(seat: Seat) -> list[str]:
    found = network.reach(seat.address, seat.port)
    return [found.outcome, found.reason]


def address() -> str:
    """Return the address at which other ranks reach this one: that of ``GLOO_SOCKET_IFNAME``, else of the route."""
    name = variable("GLOO_SOCKET_IFNAME")
    if name is not None:
        given = psutil.net_if_addrs().get(name.split(",")[0], [])
        found = next((each.address for each in given if each.family == socket.AF_INET), None)
        if found is not None:
            return str(found)
    if settings.nats_url is not None:
        from persia_core.discovery import advertised_host

        return advertised_host(settings.nats_url)
    host, port = _master()
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # nothing is sent: it only chooses the route
        return str(probe.getsockname()[0])


def _master() -> tuple[str, int]:
    host, port = variable("MASTER_ADDR"), variable("MASTER_PORT")
    if host is None or port is None or not port.isdecimal():
        error = UsageError(
            "--matrix: RANK is set, but there is neither PERSIA_NATS_URL nor MASTER_ADDR and MASTER_PORT"
        )
        error.hint = "set them as the ranks have them; or unset RANK, to connect ranks of this host"
        raise error
    return host, int(port)


def _met(rank: int, size: int) -> "Peers":
    """Return the other ranks, which have found rank 0 by NATS, or at ``MASTER_ADDR``."""
    from persia.distributed import handshake

    introduction = handshake.Introduction(
        job=f"{job_name()[:57]}{_SUFFIX}",
        rank=rank,
        world_size=size,
        version=__version__,
        host=socket.gethostname(),
        pid=os.getpid(),
        token=tokens.token("trainer") or "",
    )
    if settings.nats_url is not None:
        return _met_by_nats(introduction)
    host, port = _master()
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return handshake.host(socket.create_server((host, port), family=family), introduction, settings.start_timeout)
    return _joined(introduction, lambda: (host, port))


def _met_by_nats(introduction: "Introduction") -> "Peers":
    from persia.discovery import services
    from persia.distributed import handshake
    from persia_core.discovery import Discovery, advertised_host

    url = services.nats_url()
    discovery = Discovery(url, introduction.job, tokens.token_file())
    try:
        services.wait_connected(discovery, settings.start_timeout)
        if introduction.rank != 0:
            return _joined(introduction, lambda: _rank_0(services.trainers(discovery)))
        host = advertised_host(url)
        listener = handshake.listen(host)
        place = f"{host}:{listener.getsockname()[1]}"
        announced = discovery.announce(services.TRAINER, 0, introduction.world_size, "", {"peers": place, "rank": "0"})
        try:
            return handshake.host(listener, introduction, settings.start_timeout)
        finally:
            announced.close()
    finally:
        discovery.close()


def _rank_0(found: list[dict[str, str]]) -> tuple[str, int] | None:
    place = next((each["peers"] for each in found if each["index"] == "0" and "peers" in each), None)
    if place is None:
        return None
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


def _joined(introduction: "Introduction", find: Callable[[], tuple[str, int] | None]) -> "Peers":
    """Connect to rank 0; repeat until it is there, or ``PERSIA_START_TIMEOUT`` is over."""
    from persia.distributed import handshake

    deadline, why = time.monotonic() + settings.start_timeout, "rank 0 has not announced itself to NATS"
    while True:
        place = find()
        try:
            if place is not None:
                return handshake.join(place, introduction, min(5.0, settings.start_timeout))
        except UnreachableError as error:
            why = str(error)
        if time.monotonic() > deadline:
            late = UnreachableError(f"{why}; waited {settings.start_timeout:g} s (PERSIA_START_TIMEOUT)")
            late.hint = f"start it on every rank: RANK=R persia doctor --matrix {introduction.world_size}"
            raise late
        time.sleep(_PERIOD_S)


def of(found: Matrix) -> Iterator[Check]:
    """Yield a check with the whole matrix, and one of each connection that fails.

    Args:
        found: The connections.
    """
    failed = [
        (source, target, outcome, reason)
        for source, row in enumerate(found.rows)
        for target, (outcome, reason) in enumerate(row)
        if outcome not in ("", "reached")
    ]
    count = len(found.seats) * (len(found.seats) - 1)
    said = f"{len(failed)} of {count} connections fail" if failed else f"all {count} connections are open"
    shown = "\n".join([f"{len(found.seats)} ranks, {said}", *_table(found)])
    why = "collectives of these ranks would hang" if failed else ""
    yield Check("matrix", "fail" if failed else "ok", shown, why, "", ExitCode.UNREACHABLE)
    for source, target, outcome, reason in failed:
        seat, other = found.seats[target], found.seats[source]
        text = f"rank {source} ({other.host}) to rank {target} ({seat.host}) at {seat.address}: {outcome}"
        yield Check("connection", "fail", text, reason, _next(outcome, seat, other), ExitCode.UNREACHABLE)


def _next(outcome: str, seat: Seat, other: Seat) -> str:
    """Return what to do about a connection that fails."""
    if outcome == "unresolved":
        return f"getent hosts {shlex.quote(seat.address)}"
    if outcome == "filtered":
        return f"let all TCP ports of {seat.address} through for {other.address}: gloo and NCCL use any free one"
    return f"{seat.address} is not reached: name another interface of {seat.host}, GLOO_SOCKET_IFNAME or dist.interface"


def _table(found: Matrix) -> list[str]:
    """Return the matrix as lines: a row for each rank that connects, a column for each that is connected to."""
    shown = [["-" if not one else "ok" if one == "reached" else one for one, _ in row] for row in found.rows]
    heads = ["from \\ to", *(f"rank {rank}" for rank in range(len(found.seats)))]
    lines = [heads, *([f"rank {rank} {found.seats[rank].host}", *row] for rank, row in enumerate(shown))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
