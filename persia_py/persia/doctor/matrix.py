"""Checks the connections of ranks: each rank connects to every other rank, and all ranks get the list of failures."""

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from persia import __version__
from persia.doctor import link_speed, network
from persia.doctor.check import Check
from persia.runtime import tokens
from persia.runtime.errors import RunLostError, UnreachableError, UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.job import job_name
from persia.runtime.settings import reload_env, settings, variable

if TYPE_CHECKING:
    from persia.distributed.control_plane import Peers
    from persia.distributed.handshake import Introduction

_PERIOD_S = 0.2
"""Seconds between two attempts to find rank 0."""
_SUFFIX = "-doctor"
"""The suffix of the job in which the ranks of this check meet. The separate job leaves ranks in training unaffected."""


@dataclass(frozen=True)
class Seat:
    """The address of a rank.

    Attributes:
        host: The name of its host.
        address: The address at which other ranks reach it.
        port: A port on which it listens. The kernel chooses it, as it does for gloo and NCCL.
    """

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Matrix:
    """The results of all connections.

    Attributes:
        seats: The address of each rank, by rank.
        rows: For each rank, its connections to the ranks: an outcome and a reason; empty for itself.
        speeds: The speed of each connection, by its source and target ranks; empty if not measured.
    """

    seats: list[Seat]
    rows: list[list[tuple[str, str]]]
    speeds: dict[tuple[int, int], str] = field(default_factory=dict)


def here(size: int, *, measure: bool = False) -> Iterator[Check]:
    """Yield the checks of the rank ``RANK``. The other ranks run the same check.

    Args:
        size: The number of ranks.
        measure: Whether to measure the connections, one after another, if all ranks request this.

    Raises:
        UsageError: ``WORLD_SIZE`` differs from ``size``, the rank is not below it, or no rendezvous address is set.
        UnreachableError: Ranks did not connect; the message names the missing ones.
    """
    if (given := variable("WORLD_SIZE")) not in (None, str(size)):
        raise UsageError(
            f"--matrix {size} contradicts WORLD_SIZE={given}", hint=f"specify the number of all ranks: --matrix {given}"
        )
    os.environ["WORLD_SIZE"] = str(size)
    reload_env()
    yield network.interfaces()
    if settings.nats_url is None and settings.rank == 0:
        yield from _rendezvous()
    yield from of(connected(settings.rank, size, measure=measure))


def on_this_host(size: int, *, as_json: bool, measure: bool = False) -> int:
    """Run the check with all ranks on this host; rank 0 prints. Return its exit code.

    Args:
        size: The number of ranks.
        as_json: Whether to print JSON.
        measure: Whether to measure each connection.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PERSIA_NATS_URL": "", "WORLD_SIZE": str(size)}
    options = [*(["--json"] if as_json else []), *(["--measure"] if measure else [])]
    words = [sys.executable, "-m", "persia", "doctor", "--matrix", str(size), *options]
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
        UsageError: Rank 0 cannot listen on the port.
    """
    host = variable("MASTER_ADDR")
    if host is not None and not network.is_here(host):
        raise UsageError(
            f"--matrix: rank 0 listens at MASTER_ADDR={host}, which is not an address of this host",
            hint="set MASTER_ADDR on all ranks to the address of rank 0's host; or run RANK=0 on that host",
        )
    for check in network.rendezvous():
        yield check
        if check.status == "fail" or "in use" in check.found:
            raise UsageError(
                f"--matrix: rank 0 cannot listen: {check.found}",
                hint=check.next or "end the run that uses the port, or set MASTER_PORT to another one",
            )


