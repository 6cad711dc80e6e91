"""How ranks find each other: rank 0 announces itself to NATS, and the other ranks connect to it."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, though not explicitly

from persia import __version__
from persia.discovery import services
from persia.distributed import handshake
from persia.runtime import clock, job, tokens
from persia.runtime.errors import UnreachableError, UsageError
from persia.runtime.settings import settings
from persia_core.discovery import Discovery, advertised_host

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from persia.distributed.control_plane import Peers
    from persia_core.discovery import Announcement

AFTER_OTHERS_S = 30.0
"""Seconds that the steps after the wait for other ranks may take, regardless of the duration of that wait."""


class Rendezvous:
    """The start of a rank, which may take ``PERSIA_START_TIMEOUT`` seconds from construction.

    Args:
        discovery: The discovery of this job.
        url: The address of NATS.
        rank: The rank of this process.
        world_size: The number of ranks of the run.
    """

    def __init__(self, discovery: Discovery, url: str, rank: int, world_size: int) -> None:
        self._discovery, self._url = discovery, url
        self._rank, self._world_size = rank, world_size
        self._job = job.job_name()
        self._address = ""
        self._deadline = clock.now() + settings.start_timeout
        self._listener: socket.socket | None = None
        self._store_listener: socket.socket | None = None

    def left(self, least: float = 1.0) -> float:
        """Return the remaining seconds of ``PERSIA_START_TIMEOUT``, at least ``least``."""
        return max(least, self._deadline - clock.now())

    def open(self) -> dict[str, str]:
        """On rank 0: listen for the other ranks. Return the metadata to announce; it is empty on the other ranks."""
        if self._rank != 0:
            return {}
        self._address = advertised_host(self._url, timeout_s=self.left())
        self._listener = _listen(self._address)
        self._store_listener = _listen(self._address)
        return {
            name: f"{self._address}:{listener.getsockname()[1]}"
            for name, listener in (("peers", self._listener), ("store", self._store_listener))
        }

    def announce(self, address: str, extra: Mapping[str, str]) -> "Announcement":
        """Announce this rank, which serves its feed at ``address``.

        Raises:
            UsageError: Another live process has announced this rank; the first process keeps it.
        """
        announcement = self._discovery.announce(
            services.TRAINER, self._rank, self._world_size, address, {"rank": str(self._rank), **extra}
        )
        try:
            self._refuse_duplicates()
        except BaseException:
            announcement.close()
            raise
        return announcement

    def connect(self) -> "tuple[Peers, Store]":
        """Connect to the other ranks: rank 0 waits for them, and each of them waits for rank 0.

        Raises:
            UnreachableError: A rank did not appear in time; the message names it.
        """
        me = handshake.Introduction(
            job=self._job,
            rank=self._rank,
            world_size=self._world_size,
            version=__version__,
            host=socket.gethostname(),
            pid=os.getpid(),
            token=tokens.token("trainer") or "",
        )
        descriptor = None
        if self._listener is not None and self._store_listener is not None:
            listener, self._listener = self._listener, None  # the listener now belongs to the run
            announced = f"{self._address}:{listener.getsockname()[1]}"
            peers = handshake.host(listener, me, self.left(), announced)
            place = self._address, self._store_listener.getsockname()[1]
            descriptor = self._store_listener.detach()
        else:
            peers, place = self._join_rank_0(me)
        try:
            return peers, _store(*place, self.left(AFTER_OTHERS_S), descriptor)
        except BaseException as error:
            peers.leave(f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Close the listener, unless the run is using it now."""
        for listener in (self._listener, self._store_listener):
            if listener is not None:
                listener.close()

    def _trainers(self) -> list[dict[str, str]]:
        """Return the announcements of the ranks. NATS may be unreachable for a while.

        Raises:
            UnreachableError: NATS is unreachable, and the time limit has passed.
        """
        while True:
            try:
                return services.trainers(self._discovery)
            except UnreachableError:  # discovery logs the error
                if clock.now() > self._deadline:
                    raise

    def _refuse_duplicates(self) -> None:
        mine = f"{socket.gethostname()} {os.getpid()}"
        found = [peer for peer in self._trainers() if peer["index"] == str(self._rank)]
        own = next((peer["started"] for peer in found if f"{peer['host']} {peer['pid']}" == mine), None)
        for peer in found:
            other = f"{peer['host']} {peer['pid']}"
            if other != mine and (own is None or (peer["started"], other) < (own, mine)):
                raise UsageError(
                    f"rank {self._rank} of job {self._job!r} is already running: pid {peer['pid']} on {peer['host']}; "
                    f"pid {os.getpid()} on {socket.gethostname()} has the same RANK",
                    hint="stop one of the two processes, set another RANK, or set another name for this job "
                    "(PERSIA_JOB)",
                )

    def _join_rank_0(self, me: handshake.Introduction) -> "tuple[Peers, tuple[str, int]]":
        """Find rank 0 and connect to it. Retry until it exists or the time limit has passed."""
        nats = _shown(self._url)
        why = f"rank 0 of job {self._job!r} was not found: no trainer of that rank announced itself to NATS at {nats}"
        hint = "start rank 0, with the same PERSIA_NATS_URL and PERSIA_JOB"
        while True:
            found = [peer for peer in self._trainers() if peer["index"] == "0"]
            for peer in sorted(found, key=lambda peer: peer["started"]):
                if "peers" not in peer:
                    why = (
                        f"rank 0 of job {self._job!r} runs with WORLD_SIZE=1, but rank {self._rank} with "
                        f"WORLD_SIZE={self._world_size}"
                    )
                    hint = "start every rank with the same WORLD_SIZE"
                    continue
                try:
                    return handshake.join(_address(peer["peers"]), me, min(5.0, self.left())), _address(peer["store"])
                except UnreachableError as error:
                    why, hint = str(error), error.hint
            if clock.now() > self._deadline:
                waited = f"waited {settings.start_timeout:g} s (PERSIA_START_TIMEOUT)"
                raise UnreachableError(f"{why}; {waited}", hint=hint)


def _listen(address: str) -> socket.socket:
    """Return a socket on a free port of ``address``; with a token, of all interfaces if this host lacks that address.

    Raises:
        UsageError: This host lacks the address, and there is no token.
    """
    try:
        return handshake.listen(address)
    except OSError as error:
        if tokens.token("trainer") is None:
            raise UsageError(
                f"cannot listen on {address}, which rank 0 would announce: {error.strerror}",
                hint="set PERSIA_ADVERTISE to an address of this host, or set PERSIA_TOKEN_FILE, with which rank 0 "
                "listens on all addresses",
            ) from error
        return handshake.listen("0.0.0.0")  # noqa: S104  # the announced address may be translated


def _store(host: str, port: int, timeout_s: float, descriptor: int | None = None) -> "Store":
    """Return torch's store. A rank that passes the ``descriptor`` of a listening socket serves the store."""
    try:
        return TCPStore(
            host,
            port,
            is_master=descriptor is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        why = next(iter(str(error).splitlines()), "no reason given")
        if descriptor is not None:
            raise UnreachableError(
                f"rank 0 cannot serve torch's store at {host}:{port}: {why}",
                hint="correct the cause, then restart all ranks",
            ) from error
        raise UnreachableError(
            f"cannot connect to torch's store of rank 0 at {host}:{port}: {why}",
            hint="see the output of rank 0; if rank 0 runs, check whether a firewall drops packets to this port",
        ) from error


def _shown(url: str) -> str:
    """Return only host and port of a URL, because other parts may include a password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