def connected(rank: int, size: int, *, measure: bool = False) -> Matrix:
    """Meet the other ranks, connect to each, and return the connections of all ranks.

    Args:
        rank: This rank.
        size: The number of ranks.
        measure: Whether to measure each connection, if all ranks request this.

    Raises:
        UsageError: There is neither a job nor a rendezvous.
        UnreachableError: Ranks did not connect.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=max(128, size), dualstack_ipv6=dual) as server:
        peers = _met(rank, size)
        try:
            mine = [socket.gethostname(), address(), server.getsockname()[1], measure]
            said = peers.all_gather("doctor: addresses", mine)
            seats = [Seat(*each[:3]) for each in said]
            row = [_outcome(seat) if other != rank else ["", ""] for other, seat in enumerate(seats)]
            rows = peers.all_gather("doctor: connections", row)
            speeds = {}
            if all(each[3] for each in said):
                link_speed.serve(server)
                speeds = _measured(peers, rank, seats, rows)
            peers.all_gather("doctor: end", None)  # keeps all ranks listening until the end
        except BaseException as error:
            peers.leave(f"{type(error).__name__}: {error}")
            if isinstance(error, RunLostError):
                error.hint = _start(size)
            raise
        peers.leave(None)
    return Matrix(seats, [[(str(one), str(why)) for one, why in row] for row in rows], speeds)


def _measured(peers: "Peers", rank: int, seats: list[Seat], rows: list[list[list[str]]]) -> dict[tuple[int, int], str]:
    """Measure the open connections, one after another, to avoid interference. All ranks call this."""
    found: dict[tuple[int, int], str] = {}
    for source, row in enumerate(rows):
        for target, (outcome, _) in enumerate(row):
            if outcome != "reached":
                continue
            mine = ""
            if rank == source:
                try:
                    mine = str(link_speed.measure(seats[target].address, seats[target].port))
                except OSError as error:
                    mine = f"not measured: {error}"
            found[source, target] = str(peers.all_gather(f"doctor: speed {source} {target}", mine)[source])
    return found


def _outcome(seat: Seat) -> list[str]:
    found = network.reach(seat.address, seat.port)
    return [found.outcome, found.reason]


def address() -> str:
    """Return the address at which other ranks reach this rank: that of ``GLOO_SOCKET_IFNAME``, or that of the route."""
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
        probe.connect(place)  # sends no packet: connecting a UDP socket only selects the route
        return str(probe.getsockname()[0])


def _master() -> tuple[str, int]:
    host, port = variable("MASTER_ADDR"), variable("MASTER_PORT")
    if host is None or port is None or not port.isdecimal():
        raise UsageError(
            "--matrix: RANK is set, but neither PERSIA_NATS_URL nor both MASTER_ADDR and a numeric MASTER_PORT are set",
            hint=f"{network.WHO_SETS}; to connect ranks of this host, unset RANK",
        )
    return host, int(port)


def _met(rank: int, size: int) -> "Peers":
    """Return the other ranks, after meeting through NATS or at ``MASTER_ADDR``."""
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
        return _hosted(socket.create_server((host, port), family=family), introduction)
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
            return _hosted(listener, introduction)
        finally:
            announced.close()
    finally:
        discovery.close()


def _hosted(listener: socket.socket, introduction: "Introduction") -> "Peers":
    """On rank 0: wait for the other ranks."""
    from persia.distributed import handshake

    try:
        return handshake.host(listener, introduction, settings.start_timeout)
    except UnreachableError as error:
        error.hint = _start(introduction.world_size)
        raise


def _start(size: int) -> str:
    """Return the next step if a rank is missing."""
    return f"start the command on every rank: RANK=R persia doctor --matrix {size}"


def _rank_0(found: list[dict[str, str]]) -> tuple[str, int] | None:
    place = next((each["peers"] for each in found if each["index"] == "0" and "peers" in each), None)
    if place is None:
        return None
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


def _joined(introduction: "Introduction", find: Callable[[], tuple[str, int] | None]) -> "Peers":
    """Connect to rank 0. Retry until it exists, or ``PERSIA_START_TIMEOUT`` has passed."""
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
            raise UnreachableError(
                f"{why}; waited {settings.start_timeout:g} s (PERSIA_START_TIMEOUT)",
                hint=_start(introduction.world_size),
            )
        time.sleep(_PERIOD_S)


def of(found: Matrix) -> Iterator[Check]:
    """Yield a check with the whole matrix, and one check for each failed connection.

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
    """Return the next step for a failed connection."""
    if outcome == "unresolved":
        return f"getent hosts {shlex.quote(seat.address)}"
    if outcome == "filtered":
        return f"allow {other.address} to connect to all TCP ports of {seat.address}: gloo and NCCL use any free port"
    return (
        f"instead of the interface with {seat.address}, specify an interface of {seat.host} that other ranks can "
        "reach: GLOO_SOCKET_IFNAME or dist.interface"
    )


def _table(found: Matrix) -> list[str]:
    """Return the matrix as lines: a row for each source rank, a column for each target rank."""

    def cell(source: int, target: int) -> str:
        outcome, _ = found.rows[source][target]
        return "-" if not outcome else found.speeds.get((source, target), "ok") if outcome == "reached" else outcome

    shown = [[cell(source, target) for target in range(len(row))] for source, row in enumerate(found.rows)]
    heads = ["from \\ to", *(f"rank {rank}" for rank in range(len(found.seats)))]
    lines = [heads, *([f"rank {rank} {found.seats[rank].host}", *row] for rank, row in enumerate(shown))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
